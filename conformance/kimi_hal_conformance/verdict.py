"""What the suite says of one case, and of a whole run: the report's schema."""

from __future__ import annotations

import msgspec

#: Raised when a reader of the old JSON would misread the new one.
SCHEMA_VERSION = 1

PASSED, FAILED, CRASHED, HUNG, REFUSED, NOT_RUN = "passed", "failed", "crashed", "hung", "refused", "not_run"
STATUSES = (PASSED, FAILED, CRASHED, HUNG, REFUSED, NOT_RUN)


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One compared tensor: its error beside what its budget allows.

    ``norm`` and ``maximum`` are fractions of the budget, so that 1.0 is the limit for every dtype and
    operator; ``exact`` marks a discrete comparison, whose fraction is 0 or infinite.
    """

    tensor: str
    exact: bool
    norm: float = 0.0
    maximum: float = 0.0
    rounding: float = 0.0
    accumulation: float = 0.0
    problem: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one case. ``problems`` is empty exactly if it passed."""

    case: str
    operator: str
    implementation: str
    status: str
    problems: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    seconds: float = 0.0
    seed: int = 0
    replay: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: who was tested, where, and every verdict. Nothing is left out of ``verdicts``."""

    schema_version: int
    suite_version: str
    backend: str
    execution: str
    profile: str
    versions: dict[str, str]
    devices: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """Tell whether the run proves the backend: something ran, and all that ran passed."""
        ran = [v for v in self.verdicts if v.status != NOT_RUN]
        return bool(ran) and all(v.status == PASSED for v in ran)

    def counts(self) -> dict[str, int]:
        """Return how many verdicts have each status."""
        return {s: sum(v.status == s for v in self.verdicts) for s in STATUSES}


def read(text: bytes) -> Report:
    """Read a report, refusing another schema version with a sentence."""
    version = msgspec.json.decode(text, type=dict).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"this report has schema version {version}, this suite reads {SCHEMA_VERSION}; "
            "run the suite that wrote it, or run the backend again"
        )
    return msgspec.json.decode(text, type=Report)
