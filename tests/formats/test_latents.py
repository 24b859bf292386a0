from __future__ import annotations

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError
from kimi_hal.formats import LatentFormat

NAMES = formats.names("latent")
POISON = 0xA5
SCALE = np.float32(0.0173)


def some_latents(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Latents with a zero row, a huge one, ties and signed zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(3, (n, 576)) * 2.0 ** rng.integers(-4, 5, (n, 1))).astype(np.float32)
    x[0] = 0.0
    if n > 2:
        x[1] *= np.float32(1e4)
        x[2, :6] = [-0.0, 1e-9, -1e-9, 0.25, 2.5, -5.0]
    return x[:, :512].copy(), x[:, 512:].copy()


def k_scale(fmt: LatentFormat) -> torch.Tensor | None:
    return torch.tensor([SCALE]) if fmt.needs_scale else None


def row(fmt: LatentFormat, kv_c: np.ndarray, k_pe: np.ndarray) -> np.ndarray:
    """The oracle's bytes of one token."""
    if fmt.name == "latent.nvfp4.352":
        return oracle.nvfp4_row(kv_c, k_pe)
    if fmt.name == "latent.flashmla.656":
        return oracle.flashmla_row(kv_c, k_pe)
    both = np.concatenate((kv_c, k_pe))
    if fmt.name == "latent.bf16":
        return oracle.bf16_bytes(both)
    return oracle.encode((both / SCALE).astype(np.float32), fmt.name.split(".")[2])


