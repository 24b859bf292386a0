"""What a plugin says of its kernels' code: targets, kernels, and what came of compiling one. Imports no torch.

``Implementation.compile`` names a function from a ``Target`` to ``Kernel`` descriptions. It is called where kernels
are compiled for a device that is not there (``docs/conformance.md``), in a process of its own, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Compiled", "Instruction", "Kernel", "Target"]


@dataclass(frozen=True)
class Target:
    """What a backend's kernels are compiled for.

    Args:
        name: as the toolchain calls it, and as it is asked for (``"sm_90a"``).
        arch: the architecture that runs the code, as capabilities name it (``"sm_90"``).
        code: what the code calls its target, where that is another name; ``""``: ``name``.
        stand_in: why the code is not the device's own, a sentence that stands beside every result; ``""``: it is.
    """

    name: str
    arch: str
    code: str = ""
    stand_in: str = ""

    @property
    def named(self) -> str:
        """Return what the code must call its target."""
        return self.code or self.name


@dataclass(frozen=True)
class Instruction:
    """Something that is expected in a kernel's code, or forbidden there.

    Args:
        pattern: a regular expression of the beginning of an opcode.
        why: what the instruction is there for, or why it must not be.
    """

    pattern: str
    why: str


@dataclass(frozen=True)
class Compiled:
    """What came of compiling one kernel.

    Args:
        target: the architecture that the code names.
        size: bytes of the binary.
        instructions: every opcode of the assembly once, without operands.
        registers: a thread's (a lane's); ``None``: the device has none, or it is not known.
        spilled: bytes of memory a thread that stand for registers; ``None`` as for ``registers``.
        shared: bytes of on-chip memory that a program's threads share.
        further: what else the toolchain counts, by its own names.
        unknown: sentences on what could not be found out, each with the tool that is missing.
    """

    target: str
    size: int
    instructions: tuple[str, ...]
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    further: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel as an implementation launches it, for one target.

    Args:
        name: unique among the implementation's; lower-case letters, digits, ``.``, ``_`` and ``-``.
        compile: compiles it. Raises ``ToolMissingError`` where a tool of the toolchain is missing or too old.
        expected: each must be in the code.
        forbidden: none may be.
        spilled: bytes a thread that it may keep in memory for want of registers; more is a problem.
    """

    name: str
    compile: Callable[[], Compiled]
    expected: tuple[Instruction, ...] = ()
    forbidden: tuple[Instruction, ...] = ()
    spilled: int = 0
