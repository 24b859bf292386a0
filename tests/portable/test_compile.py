"""Every portable kernel compiles for every target that its backends name, and its instructions are looked at.

Each target is a child process without the interpreter's switch and with a fresh cache. ``cuda:80`` and
``cuda:89`` stand for the PPU 810 and 890, whose toolkit starts from those targets. That a kernel compiles does
not say that it is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

TARGETS = {
    "cuda:80": ("cuda", "80", "32"),
    "cuda:89": ("cuda", "89", "32"),
    "cuda:90": ("cuda", "90", "32"),
    "cuda:100": ("cuda", "100", "32"),
    "gfx942": ("hip", "gfx942", "64"),
    "gfx950": ("hip", "gfx950", "64"),
}

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kimi_hal.triton import kda, sparse_mla

backend, arch, warp = sys.argv[1:]
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))


def types(kernel, floats, constants):
    bf16 = ("out", "outs", "q", "k", "v", "gate", "beta", "raw_g", "raw_beta")
    pointers = {name: "*bf16" for name in bf16} | {"state_ids": "*i32"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
        elif name in floats:
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    return signature


KERNELS = {
    "merge": (sparse_mla._merge, {"lses", "lse_out"}, dict(PARTS=8, D=512, BLOCK=512, RETURN_LSE=True)),
    "gate": (kda._gate, {"A_log", "dt_bias", "g_out", "beta_out"}, dict(K=128, BLOCK=128, LOWER_BOUND=-5.0)),
    "decode": (kda._decode, {"A_log", "dt_bias", "state"},
               dict(K=128, BLOCK_K=128, BLOCK_V=32, RAW_GATE=True, LOWER_BOUND=-5.0, NORM=True)),
}
report = {}
for name, (kernel, floats, constants) in KERNELS.items():
    source = ASTSource(fn=kernel, signature=types(kernel, floats, constants),
                       constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    text = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
    report[name] = {"binary": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]), "text": text}
print(json.dumps(report))
"""


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for_their_targets(target: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    script = tmp_path / "compile_all.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *TARGETS[target]], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"merge", "gate", "decode"}
    for name, made in report.items():
        assert made["binary"] > 1000, name
        named = f"sm_{target[5:]}" if target.startswith("cuda") else target
        assert named in made["text"], name
        assert ".local" not in made["text"] or "st.local" not in made["text"], (
            f"{name} spills to local memory"
        )
    state = report["decode"]["text"]
    assert "ex2.approx" in state or "v_exp_f32" in state
