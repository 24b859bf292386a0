"""Go on from an earlier run: what passed or was refused there under the same conditions is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kimi_hal.dispatch.matching import distribution
from kimi_hal.errors import KimiHalError
from kimi_hal_conformance.schema import Report, Tested
from kimi_hal_conformance.schema import read as read_report
from kimi_hal_conformance.verdict import PASSED, REFUSED, OnTrial, Verdict

#: What is not tried again. What failed, was lost, was waived or did not run is.
KEPT = (PASSED, REFUSED)


class ResumeError(KimiHalError):
    """An earlier report from which this run cannot go on."""


def read(path: Path) -> Report:
    """Read an earlier report.

    Raises:
        ResumeError: it is not there, or is none that this suite reads.
    """
    try:
        return read_report(path.read_bytes())
    except OSError as error:
        raise ResumeError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ResumeError(f"{path}: {error}") from None


def check(
    earlier: Report, now: Mapping[str, object], versions: Mapping[str, str], variables: Mapping[str, str]
) -> None:
    """Refuse a report of other conditions.

    Args:
        earlier: the report.
        now: this run's ``suite_version``, ``backend``, ``execution``, ``profile`` and ``seed``.
        versions: this run's, as far as they are known before a device is touched.
        variables: of the backend's own, those that are set in this run.

    Raises:
        ResumeError: names every difference.
    """
    found = [*_differences(earlier, now, versions), *_otherwise(earlier.environment.variables, variables)]
    if found:
        raise ResumeError(
            f"cannot resume the run of {earlier.environment.started}: {'; '.join(found)}. Run without --resume"
        )


def _differences(earlier: Report, now: Mapping[str, object], versions: Mapping[str, str]) -> Iterator[str]:
    for name, value in now.items():
        before = getattr(earlier if hasattr(earlier, name) else earlier.environment, name)
        if before != value:
            yield f"its {name} is {before!r}, this run's {value!r}"
    for name, before in earlier.environment.versions.items():
        here = versions.get(name) or distribution(name)  # neither has what only a device's hooks name
        if here and _public(here) != _public(before):
            yield f"its {name} is version {before}, here it is {here}"


def _otherwise(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        was, here = (repr(where[name]) if name in where else "not set" for where in (before, now))
        if was != here:
            yield f"its {name} was {was}, here it is {here}"


def _public(version: str) -> str:
    """Return a version without its local part: a wheel's metadata may lack what the library says of its build."""
    return version.partition("+")[0]


def kept(
    earlier: Report | None, implementation: OnTrial, cases: Sequence[str], repeats: int
) -> dict[str, Verdict]:
    """Return the earlier verdicts that still hold for these cases of an implementation, by case.

    None hold where its sources changed or have no hash, or were not repeated as this run asks.
    """
    if earlier is None or not implementation.source_hash or earlier.environment.repeats < repeats:
        return {}
    if implementation not in map(_on_trial, earlier.implementations):
        return {}
    return {
        v.case: msgspec.structs.replace(v, kept=True)
        for v in earlier.verdicts
        if (v.operator, v.implementation) == (implementation.operator, implementation.implementation)
        and v.status in KEPT
        and v.case in cases
    }


def to_time(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return kept verdicts without one that passed, if no call was timed: that is done after a case has passed."""
    if any(v.speed is not None for v in verdicts.values()):
        return dict(verdicts)
    again = next((v.case for v in verdicts.values() if v.status == PASSED), None)
    return {case: v for case, v in verdicts.items() if case != again}


def _on_trial(tested: Tested) -> OnTrial:
    return OnTrial(
        operator=tested.operator,
        implementation=tested.name,
        version=tested.version,
        source_hash=tested.source_hash,
        numerics=tested.numerics,
        conforming=tested.conforming,
    )
