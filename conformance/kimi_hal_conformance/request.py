"""What was asked of the suite, and how much of it each profile does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_hal_conformance.case import FULL, INTERP, QUICK, STANDARD
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import Waiver

#: Calls beside the first of what is declared deterministic; an interpreter takes seconds for each.
REPEATS = {INTERP: 0, QUICK: 1, STANDARD: 19, FULL: 19}
#: The profile of a run in which single cases are named.
NAMED = "cases"
REPEATS_OF_NAMED = 1
#: Of how many cases of an implementation relations and capture are tried: the first that have rows to take apart.
RELATIONS = {INTERP: 0, QUICK: 2, STANDARD: 16, FULL: 1 << 20}
RELATIONS_OF_NAMED = 1 << 20


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line.

    Args:
        backend: an installed backend.
        execution: native, portable or interpreted.
        profile: one of ``PROFILES``; empty: ``interp`` where kernels are interpreted, else ``quick``.
        only: case ids; empty: all of the profile.
        implementation: full name of the one implementation to try; empty: all of the backend.
        seed: of the operands.
        limit: seconds of one case; ``None``: by execution.
        lanes: processes at once; ``None``: one on a device, one a core (4 at most) where all is on the host.
        waivers: failures that are admitted.
        repeats: calls of a case beside the first where determinism is declared; ``None``: by profile.
        resume: an earlier report, whose verdicts that still hold are kept.
        undeclared: whether what is not claimed is tried, for "could be claimed"; ``None``: on the host, from the
            standard profile on.
        operators: these alone; empty: all of the contract.
    """

    backend: str
    execution: str = "native"
    profile: str = ""
    only: Sequence[str] = ()
    implementation: str = ""
    seed: int = 0
    limit: float | None = None
    lanes: int | None = None
    waivers: Sequence[Waiver] = ()
    repeats: int | None = None
    resume: Report | None = None
    undeclared: bool | None = None
    operators: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Let what is named twice count once."""
        for name in ("only", "operators"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))

    @property
    def limited_to(self) -> tuple[str, ...]:
        """Return what alone is asked for: operators, an implementation, cases; empty: everything."""
        return *self.operators, *filter(None, (self.implementation,)), *self.only

    @property
    def chosen_repeats(self) -> int:
        """Return how often a call is repeated."""
        if self.repeats is not None:
            return self.repeats
        return REPEATS.get(self.chosen_profile, REPEATS_OF_NAMED)

    @property
    def chosen_relations(self) -> int:
        """Return of how many cases of an implementation more than the values and bits of a call is tried."""
        return RELATIONS.get(self.chosen_profile, RELATIONS_OF_NAMED)

    @property
    def chosen_profile(self) -> str:
        """Return the profile that is run."""
        if self.only:
            return NAMED
        return self.profile or (INTERP if self.execution == "interpreted" else QUICK)
