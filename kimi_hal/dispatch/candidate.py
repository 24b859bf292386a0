"""What is known of one implementation for one request, and how an explanation says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Split
from kimi_hal.dispatch.loader import Loaded
from kimi_hal.dispatch.tuned import Entry


@dataclass(frozen=True)
class Candidate:
    """One line of an explanation.

    Args:
        full_name: ``backend.implementation``.
        refusals: every reason why it was not taken; empty for what fits.
        chosen: it was taken.
        execution: how it would run.
        rank: its largest preference that matches, ``None`` if none does.
        measured: where that rank comes from.
        numerics: classes of rounding beyond the contract.
        conforming: its tie rule is the contract's.
        split: which compute unit does what, by architecture.
    """

    full_name: str
    refusals: tuple[str, ...]
    chosen: bool
    execution: str = "native"
    rank: int | None = None
    measured: str = ""
    numerics: tuple[str, ...] = ()
    conforming: bool = True
    split: tuple[Split, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        split = {arch: dict(item.parts) for item in self.split for arch in item.arch}
        own = asdict(replace(self, split=()))
        return own | {"refusals": list(self.refusals), "numerics": list(self.numerics), "split": split}


@dataclass(frozen=True)
class Assessment:
    """What is known of one implementation for one request.

    Args:
        loaded: its backend.
        implementation: it.
        capability: the first of its capabilities that covers the request, or ``None``.
        execution: how it would run.
        bars: what is asked for is something else.
        refusals: what it does not cover, or lacks here.
        preference: the one with the largest rank that matches, or ``None``.
        entry: what a table of measurements says of it, or ``None``.
    """

    loaded: Loaded
    implementation: Implementation
    capability: Capability | None
    execution: str
    bars: tuple[str, ...]
    refusals: tuple[str, ...]
    preference: Preference | None
    entry: Entry | None = None

    @property
    def full_name(self) -> str:
        """Return ``backend.implementation``."""
        return f"{self.loaded.name}.{self.implementation.name}"

    @property
    def rank(self) -> float:
        """Return the rank that decides; below every number where no preference matches."""
        return self.preference.rank if self.preference else -float("inf")

    @property
    def conforming(self) -> bool:
        """Tell whether the tie rule is the contract's."""
        return self.capability is None or self.capability.properties.tie_rule == "contract"

    def candidate(self, chosen: bool = False, beaten: tuple[str, ...] = ()) -> Candidate:
        """Return the line of an explanation; ``beaten`` says what was preferred to one that fits."""
        return Candidate(
            full_name=self.full_name,
            refusals=() if chosen else (*self.bars, *self.refusals) or beaten,
            chosen=chosen,
            execution=self.execution,
            rank=self.preference.rank if self.preference else None,
            measured=self.preference.measured if self.preference else "",
            numerics=self.implementation.numerics,
            conforming=self.conforming,
            split=self.implementation.split,
        )
