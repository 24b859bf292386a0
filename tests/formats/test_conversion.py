from __future__ import annotations

import numpy as np
import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError, UnknownNameError

FN_F32, FN_POW2, FN_UE8 = (f"index.fp8.e4m3fn.{scale}.page64" for scale in ("f32", "pow2", "ue8m0x4"))
FNUZ, SHUFFLED = "index.fp8.e4m3fnuz.f32.page64", "index.fp8.e4m3fnuz.f32.shuffled.page64"
MXFP4, GFX950 = "index.mxfp4.page64", "index.mxfp4.gfx950.page64"

#: Pairs between which no value may change, whatever the source's writer wrote.
EXACT = [
    (FN_POW2, FN_F32),
    (FN_POW2, FN_UE8),
    (FN_UE8, FN_POW2),
    (FN_UE8, FN_F32),
    (FN_F32, FNUZ),
    (FN_POW2, SHUFFLED),
    (FN_UE8, FNUZ),
    (FNUZ, SHUFFLED),
    (SHUFFLED, FNUZ),
    (FNUZ, FN_F32),
    (SHUFFLED, FN_F32),
    (MXFP4, GFX950),
    (GFX950, MXFP4),
]


def some_pages(name: str, pages: int = 3) -> torch.Tensor:
    """Pages with every slot written, from keys of many magnitudes."""
    fmt = formats.index(name)
    rng = np.random.default_rng(7)
    keys = rng.standard_t(3, (pages * 64, 128)) * 10.0 ** rng.integers(-3, 4, (pages * 64, 1))
    keys[0] = 0.0
    out = torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(out, torch.arange(pages * 64), torch.from_numpy(keys.astype(np.float32)))
    return out


@pytest.mark.parametrize(("src", "dst"), EXACT)
def test_values_do_not_change_where_the_destination_can_hold_them(src, dst):
    pages = some_pages(src)
    converted = formats.convert(src, dst, pages)
    before = formats.index(src).read_pages(pages, torch.float64)
    assert torch.equal(formats.index(dst).read_pages(converted, torch.float64), before)


@pytest.mark.parametrize("name", formats.names("index"))
def test_to_the_same_index_format_bytes_do_not_change(name):
    pages = some_pages(name)
    converted = formats.convert(name, name, pages)
    assert torch.equal(converted, pages)
    assert converted.data_ptr() != pages.data_ptr()


@pytest.mark.parametrize(("src", "dst"), [(MXFP4, GFX950), (FNUZ, SHUFFLED), (FN_POW2, FN_UE8)])
def test_there_and_back_gives_the_same_bytes_whatever_they_are(src, dst):
    fmt = formats.index(src)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (4, fmt.page_bytes), dtype=torch.uint8, generator=generator)
    if src == FN_POW2:
        codes = torch.randint(1, 255, (4, 64), generator=generator, dtype=torch.int32)
        pages[:, 8192:] = (codes << 23).view(torch.uint8).reshape(4, 256)
    assert torch.equal(formats.convert(dst, src, formats.convert(src, dst, pages)), pages)


@pytest.mark.parametrize("src", formats.names("index"))
@pytest.mark.parametrize("dst", formats.names("index"))
def test_every_pair_equals_reading_and_writing_or_is_closer(src, dst):
    a, b = formats.index(src), formats.index(dst)
    pages = some_pages(src, pages=1)
    keys = a.read_pages(pages)[0]
    rewritten = torch.zeros(1, b.page_bytes, dtype=torch.uint8)
    b.write(rewritten, torch.arange(64), keys)
    ours = (b.read_pages(formats.convert(src, dst, pages))[0] - keys).abs().amax(dim=-1)
    theirs = (b.read_pages(rewritten)[0] - keys).abs().amax(dim=-1)
    assert (ours <= theirs).all()


