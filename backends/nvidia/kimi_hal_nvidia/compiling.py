"""What the kept code holds, by target: opcodes and resources of each kernel, read from the package's own cubins."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel, Target
from kimi_hal.errors import ToolMissingError
from kimi_hal_nvidia import cubins


def described(
    stem: str,
    function: str,
    target: Target,
    expected: Sequence[Instruction] = (),
    forbidden: Sequence[Instruction] = (),
    spilled: int = 0,
    shared: int | None = None,
) -> Kernel:
    """Return the description of a kernel of a kept cubin."""
    return Kernel(
        function.replace("_", "-"),
        lambda: read(stem, function, target, shared),
        tuple(expected),
        tuple(forbidden),
        spilled,
    )


def read(stem: str, function: str, target: Target, shared: int | None) -> Compiled:
    """Read a kernel's code for a target.

    Args:
        stem: of the source.
        function: the kernel.
        target: one of the backend's.
        shared: bytes of shared memory that a launch asks for.

    Raises:
        ToolMissingError: ``cuobjdump`` is not there.
    """
    path = cubins.KEPT / cubins.file_name(stem, target.arch)
    code = dumped(path, "-sass", "-fun", function)
    used = dumped(path, "--dump-resource-usage").partition(f" Function {function}:")[2].splitlines()[1]
    known = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", used)}
    return Compiled(
        target=target.named,
        size=path.stat().st_size,
        instructions=tuple(sorted(opcodes(code))),
        registers=known["REG"],
        spilled=known["STACK"] + known["LOCAL"],
        shared=shared,
    )


def opcodes(code: str) -> set[str]:
    """Return every opcode of a disassembly."""
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE))


def dumped(path: Path, *what: str) -> str:
    """Run ``cuobjdump``, which Triton's wheel brings, on a cubin."""
    from triton import knobs

    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        raise ToolMissingError(
            "cuobjdump is missing: reinstall the Triton wheel, which brings it, or name it by TRITON_CUOBJDUMP_PATH"
        ) from error
    return subprocess.run([tool, *what, str(path)], capture_output=True, text=True, check=True).stdout
