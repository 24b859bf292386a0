"""The latent kernels compile for every target, and use the instructions they are meant to use.

``cuda:80`` and ``cuda:89`` stand for the PPU 810 and 890, whose toolkit starts from those targets. That a kernel
compiles does not say that it is right.
"""

from __future__ import annotations

import pytest
from compiled import TARGETS, Made, made

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

#: bfloat16 products added in float32.
MATRIX = {
    "cuda:80": r"mma\.sync.*f32\.bf16\.bf16\.f32",
    "cuda:89": r"mma\.sync.*f32\.bf16\.bf16\.f32",
    "cuda:90": r"wgmma.*m64n(16|32)k16\.f32\.bf16\.bf16",
    "cuda:100": r"tcgen05\.mma.*kind::f16",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_bf16",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_bf16",
}
ATTENTION = ("decode", "nvfp4", "sharded", "record", "bf16")


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kernels(target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return made("portable_latent_kernels", target, tmp_path_factory.mktemp("triton"))


def test_every_kernel_becomes_code_of_its_target(target: str, kernels: dict[str, Made]) -> None:
    assert len(kernels) == 11
    arch = f"sm_{target[5:]}" if target.startswith("cuda") else target
    for name, found in kernels.items():
        assert found.binary > 1000, name
        assert found.target.startswith(arch), name
        assert found.local == 0, name


def test_attention_multiplies_bfloat16_by_matrix_instructions(target: str, kernels: dict[str, Made]) -> None:
    for name in ATTENTION:
        assert kernels[name].has(MATRIX[target]), (name, kernels[name].instructions)


def test_no_target_needs_an_fp8_type(kernels: dict[str, Made]) -> None:
    for name, found in kernels.items():
        assert not found.has(r"cvt\..*e4m3|.*\.e4m3\.|v_cvt_.*fp8"), (name, found.instructions)


def test_rows_are_read_sixteen_bytes_at_a_time(target: str, kernels: dict[str, Made]) -> None:
    if target.startswith("cuda"):
        wide = r"ld\.global(\.\w+)*\.v4\.b32|cp\.async\.c[ag]\.shared\.global"
    else:
        wide = r"(global|buffer)_load_dwordx4"
    for name in ATTENTION:
        assert kernels[name].has(wide), (name, kernels[name].instructions)


def test_keys_are_on_their_way_while_others_are_multiplied(target: str, kernels: dict[str, Made]) -> None:
    for name in ("nvfp4", "sharded", "record", "bf16"):
        assert kernels[name].has(r"cp\.async\.c[ag]\.shared\.global") == (target == "cuda:90"), name


def test_stored_numbers_are_divided_correctly_rounded(target: str, kernels: dict[str, Made]) -> None:
    exact = r"div\.rn\.f32" if target.startswith("cuda") else "v_div_fixup_f32"
    for name in ("latent.fp8.e4m3fn.tensor", "latent.nvfp4.352", "latent.flashmla.656"):
        assert kernels[f"store {name}"].has(exact), name
        assert not kernels[f"store {name}"].has(r"div\.(full|approx)"), name
