"""A case: an operator, a Spec, sizes, and how to make its operands from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kimi_hal.errors import UnknownNameError, nearest
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal_conformance.fault_classes import CLASSES
from kimi_hal_conformance.sparse import Sparse

#: The profiles, each with all cases of those before it: one fixed list an operator for interpreters; a minute;
#: what a release runs; what takes longer or needs more than a plain machine has.
PROFILES = INTERP, QUICK, STANDARD, FULL = ("interp", "quick", "standard", "full")

#: What stands in the id of a part of a case, between the case's own and what part it is.
PART = ", "

#: Operand name -> tensor, list of tensors, or scalar.
Operands = Mapping[str, Any]
Make = Callable[[torch.Generator], Operands]


class Checkpoint(dict[str, Any]):
    """Weights as a checkpoint holds them: an implementation gets what its own ``plan.weights`` makes of them."""


@dataclass(frozen=True)
class Case:
    """One case of one operator.

    Args:
        id: ``"sparse_mla/tp8/top2048"``; stable, replayed by ``kimi-hal conformance replay``.
        operator: its name.
        spec: what is planned.
        limits: for how much.
        make: operands from a seeded CPU generator.
        since: the first of ``PROFILES`` that it is part of; ``INTERP``: an interpreter runs it in seconds.
        fault: class of ``docs/faults.md`` that the case reproduces, or 0.
        ranks: ranks of a loopback group; ``make`` then returns ``{"ranks": [operands of each rank]}``.
        rank_specs: the Spec of each rank; empty: ``spec`` with the rank in every DCP inside it.
        sparse: operands and outputs that stand in far larger buffers on trial (``sparse.py``).
        why: the reason why it exists, in a sentence; empty: that of its group (``add``), else of its fault class.
    """

    id: str
    operator: str
    spec: Spec
    limits: Limits
    make: Make
    since: str = QUICK
    fault: int = 0
    ranks: int = 0
    rank_specs: tuple[Spec, ...] = ()
    sparse: Mapping[str, Sparse] = field(default_factory=dict)
    why: str = ""

    def runs_in(self, profile: str) -> bool:
        """Tell whether it is part of a profile."""
        return PROFILES.index(self.since) <= PROFILES.index(profile)


CASES: dict[str, Case] = {}
#: Cases of this process that claims make (``claims``): of one implementation, part of no list.
MADE: dict[str, Case] = {}


def add(cases: Iterable[Case], why: Mapping[str, str] | None = None) -> None:
    """Register cases; an id that stands twice is a fault of the suite, and so is a case without a reason.

    Args:
        cases: the cases.
        why: the reasons of groups of cases, by how their ids begin; the longest beginning counts.
    """
    for case in cases:
        assert case.id not in CASES, f"case {case.id} is registered twice"
        reason = case.why or _of_group(case.id, why or {}) or CLASSES.get(case.fault, "")
        assert reason, f"case {case.id} does not say why it exists"
        CASES[case.id] = replace(case, why=reason)


def _of_group(case_id: str, why: Mapping[str, str]) -> str:
    begins = [beginning for beginning in why if case_id.startswith(beginning)]
    return why[max(begins, key=len)] if begins else ""


def find(case_id: str) -> Case | None:
    """Return a case by id, those that claims make included; ``None`` for what stands for no case."""
    return CASES.get(case_id) or MADE.get(case_id)


def get(case_id: str) -> Case:
    """Return a case by id, those that claims make included, or raise with the nearest id."""
    if case_id in MADE:
        return MADE[case_id]
    if case_id not in CASES:
        hint = nearest(case_id, CASES) or "."
        raise UnknownNameError(
            f"unknown case {case_id!r}{hint} `kimi-hal conformance list` prints all {len(CASES)}"
        )
    return CASES[case_id]


#: The operands that were asked for last: of a case, and of the part of it that is tried.
_drawn: dict[tuple[str, Make, int], Operands] = {}


def drawn(case: Case, seed: int) -> Operands:
    """Return a case's operands; while no other case is asked for, the same ones, which no one writes."""
    key = (case.id, case.make, seed)
    if key not in _drawn:
        whole = case.id.partition(PART)[0]
        for other in [k for k in _drawn if k[0] == case.id or k[0] != whole]:
            del _drawn[other]
        _drawn[key] = case.make(generator(case, seed))
    return _drawn[key]


def generator(case: Case, seed: int) -> torch.Generator:
    """Return the case's own generator: the same operands for the same seed, whatever else runs."""
    mixed = hash_text(case.id) ^ seed
    return torch.Generator().manual_seed(mixed & (2**63 - 1))


def nbytes(value: Any) -> int:
    """Return the bytes of every tensor inside a value."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def hash_text(text: str) -> int:
    """Return a stable 64-bit hash (Python's own is salted by process)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
