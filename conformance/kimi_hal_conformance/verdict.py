"""What the suite says of one case, and of a whole run: the report's schema."""

from __future__ import annotations

from datetime import date

import msgspec

#: Raised when a reader of the old JSON would misread the new one. A new optional field does not raise it.
#: 2: the status ``waived``.
SCHEMA_VERSION = 2

#: It was launched: the answer is right; it is wrong; the process died; it did not answer in time.
PASSED, FAILED, CRASHED, HUNG = "passed", "failed", "crashed", "hung"
#: It was not launched: the implementation does not claim the Spec; the suite left it out and says why.
REFUSED, NOT_RUN = "refused", "not_run"
#: It did not pass, and a live waiver admits that.
WAIVED = "waived"
STATUSES = (PASSED, FAILED, CRASHED, HUNG, WAIVED, REFUSED, NOT_RUN)
#: What speaks against an implementation.
AGAINST = (FAILED, CRASHED, HUNG)


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One compared tensor: its error beside what its budget allows.

    ``norm`` and ``maximum`` are fractions of the budget, so that 1.0 is the limit for every dtype and
    operator; ``None`` where there is no finite fraction: a discrete result differs, a NaN stands elsewhere.
    ``exact`` marks a discrete comparison, whose fraction is 0 or ``None``. ``rounding``, ``accumulation`` and
    ``inner`` are the root mean squares of the unavoidable errors from which the budget was made.
    """

    tensor: str
    exact: bool
    norm: float | None = 0.0
    maximum: float | None = 0.0
    rounding: float = 0.0
    accumulation: float = 0.0
    inner: float = 0.0
    problem: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one case of one implementation.

    Args:
        case: its id, or ``"<operator>/*"`` for what is said of all cases of an operator.
        operator: the abstract operator.
        implementation: full name, ``backend.implementation``.
        status: one of ``STATUSES``.
        problems: sentences; empty exactly if it passed.
        measures: one a compared tensor, by rank where there are several.
        seconds: of planning, running and judging.
        seed: of the operands.
        fault: the class of ``docs/faults.md`` that the case reproduces, or 0.
        output: where it did not pass, the end of what the process printed and of the traceback.
        replay: the command that runs the case again.
        was: the status that a waiver admits; empty where nothing is waived.
        waiver: its reason, link and last day.
        level: what it speaks for (``levels.py``): the case's own, 3 where only a promise about bits is broken,
            0 for what is said of all cases.
        kept: it is an earlier run's, from which this one went on.
        promises: that were tried beside the values: ``deterministic``, ``batch_invariant``.
    """

    case: str
    operator: str
    implementation: str
    status: str
    problems: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    seconds: float = 0.0
    seed: int = 0
    fault: int = 0
    output: str = ""
    replay: str = ""
    was: str = ""
    waiver: str = ""
    level: int = 0
    promises: tuple[str, ...] = ()
    kept: bool = False


class Waiver(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that is known and admitted for a while, and what became of that in this run.

    Args:
        case: id, or ``"<operator>/*"`` for what is said of all cases of an operator.
        implementation: full name; empty: every implementation of the operator.
        reason: why it is admitted.
        link: where it is followed up.
        expires: its last day.
        suite: the version of the suite in which the failure was looked at.
        covers: implementations whose failure it waived in this run.
        problem: why it is a failure itself: stale, not needed, matches nothing; empty if it is none.
        note: why it could not be judged in this run; empty if it was.
    """

    case: str
    implementation: str = ""
    reason: str
    link: str
    expires: date
    suite: str
    covers: tuple[str, ...] = ()
    problem: str = ""
    note: str = ""


class OnTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on trial: what exactly was tested.

    Args:
        operator: the abstract operator.
        implementation: full name.
        version: of the library that it wraps, or of the plugin.
        source_hash: over its sources and version; empty where there is nothing to hash.
        numerics: the classes of rounding beyond the contract that it declares.
    """

    operator: str
    implementation: str
    version: str
    source_hash: str
    numerics: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One level of one implementation: ``reached``, ``failed`` or ``not_tested``, and why it is not reached."""

    level: int
    name: str
    state: str
    why: str = ""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The highest level that an implementation of an operator reached, and what stops it from the next."""

    operator: str
    implementation: str
    reached: int
    stops: str
    steps: tuple[Step, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: who was tested, where, and every verdict. Nothing is left out of ``verdicts``.

    Args:
        schema_version: ``SCHEMA_VERSION`` of the suite that wrote it.
        suite_version: the suite's.
        backend: its name.
        execution: how its kernels ran: native, portable, interpreted.
        profile: which cases: interp, quick, standard, or ``"cases"`` where single ones were named.
        seed: of the operands.
        versions: of the backend, of kimi-hal, of libraries that its capabilities require, of what the device's
            hooks name.
        devices: what the backend's probe found.
        implementations: those on trial.
        not_implemented: operators of the contract that the backend does not implement.
        started: UTC, ISO 8601.
        seconds: of the whole run.
        verdicts: every case of every implementation.
        waivers: all that were given, used or not.
        repeats: calls beside the first of what is declared deterministic.
        resumed: when the earlier run started from which this one went on; empty if from none.
        standings: the level of each implementation of each operator.
    """

    schema_version: int
    suite_version: str
    backend: str
    execution: str
    profile: str
    seed: int
    versions: dict[str, str]
    devices: tuple[str, ...]
    implementations: tuple[OnTrial, ...]
    not_implemented: tuple[str, ...]
    started: str
    seconds: float
    verdicts: tuple[Verdict, ...]
    waivers: tuple[Waiver, ...] = ()
    standings: tuple[Standing, ...] = ()
    repeats: int = 0
    resumed: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether the run speaks for the backend: something passed, and nothing speaks against it.

        What did not pass speaks against it unless a live waiver admits it; so does a waiver with a problem.
        """
        statuses = [v.status for v in self.verdicts]
        against = any(s in AGAINST for s in statuses) or any(w.problem for w in self.waivers)
        return PASSED in statuses and not against

    def counts(self) -> dict[str, int]:
        """Return how many verdicts have each status."""
        return {s: sum(v.status == s for v in self.verdicts) for s in STATUSES}


def read(text: bytes) -> Report:
    """Read a report.

    Raises:
        ValueError: it is none, or of another schema version.
    """
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no report: {error}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise ValueError("this is no report: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"this report has schema version {version}, this suite reads {SCHEMA_VERSION}; "
            "read it with the suite that wrote it, or run the backend again"
        )
    return msgspec.convert(data, type=Report)
