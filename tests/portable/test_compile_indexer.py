"""The indexer's and the selection's kernels compile for every target, and use the instructions they are meant to use.

``cuda:80`` and ``cuda:89`` stand for the PPU 810 and 890, whose toolkit starts from those targets. That a kernel
compiles does not say that it is right.
"""

from __future__ import annotations

import pytest
from compiled import TARGETS, Made, made

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

#: float16 products added in float32, and the same of bfloat16.
MATRIX = {
    "cuda:80": (r"mma\.sync.*f32\.f16\.f16\.f32", r"mma\.sync.*f32\.bf16\.bf16\.f32"),
    "cuda:89": (r"mma\.sync.*f32\.f16\.f16\.f32", r"mma\.sync.*f32\.bf16\.bf16\.f32"),
    "cuda:90": (r"wgmma.*m64n32k16\.f32\.f16\.f16", r"wgmma.*m64n32k16\.f32\.bf16\.bf16"),
    "cuda:100": (r"tcgen05\.mma.*kind::f16", r"tcgen05\.mma.*kind::f16"),
    "gfx942": (r"v_mfma_f32_\d+x\d+x8_f16", r"v_mfma_f32_\d+x\d+x8_bf16"),
    "gfx950": (r"v_mfma_f32_\d+x\d+x16_f16", r"v_mfma_f32_\d+x\d+x16_bf16"),
}
#: A conversion of FP8 by instruction.
CONVERSION = r"cvt\.rn\.f16x2\.e4m3x2|v_cvt_(scalef32_)?pk_(f32|f16)_fp8"
#: Targets that convert e4m3fn; only gfx942 converts fnuz.
FN = {"cuda:89", "cuda:90", "cuda:100", "gfx950"}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kernels(target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return made("portable_index_kernels", target, tmp_path_factory.mktemp("triton"))


def test_every_kernel_becomes_code_of_its_target(target: str, kernels: dict[str, Made]) -> None:
    assert len(kernels) >= 13
    arch = f"sm_{target[5:]}" if target.startswith("cuda") else target
    for name, found in kernels.items():
        assert found.binary > 1000, name
        assert found.target.startswith(arch), name
        assert found.local == 0, name


def test_scores_are_added_in_float32_by_matrix_instructions(target: str, kernels: dict[str, Made]) -> None:
    half, brain = MATRIX[target]
    for name in ("decode", "shuffled"):
        assert kernels[name].has(half), (name, kernels[name].instructions)
    assert kernels["mxfp4"].has(brain), kernels["mxfp4"].instructions
    for name in ("decode", "verify", "shuffled", "mxfp4"):
        assert not kernels[name].has(r".*(e4m3\.e4m3|kind::f8|mfma.*fp8|mfma.*f8f6f4)"), name


def test_fp8_is_converted_by_instruction_where_there_is_one(target: str, kernels: dict[str, Made]) -> None:
    assert kernels["decode"].has(CONVERSION) == (target in FN)
    assert kernels["shuffled"].has(CONVERSION) == (target == "gfx942")


def test_rows_of_scores_are_read_sixteen_bytes_at_a_time(target: str, kernels: dict[str, Made]) -> None:
    wide = r"ld\.global\.v4\.b32" if target.startswith("cuda") else r"(global|buffer)_load_dwordx4"
    for name in ("short", "maxima", "collect"):
        assert kernels[name].has(wide), (name, kernels[name].instructions)


def test_scales_are_divided_correctly_rounded(target: str, kernels: dict[str, Made]) -> None:
    exact = r"div\.rn\.f32" if target.startswith("cuda") else "v_div_fixup_f32"
    for name in ("quantize", "quantize mxfp4", "store index.fp8.e4m3fn.pow2.page64"):
        assert kernels[name].has(exact), name
        assert not kernels[name].has(r"div\.(full|approx)"), name


def test_keys_arrive_while_others_are_multiplied(target: str, kernels: dict[str, Made]) -> None:
    if target.startswith("cuda"):
        assert kernels["decode"].has(r"cp\.async\.c[ag]\.shared\.global")
    else:
        assert kernels["decode"].has(r"(global|buffer)_load_dwordx4")
