"""Judge what came of compiling a kernel: its target, its instructions, its spilled registers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel, Target
from kimi_hal_conformance.code import KEPT, Code, Searched

#: A kernel's name stands in case ids.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def code(kernel: Kernel, target: Target, compiled: Compiled) -> Code:
    """Return what a report holds of a kernel's code."""
    return Code(
        target=compiled.target,
        stand_in=target.stand_in,
        size=compiled.size,
        registers=compiled.registers,
        spilled=compiled.spilled,
        allowed=kernel.spilled,
        shared=compiled.shared,
        further=dict(compiled.further),
        searched=(
            *(searched(i, compiled, expected=True) for i in kernel.expected),
            *(searched(i, compiled, expected=False) for i in kernel.forbidden),
        ),
    )


def searched(instruction: Instruction, compiled: Compiled, *, expected: bool) -> Searched:
    """Look for one instruction."""
    found = [op for op in compiled.instructions if re.match(instruction.pattern, op)]
    return Searched(
        pattern=instruction.pattern,
        why=instruction.why,
        expected=expected,
        found=tuple(found[:KEPT]),
    )


def problems(found: Code, target: Target) -> Iterator[str]:
    """Yield what is wrong with a kernel's code."""
    if found.target != target.named:
        yield f"it became code of {found.target or 'no named target'}, {target.named} was asked for"
    if not found.size:
        yield "it became no code: the binary is empty"
    for item in found.searched:
        if item.expected and not item.found:
            yield f"no instruction {item.pattern} is in it: {item.why}"
        if item.found and not item.expected:
            yield f"{', '.join(item.found)} must not be in it: {item.why}"
    if found.spilled is not None and found.spilled > found.allowed:
        yield (
            f"{found.spilled} bytes a thread stand in memory for want of registers, "
            f"{found.allowed} are admitted"
        )


def description_problems(kernels: object) -> Iterator[str]:
    """Yield why what a plugin's function returned is no list of kernels."""
    if not isinstance(kernels, list | tuple):
        yield f"it returned no list or tuple of Kernel, but {type(kernels).__name__}"
        return
    names: set[str] = set()
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            yield f"it returned {type(kernel).__name__} {kernel!r:.60} among the kernels"
            continue
        if not NAME.fullmatch(kernel.name):
            yield (
                f"the name {kernel.name!r} must be lower-case letters, digits, '.', '_' and '-', "
                "a letter or digit first"
            )
        if kernel.name in names:
            yield f"two kernels are named {kernel.name!r}"
        names.add(kernel.name)
    if not kernels:
        yield "it returned no kernel: an implementation that has none names no function"