def value(fmt: LatentFormat, packed: np.ndarray) -> np.ndarray:
    """The oracle's values of one token's bytes, exact in float64."""
    if fmt.name == "latent.nvfp4.352":
        nibbles = np.stack((packed[:256] & 15, packed[:256] >> 4), axis=-1).reshape(-1)
        order = [320 + 8 * (s & 3) + (s >> 2) for s in range(32)]
        scale = np.repeat(oracle.decode(packed[order], "e4m3fn"), 16)
        tail = oracle.decode(packed[256:320], "e4m3fn")
        return np.concatenate((oracle.decode(nibbles, "e2m1") * scale, tail))
    if fmt.name == "latent.flashmla.656":
        scale = np.repeat(packed[512:528].copy().view("<f4").astype(np.float64), 128)
        tail = (packed[528:].copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
        return np.concatenate((oracle.decode(packed[:512], "e4m3fn") * scale, tail))
    if fmt.name == "latent.bf16":
        return (packed.copy().view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return oracle.decode(packed, fmt.name.split(".")[2]) * float(SCALE)


def strided_cache(fmt: LatentFormat, pages: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    pool = torch.full((pages, page * fmt.row_bytes + 64), POISON, dtype=torch.uint8)
    return pool, pool[:, 32:-32]


def write(
    fmt: LatentFormat, cache: torch.Tensor, page: int, slots: list[int], parts: tuple[np.ndarray, ...]
) -> None:
    kv_c, k_pe = (torch.from_numpy(part) for part in parts)
    fmt.write(cache, page, torch.tensor(slots), kv_c, k_pe, k_scale(fmt))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", [1, 7, 64])
def test_write_puts_the_oracles_bytes_and_touches_no_other(name, page):
    fmt = formats.latent(name)
    pool, cache = strided_cache(fmt, pages=16, page=page)
    slots = [0, 16 * page - 1, 3, 9, page]
    if len(set(slots)) < len(slots):
        slots = [0, 15, 3, 9, 2]
    parts = some_latents(5)
    wanted = pool.clone()
    for i, slot in enumerate(slots):
        at = 32 + slot % page * fmt.row_bytes
        packed = row(fmt, parts[0][i], parts[1][i])
        wanted[slot // page, at : at + fmt.row_bytes] = torch.from_numpy(packed)
    write(fmt, cache, page, slots, parts)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_equal_the_oracle(name):
    fmt, parts = formats.latent(name), some_latents(100, seed=5)
    packed = fmt.pack(torch.from_numpy(parts[0]), torch.from_numpy(parts[1]), k_scale(fmt))
    for i in range(100):
        assert packed[i].tolist() == row(fmt, parts[0][i], parts[1][i]).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_read_gives_exact_values_in_float64(name):
    fmt = formats.latent(name)
    _, cache = strided_cache(fmt, pages=3, page=5)
    slots, parts = [0, 14, 6, 7, 5], some_latents(5)
    write(fmt, cache, 5, slots, parts)
    ours = fmt.read(cache, 5, torch.tensor([7, 0, 7, 14]), k_scale(fmt), torch.float64)
    expected = [value(fmt, row(fmt, parts[0][i], parts[1][i])) for i in (3, 0, 3, 1)]
    assert ours.tolist() == np.array(expected).tolist()


def test_a_record_s_scales_are_those_of_its_bytes() -> None:
    fmt = formats.latent("latent.flashmla.656")
    _, cache = strided_cache(fmt, pages=3, page=5)
    slots, parts = [0, 14, 6, 7, 5], some_latents(5)
    write(fmt, cache, 5, slots, parts)
    packed = [row(fmt, parts[0][i], parts[1][i]) for i in (3, 1)]
    assert fmt.scales(cache, 5, torch.tensor([7, 14])).tolist() == [
        p[512:528].copy().view("<f4").tolist() for p in packed
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "latent.flashmla.656"])
def test_where_no_float32_scale_stands_in_a_row_there_is_one_of_1(name: str) -> None:
    fmt = formats.latent(name)
    cache = torch.zeros(1, 4 * fmt.row_bytes, dtype=torch.uint8)
    assert fmt.scales(cache, 4, torch.tensor([2, 0])).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("name", [*NAMES])
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_reading_looks_at_no_other_byte(name, fill):
    fmt, parts = formats.latent(name), some_latents(3)
    clean, dirty = (torch.full((2, 4 * fmt.row_bytes), f, dtype=torch.uint8) for f in (0, fill))
    for cache in (clean, dirty):
        write(fmt, cache, 4, [1, 6, 3], parts)
    slots = torch.tensor([6, 1, 3])
    ours = (fmt.read(cache, 4, slots, k_scale(fmt)) for cache in (clean, dirty))
    assert torch.equal(*ours)


@pytest.mark.parametrize("name", NAMES)
def test_read_multiplies_in_the_dtype_asked_for(name):
    fmt, parts = formats.latent(name), some_latents(8)
    cache = torch.zeros(1, 8 * fmt.row_bytes, dtype=torch.uint8)
    write(fmt, cache, 8, list(range(8)), parts)
    read = {d: fmt.read(cache, 8, torch.arange(8), k_scale(fmt), d) for d in (torch.float32, torch.float64)}
    assert read[torch.float32].dtype == torch.float32
    assert torch.equal(read[torch.float64].float(), read[torch.float32])
    assert torch.equal(fmt.read(cache, 8, torch.arange(8), k_scale(fmt)), read[torch.float32])


@pytest.mark.parametrize("name", NAMES)
def test_of_two_rows_with_one_slot_the_later_is_kept_whole(name):
    fmt, parts = formats.latent(name), some_latents(4)
    both, last = (torch.zeros(1, 4 * fmt.row_bytes, dtype=torch.uint8) for _ in range(2))
    write(fmt, both, 4, [2, 0, 2, 0], parts)
    write(fmt, last, 4, [2, 0], (parts[0][2:], parts[1][2:]))
    assert torch.equal(both, last)


@pytest.mark.parametrize("name", NAMES)
def test_no_slots_write_and_read_nothing(name):
    fmt = formats.latent(name)
    pool, cache = strided_cache(fmt, pages=2, page=3)
    write(fmt, cache, 3, [], (np.zeros((0, 512), np.float32), np.zeros((0, 64), np.float32)))
    assert (pool == POISON).all()
    none = torch.empty(0, dtype=torch.int64)
    assert fmt.read(cache, 3, none, k_scale(fmt)).shape == (0, 576)


@pytest.mark.parametrize("name", NAMES)
def test_nan_reaches_the_reader(name):
    fmt = formats.latent(name)
    kv_c, k_pe = torch.ones(1, 512), torch.ones(1, 64)
    kv_c[0, 100], k_pe[0, 3] = torch.nan, -torch.nan
    values = fmt.unpack(fmt.pack(kv_c, k_pe, k_scale(fmt)), k_scale(fmt), torch.float32)[0]
    where = torch.isnan(values).nonzero().flatten().tolist()
    # A type without NaN says it through the block's scale, 16 elements wide.
    assert where == ([*range(96, 112), 515] if "nvfp4" in name else [100, 515])


@pytest.mark.parametrize("name", NAMES)
def test_infinity_saturates_or_stays(name):
    fmt = formats.latent(name)
    kv_c, k_pe = torch.ones(1, 512), torch.ones(1, 64)
    kv_c[0, 0], k_pe[0, 0] = torch.inf, -torch.inf
    values = fmt.unpack(fmt.pack(kv_c, k_pe, k_scale(fmt)), k_scale(fmt), torch.float64)[0]
    largest = {"fn": 448 * float(SCALE), "fnuz": 240 * float(SCALE)}
    first = {
        "latent.bf16": torch.inf,
        "latent.nvfp4.352": 6.0 * 448,
        "latent.flashmla.656": 448 * 2.0**127,
        "latent.fp8.e4m3fn.tensor": largest["fn"],
        "latent.fp8.e4m3fnuz.tensor": largest["fnuz"],
    }[name]
    assert values[0].item() == first
    assert values[512].item() == {
        "latent.bf16": -torch.inf,
        "latent.nvfp4.352": -448.0,
        "latent.flashmla.656": -torch.inf,
    }.get(name, -first)


def test_row_sizes_are_those_of_the_field():
    assert {name: formats.latent(name).row_bytes for name in NAMES} == {
        "latent.bf16": 1152,
        "latent.flashmla.656": 656,
        "latent.fp8.e4m3fn.tensor": 576,
        "latent.fp8.e4m3fnuz.tensor": 576,
        "latent.nvfp4.352": 352,
    }
    assert [name for name in NAMES if formats.latent(name).needs_scale] == [
        "latent.fp8.e4m3fn.tensor",
        "latent.fp8.e4m3fnuz.tensor",
    ]


def test_nvfp4_scale_is_rounded_up_so_that_amax_never_saturates():
    fmt = formats.latent("latent.nvfp4.352")
    values = oracle.grid("e4m3fn")
    kv_c = np.zeros((126, 512), np.float32)
    kv_c[:, 0] = 6 * (values[1:] * 0.51 + values[:-1] * 0.49)
    packed = fmt.pack(torch.from_numpy(kv_c), torch.zeros(126, 64), None)
    assert packed[:, 320].tolist() == list(range(1, 127))
    largest = fmt.unpack(packed, None, torch.float64)[:, 0]
    assert (largest >= torch.from_numpy(kv_c[:, 0]) * 0.75).all()


def test_nvfp4_zero_block_has_the_smallest_scale_and_decodes_to_zeros():
    fmt = formats.latent("latent.nvfp4.352")
    packed = fmt.pack(torch.zeros(1, 512), torch.zeros(1, 64), None)
    assert packed[0, :320].tolist() == [0] * 320
    assert packed[0, 320:].tolist() == [1] * 32
    assert torch.equal(fmt.unpack(packed, None, torch.float32), torch.zeros(1, 576))


def test_nvfp4_values_are_exact_in_bf16():
    fmt = formats.latent("latent.nvfp4.352")
    rows = torch.zeros(128, 352, dtype=torch.uint8)
    rows[:, :16] = torch.arange(16, dtype=torch.uint8) * 17
    rows[:, 320:] = torch.arange(128, dtype=torch.uint8)[:, None]
    exact = fmt.unpack(rows, None, torch.float64)
    torch.testing.assert_close(
        fmt.unpack(rows, None, torch.bfloat16).double(), exact, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("element", ["e4m3fn", "e4m3fnuz"])
def test_division_by_k_scale_is_correctly_rounded(element):
    fmt = formats.latent(f"latent.fp8.{element}.tensor")
    kv_c = np.random.default_rng(6).standard_normal((300, 512)).astype(np.float32)
    packed = fmt.pack(torch.from_numpy(kv_c), torch.zeros(300, 64), torch.tensor([SCALE]))
    np.testing.assert_array_equal(packed[:, :512].numpy(), oracle.encode(kv_c / SCALE, element))


def test_a_missing_scale_is_named():
    fmt = formats.latent("latent.fp8.e4m3fn.tensor")
    with pytest.raises(FormatError) as caught:
        fmt.read(torch.zeros(1, 576, dtype=torch.uint8), 1, torch.tensor([0]))
    assert str(caught.value) == (
        "latent.fp8.e4m3fn.tensor needs k_scale, the one-element float32 factor of the cache"
    )


def test_a_scale_without_meaning_is_refused():
    fmt = formats.latent("latent.nvfp4.352")
    with pytest.raises(FormatError) as caught:
        fmt.read(torch.zeros(1, 352, dtype=torch.uint8), 1, torch.tensor([0]), torch.ones(1))
    assert str(caught.value) == "latent.nvfp4.352 carries its own scales and takes no k_scale"


def test_a_cache_of_another_page_is_refused():
    fmt = formats.latent("latent.nvfp4.352")
    with pytest.raises(FormatError) as caught:
        fmt.read(torch.zeros(2, 352, dtype=torch.uint8), 64, torch.tensor([0]))
    assert str(caught.value) == ("latent.nvfp4.352 takes a cache of [pages, 22528] uint8, not [2, 352] uint8")


def test_a_format_without_packing_says_what_to_define():
    bare = LatentFormat(name="latent.bare", row_bytes=576)
    with pytest.raises(FormatError) as caught:
        bare.pack(torch.zeros(1, 512), torch.zeros(1, 64), None)
    assert str(caught.value) == "LatentFormat 'latent.bare' does not say how a row is packed: define pack()"


def test_an_offset_beyond_2_to_the_31_is_reached():
    fmt = formats.latent("latent.nvfp4.352")
    cache = torch.empty(95_400, 64 * 352, dtype=torch.uint8)
    slot = 95_399 * 64 + 63
    parts = some_latents(3)
    write(fmt, cache, 64, [slot], (parts[0][2:], parts[1][2:]))
    assert slot * 352 > 2**31
    stored = cache.view(-1)[slot * 352 : (slot + 1) * 352]
    assert stored.tolist() == row(fmt, parts[0][2], parts[1][2]).tolist()


def test_nvfp4_elements_are_multiplied_by_the_rounded_reciprocal():
    # Ties of x / scale, where the product with the float32 reciprocal may fall to one side.
    scales = oracle.grid("e4m3fn")[8:64].astype(np.float32)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    kv_c = np.zeros((len(scales), 512), np.float32)
    kv_c[:, 0], kv_c[:, 1:8] = 6 * scales, scales[:, None] * ties
    packed = formats.latent("latent.nvfp4.352").pack(
        torch.from_numpy(kv_c), torch.zeros(len(scales), 64), None
    )
    for row_bytes, x in zip(packed, kv_c, strict=True):
        assert row_bytes.tolist() == oracle.nvfp4_row(x, np.zeros(64, np.float32)).tolist()
    divided = oracle.encode(kv_c[:, :16] / scales[:, None], "e2m1")
    assert (packed[:, :8].numpy() != oracle.pack_nibbles(divided.ravel()).reshape(-1, 8)).any()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001])
def test_bf16_nan_of_any_sign_and_payload_is_written_as_0x7fc0(bits):
    nan = torch.from_numpy(np.full((3, 64), bits, np.uint32).view(np.float32))
    packed = formats.latent("latent.bf16").pack(nan.repeat(1, 8), nan, None)
    assert packed.reshape(-1, 2).unique(dim=0).tolist() == [[0xC0, 0x7F]]
