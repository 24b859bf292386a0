"""What a report holds of a compiled kernel."""

from __future__ import annotations

import msgspec

#: Opcodes that a report keeps of those which a pattern found.
KEPT = 4


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked for in a kernel's instructions.

    Args:
        pattern: a regular expression of the beginning of an opcode.
        why: what it is there for, or why it must not be there.
        expected: it must be there; else it must not.
        found: the first opcodes that it found.
    """

    pattern: str
    why: str
    expected: bool
    found: tuple[str, ...]


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The code of one kernel for one target.

    Args:
        target: as the code names it.
        stand_in: why it is not the device's own code; empty if it is.
        size: bytes of the binary.
        registers: a thread's; ``None``: not known, or the device has none.
        spilled: bytes a thread in memory for want of registers; ``None`` as for ``registers``.
        allowed: bytes of them that the kernel's description admits.
        shared: bytes of on-chip memory of a program.
        further: what else the toolchain counts.
        searched: the instructions that were looked for.
    """

    target: str
    stand_in: str
    size: int
    registers: int | None
    spilled: int | None
    allowed: int
    shared: int | None
    further: dict[str, int]
    searched: tuple[Searched, ...]


def figures(code: Code) -> dict[str, str]:
    """Return what a CI's report shows of a kernel's code, by name; what is not known is left out."""
    known = {
        "target": code.target,
        "stand_in": code.stand_in or None,
        "size": code.size,
        "registers": code.registers,
        "spilled": code.spilled,
        "shared": code.shared,
        **code.further,
    }
    return {name: str(value) for name, value in known.items() if value is not None}
