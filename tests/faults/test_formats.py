"""Fault classes 20 to 22 of ``docs/faults.md``, and the byte rules of 8 and 23 that belong to formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError
from kimi_hal.formats import minifloat

EXPERTS = formats.experts("experts.mxfp4-pack")
ELEMENT_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def u8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def one_group(code: int, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1, 16), code * 17, dtype=torch.uint8), u8(scale)[None]


def test_fault_20_every_scale_code_times_every_element_code():
    for code in range(16):
        value = ELEMENT_VALUES[code & 7] * (-1 if code & 8 else 1)
        packed = torch.full((256, 16), code * 17, dtype=torch.uint8)
        decoded = EXPERTS.decode(packed, torch.arange(256, dtype=torch.uint8)[:, None], torch.float64)[:, 0]
        assert decoded[:255].tolist() == [value * 2.0 ** (scale - 127) for scale in range(255)]
        assert torch.isnan(decoded[255])


@pytest.mark.parametrize(
    ("code", "scale", "value"),
    [
        (2, 134, 128.0),  # a decoder that treats 128 as special made it NaN
        (1, 0, 2.0**-128),  # code 0 is 2^-127, not 0
        (9, 0, -(2.0**-128)),
        (2, 103, 2.0**-24),  # flushed by a path through float16
        (2, 254, 2.0**127),
        (4, 254, torch.inf),  # beyond float32
        (0, 254, 0.0),
        (15, 254, -torch.inf),
    ],
)
def test_fault_20_edge_scale_codes(code, scale, value):
    assert EXPERTS.decode(*one_group(code, scale))[0, 0].item() == value


def test_fault_20_scale_code_255_is_nan_even_for_element_zero():
    assert torch.isnan(EXPERTS.decode(*one_group(0, 255))).all()


def test_fault_20_smallest_value_is_bf16_0x0020():
    value = EXPERTS.decode(*one_group(1, 0), torch.bfloat16)[0, :1]
    assert value.view(torch.int16).tolist() == [0x0020]


def test_fault_20_all_zero_expert_has_finite_scales_and_decodes_to_zeros():
    packed, scale = EXPERTS.encode(torch.zeros(4, 96))
    assert scale.unique().tolist() == [127]
    assert torch.equal(EXPERTS.decode(packed, scale), torch.zeros(4, 96))


@pytest.mark.parametrize("name", formats.names("index"))
def test_fault_20_all_zero_key_and_query_have_finite_scales_and_decode_to_zeros(name):
    fmt = formats.index(name)
    cache = torch.full((1, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    fmt.write(cache, torch.tensor([0]), torch.zeros(1, 128))
    assert torch.equal(fmt.read(cache, torch.tensor([0])), torch.zeros(1, 128))
    assert torch.equal(fmt.decode_query(*fmt.encode_query(torch.zeros(1, 1, 128))), torch.zeros(1, 1, 128))


def test_fault_20_zero_block_tiny_block_and_full_block_of_a_nvfp4_row():
    fmt = formats.latent("latent.nvfp4.352")
    kv_c = torch.zeros(1, 512)
    kv_c[0, 16:32], kv_c[0, 32:48] = 1e-6, 6.0
    packed = fmt.pack(kv_c, torch.zeros(1, 64), None)
    # Block s has its scale at 320 + 8 (s & 3) + (s >> 2). The policy for a tiny block: the scale stays at
    # e4m3's smallest, 2^-9, so its elements round to zero.
    assert [packed[0, 320 + 8 * s].item() for s in range(3)] == [0x01, 0x01, 0x38]
    values = fmt.unpack(packed, None, torch.float32)[0]
    assert torch.equal(values[:32], torch.zeros(32))
    assert torch.equal(values[32:48], torch.full((16,), 6.0))


def test_fault_20_tiny_mx_block_keeps_its_values():
    packed, scale = EXPERTS.encode(torch.full((1, 32), 1e-6))
    assert scale.item() == 127 - 20 - 2  # 1e-6 is 1.05 * 2^-20
    assert EXPERTS.decode(packed, scale)[0, 0].item() == 2.0**-20


def test_fault_20_float32_scales_are_not_squeezed_to_powers_of_two():
    fmt = formats.latent("latent.flashmla.656")
    cache = torch.zeros(1, 656, dtype=torch.uint8)
    cache[0, :512] = 0x38  # 1.0
    scales = np.array([0.75, 1.3, 3.0, 0.001], dtype="<f4")
    cache[0, 512:528] = torch.from_numpy(scales.view(np.uint8))
    row = fmt.read(cache, 1, torch.tensor([0]))[0]
    assert row[:512].reshape(4, 128).unique(dim=1).flatten().tolist() == scales.tolist()
    assert torch.equal(row[512:], torch.zeros(64))


def test_fault_21_nibbles_are_linear_not_split():
    w = torch.tensor([minifloat_value(j % 16) for j in range(32)])[None]
    packed, scale = EXPERTS.encode(w)
    assert scale.item() == 127
    # −0.0 (code 8) is packed as +0.0 by the library's rule, and the other codes stand in order.
    codes = [0 if j % 16 == 8 else j % 16 for j in range(32)]
    assert packed[0].tolist() == [codes[2 * i + 1] << 4 | codes[2 * i] for i in range(16)]
    assert torch.equal(EXPERTS.decode(packed, scale), w)


@pytest.mark.parametrize("name", ["index.mxfp4.page64", "index.mxfp4.gfx950.page64"])
def test_fault_21_index_nibbles_are_linear(name):
    fmt = formats.index(name)
    w = torch.tensor([minifloat_value(j % 16) for j in range(128)])[None]
    cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.tensor([0]), w)
    bytes_in_order = [cache[0, fmt.element_offset(0, 2 * i)].item() for i in range(16)]
    assert bytes_in_order == [(2 * i + 1) % 16 << 4 | 2 * i % 16 for i in range(16)]


def minifloat_value(code: int) -> float:
    return ELEMENT_VALUES[code & 7] * (-1.0 if code & 8 else 1.0)


def test_fault_21_each_of_eight_groups_has_its_own_scale():
    # K = 256, group g scaled by 2^g, every element 1: the sum over x = 1 is 32 * (2^8 - 1).
    packed = torch.full((1, 128), 0x22, dtype=torch.uint8)
    scale = torch.arange(127, 135, dtype=torch.uint8)[None]
    values = EXPERTS.decode(packed, scale)
    assert values.sum().item() == 32 * 255
    assert values[0, ::32].tolist() == [2.0**g for g in range(8)]


def test_fault_21_scales_split_along_k_with_their_elements():
    w = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    packed, scale = EXPERTS.encode(w)
    whole = EXPERTS.decode(packed, scale)
    for rank in range(8):
        part = EXPERTS.decode(packed[:, 16 * rank : 16 * rank + 16], scale[:, rank : rank + 1])
        assert torch.equal(part, whole[:, 32 * rank : 32 * rank + 32])


def test_fault_21_the_caches_scale_is_a_multiplier_not_a_divisor():
    fmt = formats.latent("latent.fp8.e4m3fn.tensor")
    cache = torch.zeros(1, 576, dtype=torch.uint8)
    fmt.write(
        cache, 1, torch.tensor([0]), torch.full((1, 512), 8.0), torch.full((1, 64), 8.0), torch.tensor([4.0])
    )
    assert cache.unique().tolist() == [0x40]  # 8 / 4 = 2.0
    assert fmt.read(cache, 1, torch.tensor([0]), torch.tensor([4.0])).unique().tolist() == [8.0]


def test_fault_21_n_off_the_tile_is_packed_row_by_row():
    w = torch.randn(130, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = EXPERTS.encode(w)
    for row in (0, 64, 127, 128, 129):
        one, one_scale = EXPERTS.encode(w[row : row + 1])
        assert torch.equal(packed[row], one[0])
        assert torch.equal(scale[row], one_scale[0])


def test_fault_22_one_byte_in_two_dialects():
    assert minifloat.decode(u8(0x38), minifloat.E4M3FN).item() == 1.0
    assert minifloat.decode(u8(0x38), minifloat.E4M3FNUZ).item() == 0.5


def test_fault_22_fnuz_has_no_negative_zero():
    assert minifloat.encode(torch.tensor([-1e-9]), minifloat.E4M3FNUZ).tolist() == [0x00]
    assert minifloat.encode(torch.tensor([-1e-9]), minifloat.E4M3FN).tolist() == [0x80]
    assert torch.isnan(minifloat.decode(u8(0x80), minifloat.E4M3FNUZ)).all()
    assert minifloat.decode(u8(0x80), minifloat.E4M3FN).item() == 0.0


def test_fault_22_largest_values_of_the_dialects():
    assert minifloat.decode(u8(0x7E), minifloat.E4M3FN).item() == 448.0
    assert minifloat.decode(u8(0x7F), minifloat.E4M3FNUZ).item() == 240.0
    beyond = torch.tensor([1e6])
    assert minifloat.encode(beyond, minifloat.E4M3FN).tolist() == [0x7E]
    assert minifloat.encode(beyond, minifloat.E4M3FNUZ).tolist() == [0x7F]


def test_fault_22_index_keys_aim_at_448_and_224():
    keys = torch.full((1, 128), 7.0)
    for element, code in (("e4m3fn", 0x7E), ("e4m3fnuz", 0x7E)):  # 448 in fn, 224 in fnuz
        fmt = formats.index(f"index.fp8.{element}.f32.page64")
        elements, scale = fmt.pack(keys)
        assert elements.unique().tolist() == [code]
        factor = scale[0].clone().view(torch.float32).item()
        assert factor == np.float32(7) / np.float32(448 if element == "e4m3fn" else 224)


def test_fault_22_two_caches_are_each_read_by_their_own_dialect():
    keys = torch.full((1, 128), 1.75)
    slot = torch.tensor([5])
    for name in formats.names("index"):
        fmt = formats.index(name)
        cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
        fmt.write(cache, slot, keys)
        torch.testing.assert_close(fmt.read(cache, slot), keys, rtol=0.15, atol=0)
    scale = torch.ones(1)
    written = {}
    for element in ("e4m3fn", "e4m3fnuz"):
        fmt = formats.latent(f"latent.fp8.{element}.tensor")
        cache = torch.zeros(1, 576, dtype=torch.uint8)
        fmt.write(cache, 1, torch.tensor([0]), torch.ones(1, 512), torch.ones(1, 64), scale)
        written[element] = cache
        assert fmt.read(cache, 1, torch.tensor([0]), scale).unique().tolist() == [1.0]
    swapped = formats.latent("latent.fp8.e4m3fnuz.tensor").read(
        written["e4m3fn"], 1, torch.tensor([0]), scale
    )
    assert swapped.unique().tolist() == [0.5]


def test_fault_22_rows_are_gathered_as_bytes_where_the_fp8_dtype_cannot_be_indexed():
    fmt = formats.latent("latent.fp8.e4m3fn.tensor")
    cache = torch.arange(256, dtype=torch.uint8).repeat(9).reshape(4, 576)
    ours = fmt.read(cache, 1, torch.tensor([0, 3]), torch.ones(1))
    theirs = cache[[0, 3]].view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_fault_08_page_offset_beyond_31_bits_holds_its_own_bytes():
    fmt = formats.index("index.fp8.e4m3fn.f32.page64")
    cache = torch.empty(254_300, 8448, dtype=torch.uint8)  # committed page by page, where touched
    slot = torch.tensor([254_250 * 64])
    fmt.write(cache, slot, torch.full((1, 128), 448.0))
    assert 254_250 * 8448 == 2_147_904_000
    assert cache.view(-1)[2_147_904_000 : 2_147_904_000 + 128].unique().tolist() == [0x7E]
    assert fmt.read(cache, slot).unique().tolist() == [448.0]


def test_fault_23_record_bytes_by_offset_nvfp4():
    fmt = formats.latent("latent.nvfp4.352")
    # Block s is s + 1 times a ramp of e2m1 values, so its amax / 6 is exact in e4m3 up to 16.
    ramp = torch.tensor([minifloat_value(j) for j in range(16)])
    factor = torch.arange(1, 33).clamp(max=16).repeat_interleave(16)
    kv_c = ramp.repeat(32) * factor
    k_pe = torch.arange(64, dtype=torch.float32) / 64
    record = fmt.pack(kv_c[None], k_pe[None], None)[0].tolist()
    assert record[:256] == [((2 * i + 1) % 16) << 4 | (2 * i) % 16 for i in range(256)]
    assert record[256:320] == minifloat.encode(k_pe, minifloat.E4M3FN).tolist()
    scale_code = minifloat.encode(torch.arange(1, 33).clamp(max=16).float(), minifloat.E4M3FN).tolist()
    assert [record[320 + 8 * (s & 3) + (s >> 2)] for s in range(32)] == scale_code


def test_fault_23_record_bytes_by_offset_flashmla():
    fmt = formats.latent("latent.flashmla.656")
    kv_c = torch.full((1, 512), 448.0) * torch.tensor([1.0, 2.0, 4.0, 0.5]).repeat_interleave(128)
    k_pe = torch.arange(64, dtype=torch.float32)[None]
    record = fmt.pack(kv_c, k_pe, None)[0]
    assert record[:512].unique().tolist() == [0x7E]
    assert record[512:528].clone().view(torch.float32).tolist() == [1.0, 2.0, 4.0, 0.5]
    assert record[528:].clone().view(torch.bfloat16).tolist() == k_pe[0].tolist()
    assert len(record) == 656


def test_fault_23_a_record_of_another_format_is_not_guessed():
    mxfp4 = formats.index("index.mxfp4.page64")
    fp8_cache = torch.zeros(1, formats.index("index.fp8.e4m3fn.f32.page64").page_bytes, dtype=torch.uint8)
    with pytest.raises(
        FormatError, match=r"^index\.mxfp4\.page64 takes a cache of \[pages, 4352\] uint8, not"
    ):
        mxfp4.read(fp8_cache, torch.tensor([0]))


def test_fault_23_a_float32_scale_and_e8m0_bytes_are_told_apart_by_name():
    key = torch.full((1, 128), 56.0)  # 448 * 2^-3
    slot, stored = torch.tensor([0]), {}
    for scale in ("pow2", "ue8m0x4"):
        fmt = formats.index(f"index.fp8.e4m3fn.{scale}.page64")
        cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
        fmt.write(cache, slot, key)
        assert torch.equal(fmt.read(cache, slot), key)
        stored[scale] = cache[0, 8192:8196].tolist()
    assert stored == {"pow2": [0, 0, 0, 0x3E], "ue8m0x4": [124] * 4}
