"""The collectives of a compiled program, read from its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

OPS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
WIDTHS |= {"f32": 4, "s32": 4, "u32": 4}
#: ``%name = <types> all-gather(<operands>), …``; a started one counts, its end does not.
LINE = re.compile(rf"= (?P<types>.*?) (?P<op>{'|'.join(OPS)})(?P<start>-start)?\((?P<rest>.*)")
TYPE = re.compile(r"\b([a-z][a-z0-9]+)\[([0-9,]*)\]")
LISTED = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
COUNTED = re.compile(r"replica_groups=\[([0-9]+),([0-9]+)\]")


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Args:
        op: its name in HLO.
        ranks: devices that meet.
        operand: bytes that each gives.
    """

    op: str
    ranks: int
    operand: int

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends where parts go around a ring, or each to its own reader.

        Raises:
            KeyError: a collective of which no rule is known.
        """
        rest = self.ranks - 1
        shares = {
            "all-gather": self.operand * rest,
            "reduce-scatter": self.operand * rest // self.ranks,
            "all-reduce": 2 * self.operand * rest // self.ranks,
            "all-to-all": self.operand * rest // self.ranks,
        }
        return shares[self.op]


def found(text: str) -> tuple[Collective, ...]:
    """Return every collective of an optimised program, in order of text.

    Raises:
        ValueError: one whose groups cannot be read.
    """
    return tuple(_collectives(text))


def _collectives(text: str) -> Iterator[Collective]:
    for line in text.splitlines():
        if match := LINE.search(line):
            ranks = _ranks(match["rest"])
            held = [_bytes(*each) for each in TYPE.findall(match["types"])]
            if match["start"]:  # what is given, then what is returned
                held = held[len(held) // 2 :] if len(held) > 1 else held
            whole = sum(held)
            scale = {"all-gather": (1, ranks), "reduce-scatter": (ranks, 1)}.get(match["op"], (1, 1))
            yield Collective(match["op"], ranks, whole * scale[0] // scale[1])


def _ranks(rest: str) -> int:
    """Return how many devices meet in each group."""
    if listed := LISTED.search(rest):
        return len(listed[1].split(","))
    if counted := COUNTED.search(rest):
        return int(counted[2])
    raise ValueError(f"no replica groups in a collective of the compiled program: {rest[:200]}")


def _bytes(kind: str, shape: str) -> int:
    return WIDTHS[kind] * math.prod(int(size) for size in shape.split(",") if size)
