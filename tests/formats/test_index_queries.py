from __future__ import annotations

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal import formats

FP8 = tuple(name for name in formats.names("index") if "fp8" in name)
MXFP4 = tuple(name for name in formats.names("index") if "mxfp4" in name)


def some_queries() -> np.ndarray:
    rng = np.random.default_rng(4)
    q = (rng.standard_normal((5, 3, 128)) * 10.0 ** rng.integers(-6, 6, (5, 3, 1))).astype(np.float32)
    q[0, 0] = 0.0
    q[0, 1] = -448.0
    return q


@pytest.mark.parametrize("name", FP8)
def test_fp8_query_has_a_power_of_two_scale_whatever_the_keys_have(name):
    fmt, q = formats.index(name), some_queries()
    codes, scale = fmt.encode_query(torch.from_numpy(q))
    assert codes.dtype == getattr(torch, fmt.query_dtype)
    assert (codes.shape, scale.shape, scale.dtype) == ((5, 3, 128), (5, 3), torch.float32)
    for t, h in np.ndindex(5, 3):
        factor = oracle.fp8_scale(np.max(np.abs(q[t, h])), fmt.element, power=True)
        assert scale[t, h].item() == factor
        expected = oracle.encode((q[t, h] / factor).astype(np.float32), fmt.element)
        assert codes.view(torch.uint8)[t, h].tolist() == expected.tolist()


@pytest.mark.parametrize("name", MXFP4)
def test_mxfp4_query_is_packed_with_four_scale_bytes_a_head(name):
    fmt, q = formats.index(name), some_queries()
    packed, scale = fmt.encode_query(torch.from_numpy(q))
    assert (packed.shape, packed.dtype) == ((5, 3, 64), torch.uint8)
    assert (scale.shape, scale.dtype) == ((5, 3, 4), torch.uint8)
    for t, h in np.ndindex(5, 3):
        elements, codes = oracle.mx_row(q[t, h])
        assert packed[t, h].tolist() == elements.tolist()
        assert scale[t, h].tolist() == codes.tolist()


@pytest.mark.parametrize("name", formats.names("index"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_a_query_multiplies_by_its_scale(name, dtype):
    fmt = formats.index(name)
    codes, scale = fmt.encode_query(torch.from_numpy(some_queries()))
    stored = codes.view(torch.uint8).numpy()
    if fmt.element == "e2m1":
        nibbles = np.stack((stored & 15, stored >> 4), axis=-1).reshape(5, 3, 128)
        expected = oracle.decode(nibbles, "e2m1") * np.repeat(
            2.0 ** (scale.double().numpy() - 127), 32, axis=-1
        )
    else:
        expected = oracle.decode(stored, fmt.element) * scale.double().numpy()[..., None]
    decoded = fmt.decode_query(codes, scale, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("folded", [None, torch.empty(5, 3, 0, dtype=torch.uint8)], ids=["none", "empty"])
def test_without_its_scale_a_query_decodes_to_its_elements(name, folded):
    fmt = formats.index(name)
    codes, scale = fmt.encode_query(torch.from_numpy(some_queries()))
    elements = fmt.decode_query(codes, folded)
    assert torch.equal(elements * scale[..., None], fmt.decode_query(codes, scale))
    assert torch.equal(elements, codes.float())


def test_zero_query_has_the_scale_of_the_floor():
    codes, scale = formats.index(FP8[0]).encode_query(torch.zeros(1, 1, 128))
    assert scale.item() == 2.0**-22  # 1e-4 / 448 = 2^-22.09
    assert not codes.view(torch.uint8).any()


@pytest.mark.parametrize("name", formats.names("index"))
def test_no_queries_give_empty_results(name):
    fmt = formats.index(name)
    codes, scale = fmt.encode_query(torch.empty(0, 32, 128))
    assert codes.shape[:2] == scale.shape[:2] == (0, 32)
    assert fmt.decode_query(codes, scale).shape == (0, 32, 128)


@pytest.mark.parametrize("name", formats.names("index"))
def test_a_query_is_scored_with_the_values_a_key_of_the_same_numbers_has(name):
    fmt = formats.index(name)
    rows = torch.from_numpy(some_queries().reshape(15, 128))
    decoded = fmt.decode_query(*fmt.encode_query(rows))
    if fmt.scale != "f32":
        assert torch.equal(decoded, fmt.unpack(*fmt.pack(rows), torch.float32))
    assert decoded.shape == (15, 128)
