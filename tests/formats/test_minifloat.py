from __future__ import annotations

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal.formats import minifloat
from kimi_hal.formats.minifloat import ELEMENTS

KINDS = tuple(ELEMENTS)
FP8 = ("e4m3fn", "e4m3fnuz")


def encode(x: np.ndarray, name: str) -> np.ndarray:
    return minifloat.encode(
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), ELEMENTS[name]
    ).numpy()


def every_bf16() -> np.ndarray:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def every_half() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def around_midpoints(name: str) -> np.ndarray:
    """Each midpoint of neighbouring values with the two float32 next to it, and each value with its two."""
    values = oracle.grid(name)
    points = np.concatenate((values, (values[:-1] + values[1:]) / 2)).astype(np.float32)
    near = np.concatenate(
        (points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)), dtype=np.float32
    )
    return np.concatenate((near, -near))


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_code_decodes_as_ml_dtypes_does(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the second opinion on FP8 values")
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(getattr(ml_dtypes, f"float8_{name}")).astype(np.float64)
    ours = minifloat.decode(torch.from_numpy(codes), ELEMENTS[name], torch.float64).numpy()
    np.testing.assert_array_equal(ours, theirs)
    number = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_decodes_to_its_grid_value_in_every_dtype(name, dtype):
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
    ours = minifloat.decode(torch.from_numpy(codes), ELEMENTS[name], dtype)
    np.testing.assert_array_equal(ours.double().numpy(), oracle.decode(codes, name))


@pytest.mark.parametrize("name", FP8)
def test_table_decode_equals_torchs_own_fp8_dtype(name):
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(getattr(torch, f"float8_{name}")).float()
    torch.testing.assert_close(
        minifloat.decode(codes, ELEMENTS[name]), theirs, rtol=0, atol=0, equal_nan=True
    )


def test_every_e8m0_code_is_a_power_of_two_and_255_is_nan():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = [2.0 ** (code - 127) for code in range(255)]
    assert minifloat.decode_e8m0(codes, torch.float64)[:255].tolist() == expected
    assert minifloat.decode_e8m0(codes)[:255].double().tolist() == expected
    assert torch.isnan(minifloat.decode_e8m0(codes)[255])


def test_e8m0_equals_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the second opinion on e8m0 values")
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(
        minifloat.decode_e8m0(torch.from_numpy(codes), torch.float64).numpy(), theirs
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("inputs", [every_bf16, every_half], ids=["bf16", "float16"])
def test_every_16_bit_input_encodes_to_the_nearest_value(name, inputs):
    np.testing.assert_array_equal(encode(inputs(), name), oracle.encode(inputs(), name))


@pytest.mark.parametrize("name", KINDS)
def test_midpoints_go_to_the_even_code_and_their_neighbours_do_not(name):
    x = around_midpoints(name)
    np.testing.assert_array_equal(encode(x, name), oracle.encode(x, name))


@pytest.mark.parametrize("name", KINDS)
def test_random_float32_bit_patterns_encode_to_the_nearest_value(name):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    in_range = np.random.default_rng(1).normal(0, 40, 1 << 18).astype(np.float32)
    x = np.concatenate((bits.view(np.float32), in_range, in_range * np.float32(2.0**-12)))
    np.testing.assert_array_equal(encode(x, name), oracle.encode(x, name))


@pytest.mark.parametrize("name", KINDS)
def test_float32_subnormals_round_to_zero_and_keep_their_sign_where_there_is_one(name):
    x = np.array([1e-45, -1e-45, 1e-38, -1e-38], dtype=np.float32)
    sign = {"e2m1": 8, "e4m3fn": 0x80, "e4m3fnuz": 0}[name]
    assert encode(x, name).tolist() == [0, sign, 0, sign]


@pytest.mark.parametrize("name", [*FP8, "e2m1"])
def test_encoding_equals_ml_dtypes_within_range(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the second opinion on rounding")
    dtype = ml_dtypes.float4_e2m1fn if name == "e2m1" else getattr(ml_dtypes, f"float8_{name}")
    x = np.concatenate((every_bf16(), every_half(), around_midpoints(name)))
    x = np.clip(x[~np.isnan(x)], -ELEMENTS[name].largest, ELEMENTS[name].largest)
    np.testing.assert_array_equal(encode(x, name), x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("name", KINDS)
def test_beyond_the_largest_value_saturates(name):
    largest = ELEMENTS[name].largest
    x = np.array([largest * 1.0001, 1e30, np.inf, -largest * 1.0001, -np.inf], dtype=np.float32)
    assert oracle.decode(encode(x, name), name).tolist() == [largest] * 3 + [-largest] * 2


@pytest.mark.parametrize(("name", "code"), [("e4m3fn", 0x7F), ("e4m3fnuz", 0x80), ("e2m1", 0)])
def test_nan_of_either_sign_has_one_code(name, code):
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], dtype=np.uint32).view(np.float32)
    assert encode(x, name).tolist() == [code] * 3


@pytest.mark.parametrize("name", KINDS)
def test_every_finite_code_survives_decoding_and_encoding(name):
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
    codes = codes[~np.isnan(oracle.decode(codes, name))]
    values = minifloat.decode(torch.from_numpy(codes), ELEMENTS[name])
    assert minifloat.encode(values, ELEMENTS[name]).tolist() == codes.tolist()


def test_encode_up_gives_the_smallest_code_that_is_no_less():
    values = oracle.grid("e4m3fn").astype(np.float32)
    between = np.concatenate(
        (values, np.nextafter(values[1:], 0), np.nextafter(values[:-1], np.inf)), dtype=np.float32
    )
    ours = minifloat.encode_up(torch.from_numpy(between), ELEMENTS["e4m3fn"])
    assert ours.tolist() == np.searchsorted(values, between, side="left").tolist()


def test_nibbles_are_packed_even_element_low():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = minifloat.pack_nibbles(codes)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


def test_both_nibbles_of_every_byte_decode():
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.cat((packed & 15, packed >> 4), dim=1)
    expected = minifloat.decode(codes, ELEMENTS["e2m1"])
    assert torch.equal(minifloat.decode_nibbles(packed), expected)
    assert torch.equal(minifloat.decode_nibbles(packed)[0x5B], torch.tensor([-1.5, 3.0]))


def test_non_contiguous_inputs_encode_and_decode_by_their_strides():
    x = torch.linspace(-6, 6, 64).reshape(8, 8)
    kind = ELEMENTS["e2m1"]
    assert torch.equal(minifloat.encode(x.T, kind), minifloat.encode(x, kind).T)
    codes = minifloat.encode(x, kind)
    assert torch.equal(minifloat.decode(codes.T, kind), minifloat.decode(codes, kind).T)


def test_empty_inputs_give_empty_outputs():
    assert minifloat.encode(torch.empty(0, 32), ELEMENTS["e4m3fn"]).shape == (0, 32)
    assert minifloat.decode_nibbles(torch.empty(0, 16, dtype=torch.uint8)).shape == (0, 32)
