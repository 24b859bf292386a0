"""What is read off a compiled Triton kernel, and what is said where one of Triton's tools is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

from kimi_hal.dispatch.contract import Target
from kimi_hal.errors import ToolMissingError
from kimi_hal.triton import compiling

PTX = """
.version 8.8
.target sm_90a
$L__BB0_2:
  { wgmma.fence.sync.aligned; }
\t@%p1 bra \t$L__BB0_4;
\tld.global.v4.b32 \t{ %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\tdiv.rn.f32 \t%f1, %f2, %f3;
"""
AMDGCN = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\ts_waitcnt lgkmcnt(0)
    .private_segment_fixed_size: 24
    .sgpr_count:     38
    .sgpr_spill_count: 2
    .vgpr_count:     206
    .vgpr_spill_count: 6
    .agpr_count:     16
"""
RESOURCES = "REG:219 STACK:40 SHARED:1024 LOCAL:8 CONSTANT[0]:656 TEXTURE:0"


def made(**asm: Any) -> SimpleNamespace:
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=36864))


def test_a_cuda_kernel_is_read_off_its_ptx_and_its_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cubin", lambda binary: (RESOURCES, ()))
    found = compiling.ptx(made(ptx=PTX, cubin=b"12345"))
    assert (found.target, found.size, found.shared) == ("sm_90a", 5, 36864)
    assert (found.registers, found.spilled) == (219, 48)
    assert {"wgmma.fence.sync.aligned", "bra", "ld.global.v4.b32", "div.rn.f32"} <= set(found.instructions)
    assert found.unknown == ()


def test_a_hip_kernel_is_read_off_its_assembly() -> None:
    found = compiling.amdgcn(made(amdgcn=AMDGCN, hsaco=b"123"))
    assert (found.target, found.size, found.shared) == ("gfx942", 3, 36864)
    assert (found.registers, found.spilled) == (206, 24)
    assert found.further == {
        "sgpr_count": 38,
        "agpr_count": 16,
        "vgpr_spill_count": 6,
        "sgpr_spill_count": 2,
    }
    assert {"v_mfma_f32_32x32x8_bf16_1k", "s_waitcnt"} <= set(found.instructions)


@pytest.mark.parametrize(
    ("code", "backend", "arch", "warp"),
    [
        ("sm_80", "cuda", 80, 32),
        ("sm_103a", "cuda", 103, 32),
        ("gfx950", "hip", "gfx950", 64),
        ("gfx1250", "hip", "gfx1250", 32),
    ],
)
def test_a_target_is_one_of_triton_s(code: str, backend: str, arch: Any, warp: int) -> None:
    found = compiling.gpu_target(code)
    assert (found.backend, found.arch, found.warp_size) == (backend, arch, warp)


def test_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="'v5e' is no target of Triton's: write sm_<number> or gfx<number>"):
        compiling.gpu_target("v5e")


def launch() -> compiling.Launch:
    return compiling.Launch(SimpleNamespace(arg_names=()), {}, {})


def test_a_missing_assembler_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Cannot find ptxas-blackwell")

    monkeypatch.setattr(compiling.triton, "compile", fails)
    monkeypatch.setattr(compiling, "source", lambda launch: None)
    with pytest.raises(ToolMissingError) as error:
        compiling.compiled(launch(), Target("sm_100a", "sm_100"))
    assert str(error.value) == (
        "ptxas-blackwell is missing: reinstall the Triton wheel, which brings it, or name it by "
        "TRITON_PTXAS_BLACKWELL_PATH"
    )


def test_an_error_of_the_compiler_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(compiling.triton, "compile", fails)
    monkeypatch.setattr(compiling, "source", lambda launch: None)
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        compiling.compiled(launch(), Target("gfx942", "gfx942"))


def test_without_what_reads_a_cubin_its_resources_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvidia:
        @property
        def cuobjdump(self) -> Any:
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(compiling, "knobs", SimpleNamespace(nvidia=Nvidia()))
    found = compiling.ptx(made(ptx=PTX, cubin=b"12345"))
    assert (found.registers, found.spilled) == (None, None)
    assert found.unknown == (
        "registers and spilled memory are not known: cuobjdump is missing: reinstall the Triton wheel, which "
        "brings it, or name it by TRITON_CUOBJDUMP_PATH",
    )