def test_a_raw_scale_is_encoded_anew_and_a_power_of_two_beside_it_is_kept():
    pages = some_pages(FN_F32, pages=1)
    pages[0, 8192:8196] = torch.tensor([0, 0, 0, 0x41], dtype=torch.uint8)  # 8.0
    converted = formats.convert(FN_F32, FN_POW2, pages)
    assert torch.equal(converted[0, :128], pages[0, :128])
    assert torch.equal(converted[0, 8192:8196], pages[0, 8192:8196])
    fmt = formats.index(FN_POW2)
    again = torch.zeros_like(converted)
    fmt.write(again, torch.arange(64), formats.index(FN_F32).read_pages(pages)[0])
    assert torch.equal(converted[0, 128:8192], again[0, 128:8192])
    assert torch.equal(converted[0, 8196:], again[0, 8196:])


def test_dialects_map_nan_negative_zero_and_the_code_without_counterpart():
    page = torch.zeros(1, 8448, dtype=torch.uint8)
    page[0, :6] = torch.tensor([0x80, 0x7F, 0xFF, 0x38, 0xFE, 0x01], dtype=torch.uint8)
    page[0, 8192:8448:4] = 0
    page[0, 8195:8448:4] = 0x40  # scale 2.0
    converted = formats.convert(FN_F32, FNUZ, page)
    assert converted[0, :6].tolist() == [0x00, 0x80, 0x80, 0x38, 0xFE, 0x01]
    assert converted[0, 8192:8196].tolist() == [0, 0, 0x80, 0x40]  # 4.0
    back = formats.convert(FNUZ, FN_F32, converted)
    assert back[0, :6].tolist() == [0x00, 0x7F, 0x7F, 0x38, 0xFE, 0x01]
    assert back[0, 8192:8196].tolist() == [0, 0, 0, 0x40]


def test_a_row_with_the_code_that_fn_lacks_is_encoded_anew():
    page = torch.zeros(1, 8448, dtype=torch.uint8)
    page[0, 8194:8448:4], page[0, 8195:8448:4] = 0x80, 0x3F  # 1.0
    page[0, 0], page[0, 128] = 0x7F, 0x40  # 240 in key 0, 2^0 in key 1
    converted = formats.convert(FNUZ, FN_F32, page)
    values = formats.index(FN_F32).read_pages(converted, torch.float64)[0]
    assert abs(values[0, 0].item() - 240.0) < 1e-4
    assert values[1, 0].item() == formats.index(FNUZ).read_pages(page)[0, 1, 0].item()


def test_four_unequal_ue8m0_bytes_are_encoded_anew():
    page = torch.zeros(1, 8448, dtype=torch.uint8)
    page[0, :8192], page[0, 8192:] = 0x38, 127
    page[0, 8192:8196] = torch.tensor([127, 128, 127, 127], dtype=torch.uint8)
    values = formats.index(FN_POW2).read_pages(formats.convert(FN_UE8, FN_POW2, page))[0]
    assert values[0].tolist() == [1.0] * 32 + [2.0] * 32 + [1.0] * 64
    assert torch.equal(values[1:], torch.ones(63, 128))


def test_nan_keys_stay_nan():
    page = torch.zeros(1, 8448, dtype=torch.uint8)
    page[0, 8192:] = 255
    for dst in (FN_F32, FN_POW2, FNUZ, MXFP4):
        converted = formats.convert(FN_UE8, dst, page)
        assert torch.isnan(formats.index(dst).read_pages(converted)).all()


def test_strided_pages_are_read_by_their_stride():
    pages = some_pages(FN_POW2)
    pool = torch.zeros(3, 9000, dtype=torch.uint8)
    pool[:, 5 : 5 + 8448] = pages
    assert torch.equal(
        formats.convert(FN_POW2, FN_UE8, pool[:, 5 : 5 + 8448]), formats.convert(FN_POW2, FN_UE8, pages)
    )


def test_no_pages_give_no_pages():
    assert formats.convert(FN_F32, MXFP4, torch.empty(0, 8448, dtype=torch.uint8)).shape == (0, 4352)


