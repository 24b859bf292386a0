"""A backend's kernels compiled for all its targets, once a test run, however many tests and processes look at them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from once import once

from kimi_hal_conformance.code import Code
from kimi_hal_conformance.compiling.run import OF_PARTS, OWN_CODE, CompileRequest, run
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import NOT_RUN, PASSED


def compiled(backend: str) -> Report:
    """Compile everything; a tool that is missing fails."""

    def make() -> object:
        return msgspec.to_builtins(run(CompileRequest(backend, lanes=2, strict=True)))

    return msgspec.convert(once(f"compile-{backend}", make), type=Report)


def wrong(report: Report) -> list[str]:
    """Return what is neither right nor left out for a good reason: it has no code of its own, or not for a target."""
    return [
        f"{v.implementation} {v.case}: {v.status}: {'; '.join(v.problems)}\n{v.output}"
        for v in report.verdicts
        if v.status != PASSED and not (v.status == NOT_RUN and _left_out(v.problems[0]))
    ]


def _left_out(why: str) -> bool:
    return why in (OWN_CODE, OF_PARTS) or why.startswith("no kernel for ")


def codes(report: Report, target: str, operator: str = "") -> Iterator[tuple[str, Code]]:
    """Yield ``"<operator>/<kernel>"`` and the code of every kernel of a target."""
    for verdict in report.verdicts:
        _, of, kernel, name = verdict.case.split("/", 3)
        if verdict.code is not None and name == target and operator in ("", of):
            yield f"{of}/{kernel}", verdict.code


def holds(code: Code, pattern: str) -> bool:
    """Tell whether an expected instruction was found whose opcode begins with a pattern."""
    return any(re.match(pattern, op) for s in code.searched if s.expected for op in s.found)
