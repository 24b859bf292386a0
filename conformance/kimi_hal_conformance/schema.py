"""The JSON report of a run: its schema, how it is made of verdicts, and how it is read back.

``python -m kimi_hal_conformance.schema FOLDER`` writes the published JSON Schemas (``docs/schema``).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kimi_hal_conformance import files, levels
from kimi_hal_conformance.verdict import (
    AGAINST,
    NOT_RUN,
    PASSED,
    REFUSED,
    STATUSES,
    WAIVED,
    CouldBe,
    OnTrial,
    Standing,
    Verdict,
    Waiver,
)

#: Raised when a reader of the old JSON would misread the new one. A new optional field does not raise it.
#: 2: the status ``waived``. 3: ``environment``, the word ``verdict``, and counts by implementation.
SCHEMA_VERSION = 3

#: The one word on a run.
CONFORMS, DOES_NOT_CONFORM = "conforms", "does_not_conform"
#: Nothing speaks against the backend, nor for it.
NOTHING_PASSED, NOTHING_RAN = "nothing_passed", "nothing_ran"
#: It was stopped before every case had its verdict.
INTERRUPTED = "interrupted"
VERDICTS = (CONFORMS, DOES_NOT_CONFORM, NOTHING_PASSED, NOTHING_RAN, INTERRUPTED)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a run was made.

    Args:
        execution: how the kernels ran: native, portable, interpreted.
        profile: which cases: one of ``suite.PROFILES``, or ``"cases"`` where single ones were named.
        seed: of the operands.
        repeats: calls beside the first of what is declared deterministic.
        versions: of the backend, of kimi-hal, of libraries that its capabilities require, of what the device's
            hooks name.
        devices: what the backend's probe found.
        python: version of the interpreter that ran the suite.
        platform: operating system and processor.
        started: UTC, ISO 8601.
        seconds: of the whole run.
        resumed: when the earlier run started from which this one went on; empty if from none.
        limited_to: operators, implementation, cases and targets that alone were asked for; empty: everything.
        variables: of the backend's own (``KIMI_HAL_<BACKEND>_…``), those that were set, and to what.
    """

    execution: str
    profile: str
    seed: int
    repeats: int
    versions: dict[str, str]
    devices: tuple[str, ...]
    python: str
    platform: str
    started: str
    seconds: float
    resumed: str = ""
    limited_to: tuple[str, ...] = ()
    variables: dict[str, str] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A case that speaks against an implementation: failed, crashed or hung, and not waived.

    Args:
        case: its id, or ``"<operator>/*"`` for what is said of all cases of an operator.
        status: failed, crashed or hung.
        problems: sentences.
        replay: the command that runs the case again; empty for what is said of all cases.
        smallest: the smallest part of the case that still fails.
        input: what that part is, operand by operand.
    """

    case: str
    status: str
    problems: tuple[str, ...]
    replay: str
    smallest: str
    input: str


class Tested(Standing, frozen=True, kw_only=True):
    """One implementation of one operator: what exactly was tested, where it stands, and what failed.

    Args:
        version: of the library that it wraps, or of the plugin.
        source_hash: over its sources and version; empty where there is nothing to hash.
        numerics: the classes of rounding beyond the contract that it declares.
        conforming: its tie rule is the contract's; else it is reached by name only.
        passed: cases that are right.
        failed: cases that failed, crashed or hung.
        waived: cases that did, as a live waiver admits.
        refused: cases that it does not claim.
        not_run: cases that the suite left out, each with its reason in ``cases``.
        failures: the ``failed`` cases.
    """

    version: str
    source_hash: str
    numerics: tuple[str, ...]
    passed: int
    failed: int
    waived: int
    refused: int
    not_run: int
    failures: tuple[Failure, ...]
    conforming: bool = True


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: who was tested, where, and every verdict. Nothing is left out of ``cases``.

    Args:
        schema: ``SCHEMA_VERSION`` of the suite that wrote it.
        suite_version: the suite's.
        backend: its name.
        environment: where and how it was run.
        verdict: one of ``VERDICTS``.
        implementations: those on trial.
        not_implemented: operators of the contract that the backend does not implement, of those asked for.
        verdicts: ``cases`` in JSON: every case of every implementation.
        waivers: all that were given, used or not.
        could_be_claimed: what passed although it is not claimed; it counts neither for nor against anybody.
    """

    schema: int
    suite_version: str
    backend: str
    environment: Environment
    verdict: str
    implementations: tuple[Tested, ...]
    not_implemented: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = msgspec.field(name="cases")
    waivers: tuple[Waiver, ...] = ()
    could_be_claimed: tuple[CouldBe, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether the run speaks for the backend."""
        return self.verdict == CONFORMS

    def counts(self) -> dict[str, int]:
        """Return how many verdicts have each status."""
        return {s: sum(v.status == s for v in self.verdicts) for s in STATUSES}


def compose(
    *,
    suite_version: str,
    backend: str,
    environment: Environment,
    on_trial: Sequence[OnTrial],
    not_implemented: Sequence[str],
    verdicts: Sequence[Verdict],
    waivers: Sequence[Waiver] = (),
    interrupted: bool = False,
    could_be_claimed: Sequence[CouldBe] = (),
) -> Report:
    """Return the report of a run: what its verdicts say of each implementation, and of all of them in a word."""
    return Report(
        schema=SCHEMA_VERSION,
        suite_version=suite_version,
        backend=backend,
        environment=environment,
        verdict=INTERRUPTED if interrupted else word(verdicts, waivers),
        implementations=tuple(tested(on_trial, verdicts)),
        not_implemented=tuple(not_implemented),
        verdicts=tuple(verdicts),
        waivers=tuple(waivers),
        could_be_claimed=tuple(could_be_claimed),
    )


def word(verdicts: Iterable[Verdict], waivers: Iterable[Waiver] = ()) -> str:
    """Return the one word on a run that came to its end.

    What did not pass speaks against the backend unless a live waiver admits it; so does a waiver with a
    problem. Something must have passed.
    """
    statuses = {v.status for v in verdicts}
    if statuses & {*AGAINST} or any(w.problem for w in waivers):
        return DOES_NOT_CONFORM
    if PASSED in statuses:
        return CONFORMS
    return NOTHING_PASSED if WAIVED in statuses else NOTHING_RAN


def tested(on_trial: Sequence[OnTrial], verdicts: Sequence[Verdict]) -> Iterator[Tested]:
    """Yield every implementation of every operator, those without a verdict too."""
    about = {(i.operator, i.implementation): i for i in on_trial}
    mine: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        mine[verdict.operator, verdict.implementation].append(verdict)
    for operator, name in dict.fromkeys((*about, *mine)):
        unknown = OnTrial(operator=operator, implementation=name, version="", source_hash="")
        yield _tested(about.get((operator, name), unknown), mine[operator, name])


def _tested(about: OnTrial, verdicts: Sequence[Verdict]) -> Tested:
    standing = levels.standing(about.operator, about.implementation, verdicts)
    statuses = [v.status for v in verdicts]
    return Tested(
        **msgspec.structs.asdict(standing),
        version=about.version,
        source_hash=about.source_hash,
        numerics=about.numerics,
        conforming=about.conforming,
        passed=statuses.count(PASSED),
        failed=sum(s in AGAINST for s in statuses),
        waived=statuses.count(WAIVED),
        refused=statuses.count(REFUSED),
        not_run=statuses.count(NOT_RUN),
        failures=tuple(_failure(v) for v in verdicts if v.status in AGAINST),
    )


def _failure(verdict: Verdict) -> Failure:
    return Failure(**{name: getattr(verdict, name) for name in Failure.__struct_fields__})


def read(text: bytes) -> Report:
    """Read a report.

    Raises:
        ValueError: it is none, or of another schema version.
    """
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no report: {error}") from None
    except RecursionError:
        raise ValueError("this is no report: it is nested without end") from None
    version = _version(data)
    if version is None:
        raise ValueError("this is no report: it has no schema")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"this report has schema version {version!r}, this suite reads {SCHEMA_VERSION}; "
            "read it with the suite that wrote it, or run the backend again"
        )
    if "mutants" in data:
        raise ValueError("this is no report of a backend: `kimi-hal conformance prove` wrote it")
    found = msgspec.convert(data, type=Report)
    for what, said, known in (
        ("verdict", {found.verdict}, VERDICTS),
        ("status", {v.status for v in found.verdicts}, STATUSES),
    ):
        for wrong in sorted(said - {*known}):
            raise ValueError(f"this is no report: {wrong!r} is no {what}; there are {', '.join(known)}")
    return found


def _version(data: object) -> object:
    """Return the schema version, also of a report that an early suite wrote under another name."""
    return data.get("schema", data.get("schema_version")) if isinstance(data, dict) else None


def published() -> dict[str, bytes]:
    """Return the JSON Schemas of all that the suite writes, by file name."""
    from kimi_hal_conformance.prove import Proof

    kinds = {"report.json": Report, "proof.json": Proof}
    return {name: files.as_json(msgspec.json.schema(kind)) for name, kind in kinds.items()}


if __name__ == "__main__":
    for file, text in published().items():
        (Path(sys.argv[1]) / file).write_bytes(text)