def latent_rows(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    fmt = formats.latent(name)
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0625]) if fmt.needs_scale else None
    kv_c, k_pe = (torch.randn(9, n, generator=generator) for n in (512, 64))
    return fmt.pack(kv_c, k_pe, scale), scale


@pytest.mark.parametrize("src", formats.names("latent"))
@pytest.mark.parametrize("dst", formats.names("latent"))
def test_latents_are_decoded_and_encoded(src, dst):
    rows, scale = latent_rows(src)
    b = formats.latent(dst)
    dst_scale = torch.tensor([0.03125]) if b.needs_scale else None
    converted = formats.convert(src, dst, rows, src_scale=scale, dst_scale=dst_scale)
    latent = formats.latent(src).unpack(rows, scale, torch.float32)
    expected = b.pack(latent[:, :512], latent[:, 512:], dst_scale)
    assert torch.equal(converted, rows if src == dst and not b.needs_scale else expected)


@pytest.mark.parametrize("name", formats.names("latent"))
def test_to_the_same_latent_format_and_scale_bytes_do_not_change(name):
    _, scale = latent_rows(name)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 256, (5, formats.latent(name).row_bytes), dtype=torch.uint8, generator=generator)
    assert torch.equal(formats.convert(name, name, rows, src_scale=scale, dst_scale=scale), rows)


def test_a_bf16_latent_takes_any_fp8_latent_without_change():
    rows, scale = latent_rows("latent.fp8.e4m3fn.tensor")
    converted = formats.convert("latent.fp8.e4m3fn.tensor", "latent.bf16", rows, src_scale=scale)
    before = formats.latent("latent.fp8.e4m3fn.tensor").unpack(rows, scale, torch.float64)
    assert torch.equal(formats.latent("latent.bf16").unpack(converted, None, torch.float64), before)


def test_the_scale_of_each_side_is_asked_for():
    rows, _ = latent_rows("latent.fp8.e4m3fn.tensor")
    with pytest.raises(FormatError, match=r"^latent\.fp8\.e4m3fn\.tensor needs k_scale"):
        formats.convert("latent.fp8.e4m3fn.tensor", "latent.bf16", rows)


def test_formats_of_two_kinds_are_refused():
    with pytest.raises(FormatError) as caught:
        formats.convert(MXFP4, "latent.bf16", torch.zeros(1, 4352, dtype=torch.uint8))
    assert str(caught.value) == (
        "'index.mxfp4.page64' holds index and 'latent.bf16' holds latent: convert between formats of one kind"
    )


def test_experts_are_sent_to_decode_and_encode():
    with pytest.raises(FormatError) as caught:
        formats.convert("experts.mxfp4-pack", "experts.mxfp4-pack", torch.zeros(1, dtype=torch.uint8))
    assert str(caught.value) == (
        "experts are two tensors a matrix: use decode of 'experts.mxfp4-pack', "
        "then encode of 'experts.mxfp4-pack'"
    )


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"^unknown format 'index\.mxfp4\.page32'; did you mean 'index\.mxfp4\."
    ):
        formats.convert("index.mxfp4.page32", MXFP4, torch.zeros(1, 4352, dtype=torch.uint8))


def test_data_of_another_size_is_refused():
    with pytest.raises(FormatError) as caught:
        formats.convert(MXFP4, GFX950, torch.zeros(1, 8448, dtype=torch.uint8))
    assert str(caught.value) == "index.mxfp4.page64 takes a cache of [pages, 4352] uint8, not [1, 8448] uint8"


def test_pages_of_another_length_are_refused():
    short = formats.IndexFormat(name="index.test.page32", element="e4m3fn", scale="f32", page=32)
    from kimi_hal.formats import converted_bytes

    with pytest.raises(FormatError) as caught:
        converted_bytes.index_pages(short, formats.index(FN_F32), torch.zeros(1, 4224, dtype=torch.uint8))
    assert str(caught.value) == (
        "'index.test.page32' has pages of 32 keys of 128, 'index.fp8.e4m3fn.f32.page64' of 64 of 128: "
        "read the keys and write them"
    )
