"""Compile a module's portable kernels for a target in one child process, without the interpreter's switch.

``kernels(backend, arch)`` of a module under ``tests/`` returns what is to be compiled, by name. The child reports for
each what stands in its assembly: the instructions, and what the compiler says of registers that did not suffice.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Name -> Triton's backend, architecture and warp size.
TARGETS = {
    "cuda:80": ("cuda", "80", "32"),
    "cuda:89": ("cuda", "89", "32"),
    "cuda:90": ("cuda", "90", "32"),
    "cuda:100": ("cuda", "100", "32"),
    "gfx942": ("hip", "gfx942", "64"),
    "gfx950": ("hip", "gfx950", "64"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel with everything that its compilation depends on.

    Args:
        fn: the decorated function.
        types: argument -> Triton's type; those not named are ``i32``.
        constants: argument -> value.
        aligned: integer arguments that are multiples of 16; pointers always are.
        warps: of a program.
    """

    fn: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """What came of one kernel.

    Args:
        binary: its bytes.
        instructions: every opcode of its assembly, without operands.
        target: the architecture that the assembly names.
        local: accesses to memory that stands for registers, in the assembly (CUDA), or registers so kept (AMD).
    """

    binary: int
    instructions: frozenset[str]
    target: str
    local: int

    def has(self, pattern: str) -> bool:
        """Tell whether an instruction begins with a regular expression."""
        return any(re.match(pattern, opcode) for opcode in self.instructions)


def made(module: str, target: str, cache: Path) -> dict[str, Made]:
    """Compile a module's kernels for a target, with nothing served from an earlier run."""
    from once import once

    report = once(f"{module}-{target}", lambda: child(module, target, cache))
    return {
        name: Made(found["binary"], frozenset(found["instructions"]), found["target"], found["local"])
        for name, found in report.items()
    }


def child(module: str, target: str, cache: Path) -> Any:
    """Compile in a child process and return what it says."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, module, *TARGETS[target]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(kernel: Kernel, backend: str, arch: str, warp: int) -> dict[str, Any]:
    """Compile one kernel and look at its assembly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.fn.arg_names
    signature = {n: "constexpr" if n in kernel.constants else kernel.types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in kernel.aligned]
    source = ASTSource(
        fn=kernel.fn,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in kernel.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp)
    found = triton.compile(source, target=target, options={"num_warps": kernel.warps, **kernel.options})
    text = found.asm["ptx" if backend == "cuda" else "amdgcn"]
    binary = len(found.asm["cubin" if backend == "cuda" else "hsaco"])
    return {"binary": binary, **(ptx if backend == "cuda" else amdgcn)(text)}


def ptx(text: str) -> dict[str, Any]:
    """Return the opcodes of PTX, its target, and its accesses to local memory."""
    opcodes = re.findall(r"^[\s{]*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)", text, re.MULTILINE)
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    return {
        "instructions": sorted(set(opcodes)),
        "target": target[1] if target else "",
        "local": sum(o.startswith(("ld.local", "st.local")) for o in opcodes),
    }


def amdgcn(text: str) -> dict[str, Any]:
    """Return the opcodes of AMD's assembly, its target, and the vector registers kept in memory."""
    opcodes = re.findall(r"^\s+([a-z][a-z0-9_]+)\s", text, re.MULTILINE)
    target = re.search(r'^\s*\.amdgcn_target ".*(gfx\w+)"', text, re.MULTILINE)
    spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    return {
        "instructions": sorted(set(opcodes)),
        "target": target[1] if target else "",
        "local": int(spilled[1]) if spilled else 0,
    }


if __name__ == "__main__":
    name, backend, arch, warp = sys.argv[1:]
    kernels = importlib.import_module(name).kernels(backend, arch)
    print(json.dumps({n: compiled(kernel, backend, arch, int(warp)) for n, kernel in kernels.items()}))
