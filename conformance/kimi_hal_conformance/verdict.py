"""What the suite says of one case, of a waiver, and of an implementation's levels."""

from __future__ import annotations

from datetime import date

import msgspec

from kimi_hal_conformance.code import Code

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
    ``inner`` are the root mean squares of the unavoidable errors from which the budget was made, ``classes`` of
    what each numerics class that the implementation declares costs.
    """

    tensor: str
    exact: bool
    norm: float | None = 0.0
    maximum: float | None = 0.0
    rounding: float = 0.0
    accumulation: float = 0.0
    inner: float = 0.0
    classes: dict[str, float] = {}
    problem: str = ""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How long a call takes beside what the device could do at best: the roofline that was measured in this run.

    Args:
        seconds: of device time, the median of several calls with cold caches.
        bytes: that must be moved: each operand's needed bytes read once, each output written once.
        operations: multiplications and additions that must be made.
        bandwidth: bytes a second of a large copy, read and written.
        rate: operations a second of a large bfloat16 matrix product.
        graph: replays of a captured call were timed, and not launches.
        call: what was timed: formats and the shapes of the operands.
    """

    seconds: float
    bytes: int
    operations: int
    bandwidth: float
    rate: float
    graph: bool
    call: str

    @property
    def floor(self) -> float:
        """Return the seconds that no kernel can be faster than."""
        return max(self.bytes / self.bandwidth, self.operations / self.rate)

    @property
    def fraction(self) -> float:
        """Return the floor as a part of the time that the call took."""
        return self.floor / self.seconds


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
        promises: that were tried beside the values (``promises.py``): ``deterministic``, ``purity``, ``capture``.
        untried: promise -> why it was not tried, where something could be expected.
        speed: where it was timed; no verdict depends on it.
        smallest: where it failed, the smallest part of it that still does: ``"<case>, row 3 of 7"``, or its id.
        input: what that part is, operand by operand; why it is not known where the process was lost.
        code: of a kernel that was compiled and not run.
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
    untried: dict[str, str] = {}
    speed: Speed | None = None
    kept: bool = False
    smallest: str = ""
    input: str = ""
    code: Code | None = None


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


class CouldBe(msgspec.Struct, frozen=True, kw_only=True):
    """A case that an implementation passes and does not claim.

    Args:
        case: its id.
        operator: the abstract operator.
        implementation: full name.
        refusals: what stands between its claims and the case.
        spec: the fields that differ from their defaults, where a walk made the case.
    """

    case: str
    operator: str
    implementation: str
    refusals: tuple[str, ...]
    spec: str = ""


class OnTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on trial: what exactly was tested.

    Args:
        operator: the abstract operator.
        implementation: full name.
        version: of the library that it wraps, or of the plugin.
        source_hash: over its sources and version; empty where there is nothing to hash.
        numerics: the classes of rounding beyond the contract that it declares.
        conforming: its tie rule is the contract's; else it is reached by name only.
    """

    operator: str
    implementation: str
    version: str
    source_hash: str
    numerics: tuple[str, ...] = ()
    conforming: bool = True


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One level of one implementation: ``reached``, ``failed`` or ``not_tested``, and why it is not reached."""

    level: int
    name: str
    state: str
    why: str = ""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The highest level that an implementation of an operator reached, and what stops it from the next.

    Args:
        name: full name, ``backend.implementation``.
        operator: the abstract operator.
        level: the highest that it reached, 0 to 6.
        stops: which level comes next, and what stands in its way.
        steps: all six levels.
    """

    name: str
    operator: str
    level: int
    stops: str
    steps: tuple[Step, ...]
