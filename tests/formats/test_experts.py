from __future__ import annotations

import math

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError

EXPERTS = formats.experts("experts.mxfp4-pack")


def some_weights(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Weights of many magnitudes with ties, signed zeros and mantissas of amax beside 1.75."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-60, 60, (rows, 1))
    w = w.astype(np.float32)
    w[0, :32] = np.float32(
        [7, 6.999, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -0.25, -0.2, -1e-30, 0, 0.5, 6] * 2
    )
    w[1, :32] = np.linspace(0, 1.75, 32, dtype=np.float32)
    w[2, :32] = np.linspace(0, np.nextafter(np.float32(1.75), np.float32(0)), 32, dtype=np.float32)
    return torch.from_numpy(w)


def packed_by_the_library(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack ``[rows, K]`` as the library does: observed amax, its scale rule, its compressor."""
    reason = "packs the tensors to compare with"
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers", reason=reason)
    compressors = pytest.importorskip("compressed_tensors.compressors.mxfp4.base", reason=reason)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=reason)
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    groups = w.reshape(w.shape[0], -1, 32)
    scale, _ = helpers.calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), args)
    state = compressors.MXFP4PackedCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
    return state["weight_packed"], state["weight_scale"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_equal_those_packed_by_compressed_tensors(dtype):
    w = some_weights(64, 256).to(dtype)
    packed, scale = packed_by_the_library(w)
    ours = EXPERTS.encode(w)
    assert torch.equal(ours[1], scale)
    assert torch.equal(ours[0], packed)


@pytest.mark.parametrize("exponent", [-127, -126, -125, -124, -60, 60, 126, 127])
def test_bytes_equal_the_librarys_at_the_ends_of_the_range(exponent):
    w = torch.linspace(-1.74, 1.74, 64, dtype=torch.float64).reshape(2, 32) * 2.0**exponent
    packed, scale = packed_by_the_library(w.float())
    ours = EXPERTS.encode(w.float())
    assert torch.equal(ours[1], scale)
    assert torch.equal(ours[0], packed)


def test_negative_zero_loses_its_sign_and_a_small_negative_keeps_it_as_in_the_library():
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([6.0, -0.0, -0.1, 0.1])
    packed, _ = packed_by_the_library(w)
    ours, _ = EXPERTS.encode(w)
    assert ours[0, :2].tolist() == [0x07, 0x08]
    assert torch.equal(ours, packed)


def test_decoding_equals_the_librarys_decompression():
    compressors = pytest.importorskip(
        "compressed_tensors.compressors.mxfp4.base", reason="decompresses the tensors to compare with"
    )
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="describes the scheme")
    args = quantization.QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    w = some_weights(16, 128)[:, :96].bfloat16()
    packed, scale = EXPERTS.encode(w)
    state = compressors.MXFP4PackedCompressor.decompress(
        {"weight_packed": packed, "weight_scale": scale}, scheme
    )
    assert torch.equal(EXPERTS.decode(packed, scale, torch.bfloat16), state["weight"])


def test_scale_rule_amax_rounds_to_a_power_of_two_up_from_1_75_and_down_below():
    below = float(np.nextafter(np.float32(1.75), np.float32(0)))
    w = torch.zeros(4, 32)
    w[:, 0] = torch.tensor([1.0, below, 1.75, 1.99])
    packed, scale = EXPERTS.encode(w)
    assert scale[:, 0].tolist() == [125, 125, 126, 126]
    # 1 / 2^-2 = 4; 1.75 / 2^-2 = 7 saturates at 6; 1.75 / 2^-1 = 3.5 and 3.98 round to 4.
    assert packed[:, 0].tolist() == [6, 7, 6, 6]


def test_every_amax_exponent_gives_its_scale():
    exponents = list(range(-126, 128))
    w = torch.zeros(len(exponents), 32)
    w[:, 5] = torch.tensor([2.0**e for e in exponents])
    assert EXPERTS.encode(w)[1][:, 0].tolist() == [max(e - 2 + 127, 0) for e in exponents]


def test_all_zero_group_has_scale_127_beside_a_live_one():
    w = torch.zeros(1, 64)
    w[0, 40] = 3.0
    packed, scale = EXPERTS.encode(w)
    assert scale.tolist() == [[127, 126]]
    assert not packed[0, :16].any()
    assert torch.equal(EXPERTS.decode(packed, scale), w)


def test_all_zero_group_decodes_to_zeros_as_the_librarys_bytes_do():
    w = torch.zeros(1, 64)
    w[0, 40] = 3.0
    packed, scale = packed_by_the_library(w)
    ours = EXPERTS.encode(w)
    assert torch.equal(ours[0], packed)
    assert torch.equal(ours[1][:, 1:], scale[:, 1:])
    assert torch.equal(EXPERTS.decode(packed, scale), w)


def test_a_nan_makes_its_group_nan_and_no_other():
    w = torch.ones(1, 64)
    w[0, 3] = torch.nan
    packed, scale = EXPERTS.encode(w)
    assert scale.tolist() == [[255, 125]]
    values = EXPERTS.decode(packed, scale)
    assert torch.isnan(values[0, :32]).all()
    assert torch.equal(values[0, 32:], torch.ones(32))


def test_rows_equal_the_oracles_elements():
    w = some_weights(40, 64, seed=3)
    packed, scale = EXPERTS.encode(w)
    for row, codes, scales in zip(w.numpy(), packed.numpy(), scale.tolist(), strict=True):
        for group, code in enumerate(scales):
            block = row[32 * group : 32 * group + 32]
            fraction, exponent = math.frexp(float(np.max(np.abs(block))))
            assert code == exponent - 1 + (2 * fraction >= 1.75) - 2 + 127
            scaled = (block / np.float32(2.0 ** (code - 127))).astype(np.float32)
            expected = oracle.pack_nibbles(oracle.encode(scaled + np.float32(0), "e2m1"))
            assert codes[16 * group : 16 * group + 16].tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_scale_and_element_code_decodes_in_every_dtype(dtype):
    packed = torch.arange(16, dtype=torch.uint8).repeat_interleave(16).reshape(1, 256) * 17
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    ours = EXPERTS.decode(packed.expand(256, 256), scale, dtype)[:, ::32]
    exact = minifloat_values()[None, :] * np.array([2.0 ** (c - 127) for c in range(255)] + [np.nan])[:, None]
    expected = torch.from_numpy(exact).to(dtype)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def minifloat_values() -> np.ndarray:
    return oracle.decode(np.arange(16, dtype=np.uint8), "e2m1")


def test_leading_dimensions_are_kept():
    w = some_weights(12, 96).reshape(2, 3, 2, 96)
    packed, scale = EXPERTS.encode(w)
    assert packed.shape == (2, 3, 2, 48)
    assert scale.shape == (2, 3, 2, 3)
    assert EXPERTS.decode(packed, scale).shape == w.shape


def test_no_experts_give_empty_results():
    packed, scale = EXPERTS.encode(torch.empty(0, 7, 64))
    assert packed.shape == (0, 7, 32)
    assert EXPERTS.decode(packed, scale).shape == (0, 7, 64)


def test_a_k_that_is_not_a_whole_number_of_groups_is_refused():
    with pytest.raises(FormatError) as caught:
        EXPERTS.encode(torch.zeros(2, 48))
    assert str(caught.value) == (
        "experts.mxfp4-pack packs groups of 32 along K, and K = 48 is not a multiple: pad K with zeros"
    )


def test_scales_that_do_not_belong_to_the_elements_are_refused():
    with pytest.raises(FormatError) as caught:
        EXPERTS.decode(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8))
    assert str(caught.value) == (
        "experts.mxfp4-pack takes packed [..., K / 2] and scale [..., K / 32], both uint8, not "
        "[2, 32] torch.uint8 and [2, 4] torch.uint8"
    )
