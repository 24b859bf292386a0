"""Compile a Triton kernel for a target that is not here, and read what came of it.

Nothing but the Triton wheel is needed: it brings its assembler and the tools that read a binary. Triton's
interpreter must be off, which is read when a kernel is decorated.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel, Target
from kimi_hal.errors import ToolMissingError

#: What AMD's assembly says of a kernel, by our names; the first three have places of their own.
AMDGCN = {
    "registers": "vgpr_count",
    "spilled": "private_segment_fixed_size",
    "sgpr_count": "sgpr_count",
    "agpr_count": "agpr_count",
    "vgpr_spill_count": "vgpr_spill_count",
    "sgpr_spill_count": "sgpr_spill_count",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that its compilation depends on.

    Args:
        fn: the decorated function.
        types: argument -> Triton's type; those not named are ``i32``.
        constants: argument -> value.
        aligned: integer arguments that are multiples of 16; pointers always are.
        warps: of a program.
        options: further options of Triton's compiler.
    """

    fn: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)


def described(
    name: str,
    launch: Launch,
    target: Target,
    expected: Sequence[Instruction] = (),
    forbidden: Sequence[Instruction] = (),
    spilled: int = 0,
) -> Kernel:
    """Return the description of a launch for a target."""
    return Kernel(name, lambda: compiled(launch, target), tuple(expected), tuple(forbidden), spilled)


def compiled(launch: Launch, target: Target) -> Compiled:
    """Compile a launch and read its assembly and its binary.

    Raises:
        ToolMissingError: Triton's assembler for the target is not there.
    """
    try:
        found = triton.compile(
            source(launch),
            target=gpu_target(target.named),
            options={"num_warps": launch.warps, **launch.options},
        )
    except RuntimeError as error:
        if str(error).startswith("Cannot find "):
            raise ToolMissingError(missing(str(error).removeprefix("Cannot find "))) from error
        raise
    return ptx(found) if "ptx" in found.asm else amdgcn(found)


def source(launch: Launch) -> ASTSource:
    """Return what Triton compiles."""
    names = launch.fn.arg_names
    signature = {n: "constexpr" if n in launch.constants else launch.types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in launch.aligned]
    return ASTSource(
        fn=launch.fn,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def gpu_target(code: str) -> GPUTarget:
    """Return Triton's target: ``sm_90a`` is CUDA's 90, ``gfx942`` HIP's with 64 lanes.

    Raises:
        ValueError: it is neither.
    """
    if match := re.fullmatch(r"sm_(\d+)a?", code):
        return GPUTarget("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx(\d)\w+", code):
        return GPUTarget("hip", code, 64 if match[1] == "9" else 32)
    raise ValueError(f"{code!r} is no target of Triton's: write sm_<number> or gfx<number>")


def ptx(found: Any) -> Compiled:
    """Read a CUDA kernel: opcodes of its PTX, resources of its cubin.

    A stack frame is where the assembler keeps what registers did not suffice for.
    """
    text, binary = found.asm["ptx"], found.asm["cubin"]
    opcodes = re.findall(r"^[\s{]*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)", text, re.MULTILINE)
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    resources, unknown = cubin(binary)
    known = {name.lower(): int(value) for name, value in re.findall(r"(\w+):(\d+)", resources)}
    return Compiled(
        target=target[1] if target else "",
        size=len(binary),
        instructions=tuple(sorted(set(opcodes))),
        registers=known.get("reg"),
        spilled=known["stack"] + known["local"] if "stack" in known else None,
        shared=found.metadata.shared,
        unknown=unknown,
    )


def cubin(binary: bytes) -> tuple[str, tuple[str, ...]]:
    """Return what ``cuobjdump`` says of a kernel's resources, and a sentence where it is missing."""
    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return "", (f"registers and spilled memory are not known: {missing('cuobjdump')}",)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        command = [tool, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.partition(" Function ")[2], ()


def missing(tool: str) -> str:
    """Say that one of Triton's tools is missing, and what to do."""
    variable = f"TRITON_{tool.upper().replace('-', '_')}_PATH"
    return f"{tool} is missing: reinstall the Triton wheel, which brings it, or name it by {variable}"


def amdgcn(found: Any) -> Compiled:
    """Read a HIP kernel: opcodes and resources of its assembly."""
    text = found.asm["amdgcn"]
    opcodes = re.findall(r"^\s+([a-z][a-z0-9_]+)\s", text, re.MULTILINE)
    target = re.search(r'^\s*\.amdgcn_target ".*(gfx\w+)"', text, re.MULTILINE)
    said = {ours: re.search(rf"\.{name}:\s+(\d+)", text) for ours, name in AMDGCN.items()}
    known = {ours: int(match[1]) for ours, match in said.items() if match}
    return Compiled(
        target=target[1] if target else "",
        size=len(found.asm["hsaco"]),
        instructions=tuple(sorted(set(opcodes))),
        registers=known.pop("registers", None),
        spilled=known.pop("spilled", None),
        shared=found.metadata.shared,
        further=known,
    )
