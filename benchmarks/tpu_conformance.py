"""What the suite's reports say of the TPU implementations: ``python -m benchmarks.tpu_conformance COMMIT REPORT…``.

Cases are counted under the first profile that has them. Claims, whose number depends on the profile, stand apart. Of
several verdicts on a case that of the last report which ran it counts. Nothing is run.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import keep
from kimi_hal_conformance.case import CASES
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.schema import read
from kimi_hal_conformance.verdict import NOT_RUN, PASSED, Verdict


def profile(case: str) -> str:
    """Return the first profile that has a case."""
    return CASES[case].since if case in CASES else "claims"


def table(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return of each implementation and operator what became of its cases, and which did not pass."""
    last = {(v.implementation, v.operator, v.case): v for v in verdicts if v.status == NOT_RUN}
    last |= {(v.implementation, v.operator, v.case): v for v in verdicts if v.status != NOT_RUN}
    found: dict[str, Any] = {}
    for (name, operator, case), verdict in sorted(last.items()):
        of = found.setdefault(name, {}).setdefault(operator, {"counts": {}, "not_passed": {}})
        counts = Counter(of["counts"].get(profile(case), {}))
        of["counts"][profile(case)] = dict(counts + Counter({verdict.status: 1}))
        if verdict.status != PASSED:
            of["not_passed"][case] = f"{verdict.status}: {' '.join(verdict.problems)[:300]}"
    return found


def main() -> None:
    """Read the reports, and keep what they say."""
    load()
    commit, *paths = [word for word in sys.argv[1:] if word != "tpu_conformance"] or [""]
    if not paths:
        sys.exit(
            "usage: python -m benchmarks.tpu_conformance COMMIT REPORT..., of JSON reports and what they ran on"
        )
    reports = [read(Path(path).read_bytes()) for path in paths]
    verdicts = [verdict for report in reports for verdict in report.verdicts]
    keep(
        "tpu_conformance",
        {
            "commit": commit,
            "seconds": round(sum(report.environment.seconds for report in reports)),
            "verdicts": table(verdicts),
        },
    )


if __name__ == "__main__":
    main()
