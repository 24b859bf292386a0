"""A mutant: a right implementation with one line or one constant changed, as a kernel of the field had it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import kimi_hal
from kimi_hal import ops
from kimi_hal.errors import UnknownNameError, nearest

ROOT = Path(kimi_hal.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong implementation, as data.

    Args:
        id: lower-case letters, digits and underscores; it is the implementation's name.
        file: the changed file, relative to ``kimi_hal/``.
        old: what stands there, exactly once.
        new: what stands there instead.
        breaks: what is wrong, in one sentence.
        imitates: a public report of such a fault.
        operators: whose cases may kill it; empty for what no operator shows.
        areas: the areas of properties that may kill it.
        passes: the field's tolerance that accepts it on random inputs (``tolerances.py``).
        fault: class of ``docs/faults.md``, or 0.
        workspace: bytes of workspace that it asks for, of which the reference needs none.
        step: bytes of a step for each row that it is planned for; its run function then carries ``prepare``.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    imitates: str
    passes: str
    operators: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()
    fault: int = 0
    workspace: int = 0
    step: int = 0

    @property
    def module(self) -> str:
        """Return the changed module's name inside the package: ``reference.sparse_mla``."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def source(self) -> str:
        """Return the changed file's text.

        Raises:
            ValueError: what is to be replaced does not stand there exactly once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutant {self.id}: {self.old!r} stands {count} times in kimi_hal/{self.file}")
        return text.replace(self.old, self.new)


MUTANTS: dict[str, Mutant] = {}


def add(mutants: Iterable[Mutant]) -> None:
    """Register mutants; an id that stands twice is a fault of the suite."""
    for mutant in mutants:
        assert mutant.id not in MUTANTS, f"mutant {mutant.id} is registered twice"
        MUTANTS[mutant.id] = mutant


def of(operator: str) -> dict[str, Mutant]:
    """Return the mutants that cases of an operator may kill; empty: all.

    Raises:
        UnknownNameError: no such operator; the nearest is named.
    """
    name = ops.get(operator).name if operator else ""
    return {i: found for i, found in MUTANTS.items() if name in ("", *found.operators)}


def get(mutant_id: str) -> Mutant:
    """Return a mutant by id, or raise with the nearest id."""
    if mutant_id not in MUTANTS:
        hint = nearest(mutant_id, MUTANTS) or "."
        raise UnknownNameError(
            f"unknown mutant {mutant_id!r}{hint} `kimi-hal conformance prove --list` prints all"
        )
    return MUTANTS[mutant_id]
