from __future__ import annotations

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal.formats import scales


def powers_and_neighbours() -> np.ndarray:
    power = np.array([2.0**e for e in range(-149, 128)], dtype=np.float32)
    return np.concatenate(
        (power, np.nextafter(power, np.float32(np.inf)), np.nextafter(power, np.float32(0)))
    )


def test_ceil_log2_is_exact_beside_every_power_of_two():
    x = powers_and_neighbours()
    ours = scales.ceil_log2(torch.from_numpy(x)).tolist()
    assert ours == [oracle.ceil_log2(float(value)) for value in x]


def test_ceil_log2_is_clamped_to_what_a_normal_float32_holds():
    x = torch.tensor([0.0, 1e-45, torch.inf, 3.4e38])
    assert scales.ceil_log2(x).tolist() == [-126, -126, 127, 127]


def test_exp2_is_exact_over_its_range():
    exponent = torch.arange(-126, 128, dtype=torch.int32)
    assert scales.exp2(exponent).double().tolist() == [2.0**e for e in range(-126, 128)]


@pytest.mark.parametrize("divisor", [6.0, 448.0, 224.0])
def test_division_by_a_constant_is_correctly_rounded(divisor):
    x = np.random.default_rng(0).lognormal(0, 15, 1 << 16).astype(np.float32)
    ours = scales.divide(torch.from_numpy(x), divisor).numpy()
    np.testing.assert_array_equal(ours, x / np.float32(divisor))
    # The product with the reciprocal differs somewhere, so this test can tell the two apart.
    assert (ours != x * (np.float32(1) / np.float32(divisor))).any()


def test_amax_ignores_nan_and_sees_infinity():
    x = torch.tensor([[1.0, -3.0, torch.nan], [torch.nan, torch.nan, torch.nan], [-torch.inf, 1.0, 0.0]])
    assert scales.amax(x).tolist() == [3.0, 0.0, torch.inf]


@pytest.mark.parametrize("element", ["e4m3fn", "e4m3fnuz"])
def test_power_of_two_scale_is_the_smallest_that_keeps_amax_in_range(element):
    amax = np.concatenate((powers_and_neighbours()[30:], np.float32([448, 449, 447.99997, 224, 1e-4, 0])))
    amax = amax[amax < 1e30]
    ours = scales.exp2(scales.fp8_exponent(torch.from_numpy(amax), element))
    assert ours.tolist() == [float(oracle.fp8_scale(a, element, power=True)) for a in amax]


def test_raw_scale_has_the_floor_of_1e_4_before_the_division():
    ours = scales.fp8_raw(torch.tensor([0.0, 1e-5, 448.0, 1.0]), "e4m3fn").numpy()
    floor = np.float32(1e-4) / np.float32(448)
    assert ours.tolist() == [floor, floor, 1.0, np.float32(1) / np.float32(448)]


def test_amax_of_448_needs_scale_1_and_the_next_float_needs_2():
    amax = torch.tensor([448.0, float(np.nextafter(np.float32(448), np.float32(449)))])
    assert scales.exp2(scales.fp8_exponent(amax, "e4m3fn")).tolist() == [1.0, 2.0]


def test_mx_exponent_is_the_ceiling_so_that_amax_never_saturates():
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([6.0, 6.0001, 3.0])
    packed, scale = scales.mx_encode(x)
    assert scale[:, 0].tolist() == [127, 128, 126]
    assert (packed[:, 0] & 15).tolist() == [7, 5, 7]


def test_mx_zero_block_has_scale_byte_1_and_decodes_to_zeros():
    packed, scale = scales.mx_encode(torch.zeros(2, 64))
    assert scale.tolist() == [[1, 1], [1, 1]]
    assert not packed.any()
    assert torch.equal(scales.mx_decode(packed, scale, torch.float32), torch.zeros(2, 64))


def test_mx_block_with_a_nan_has_scale_byte_255_and_leaves_its_neighbour_alone():
    x = torch.ones(1, 64)
    x[0, 40] = torch.nan
    packed, scale = scales.mx_encode(x)
    assert scale.tolist() == [[125, 255]]
    assert not packed[:, 16:].any()
    values = scales.mx_decode(packed, scale, torch.float32)
    assert torch.equal(values[0, :32], torch.ones(32))
    assert torch.isnan(values[0, 32:]).all()


def test_mx_infinity_decodes_to_infinity():
    x = torch.zeros(1, 32)
    x[0, 3] = -torch.inf
    packed, scale = scales.mx_encode(x)
    assert scale.item() == 254
    assert scales.mx_decode(packed, scale, torch.float32)[0, 3] == -torch.inf


def test_mx_tiny_block_rounds_under_the_smallest_scale():
    x = torch.full((1, 32), 2.0**-126)
    x[0, 1] = -(2.0**-127)
    x[0, 2] = 2.0**-149
    packed, scale = scales.mx_encode(x)
    assert scale.item() == 1
    decoded = scales.mx_decode(packed, scale, torch.float64)
    assert decoded[0, :4].tolist() == [2.0**-126, -(2.0**-127), 0.0, 2.0**-126]


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_mx_rows_equal_the_oracle(spread):
    x = (np.random.default_rng(3).standard_t(2, (200, 128)) * spread).astype(np.float32)
    packed, scale = scales.mx_encode(torch.from_numpy(x))
    for row in range(len(x)):
        elements, codes = oracle.mx_row(x[row])
        assert packed[row].tolist() == elements.tolist()
        assert scale[row].tolist() == codes.tolist()
