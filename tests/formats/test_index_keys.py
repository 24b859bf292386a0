from __future__ import annotations

import format_oracle as oracle
import numpy as np
import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError
from kimi_hal.formats import IndexFormat

NAMES = formats.names("index")
PAGES = 3
POISON = 0xA5


def some_keys(n: int, seed: int = 0) -> np.ndarray:
    """Keys of several magnitudes, with a zero row, ties, signed zeros and subnormals among them."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_t(3, (n, 128)) * 10.0 ** rng.integers(-6, 7, (n, 1))
    keys = keys.astype(np.float32)
    keys[0] = 0.0
    if n > 1:
        keys[1, :8] = [448, -0.0, 17, 19, 1e-40, -1e-40, 0.0009765625, -2.5]
        keys[1, 8:] = 0.0
    return keys


def strided_cache(fmt: IndexFormat, pages: int = PAGES) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache inside a poisoned pool: canaries before, after and between its pages."""
    pool = torch.full((pages, fmt.page_bytes + 96), POISON, dtype=torch.uint8)
    return pool, pool[:, 48:-48]


def expected_pool(fmt: IndexFormat, pool: torch.Tensor, slots: list[int], keys: np.ndarray) -> torch.Tensor:
    """What the pool has to hold after the write, byte by byte from the oracle."""
    wanted = pool.clone()
    for slot, key in zip(slots, keys, strict=True):
        elements, scale = oracle.index_row(key, fmt.element, fmt.scale)
        page, token = divmod(slot, 64)
        for at, byte in oracle.index_bytes(fmt.name, token, elements, scale).items():
            wanted[page, 48 + at] = byte
    return wanted


@pytest.mark.parametrize("name", NAMES)
def test_write_puts_the_oracles_bytes_and_touches_no_other(name):
    fmt = formats.index(name)
    pool, cache = strided_cache(fmt)
    slots = [0, 191, 63, 64, 17, 100, 130]
    keys = some_keys(len(slots))
    wanted = expected_pool(fmt, pool, slots, keys)
    fmt.write(cache, torch.tensor(slots), torch.from_numpy(keys))
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_every_slot_of_a_page_gets_the_oracles_bytes(name):
    fmt = formats.index(name)
    pool, cache = strided_cache(fmt, pages=1)
    slots = np.random.default_rng(1).permutation(64).tolist()
    keys = some_keys(64, seed=2)
    wanted = expected_pool(fmt, pool, slots, keys)
    fmt.write(cache, torch.tensor(slots), torch.from_numpy(keys))
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_page_offsets_as_data_agree_with_the_bytes(name):
    fmt = formats.index(name)
    for token in range(64):
        elements = np.arange(fmt.element_bytes, dtype=np.int64) % 251
        spread = oracle.index_bytes(name, token, elements.astype(np.uint8), np.arange(4, dtype=np.uint8))
        dims = range(0, 128, 2) if fmt.element == "e2m1" else range(128)
        assert [spread[fmt.element_offset(token, dim)] for dim in dims] == elements.tolist()
        assert [spread[fmt.scale_offset(token, byte)] for byte in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_page_offsets_cover_the_page_once(name):
    fmt = formats.index(name)
    step = 2 if fmt.element == "e2m1" else 1
    offsets = [fmt.element_offset(token, dim) for token in range(64) for dim in range(0, 128, step)]
    offsets += [fmt.scale_offset(token, byte) for token in range(64) for byte in range(4)]
    assert sorted(offsets) == list(range(fmt.page_bytes))


def test_shuffled_page_is_the_plain_one_in_16_by_16_tiles():
    plain, shuffled = (formats.index(f"index.fp8.e4m3fnuz.f32{s}.page64") for s in ("", ".shuffled"))
    keys = torch.from_numpy(some_keys(64))
    pages = [torch.zeros(1, 8448, dtype=torch.uint8) for _ in range(2)]
    for fmt, page in zip((plain, shuffled), pages, strict=True):
        fmt.write(page, torch.arange(64), keys)
    tiles = pages[0][0, :8192].reshape(4, 16, 8, 16).permute(0, 2, 1, 3).reshape(-1)
    assert torch.equal(pages[1][0, :8192], tiles)
    assert torch.equal(pages[1][0, 8192:], pages[0][0, 8192:])


def test_gfx950_page_is_the_plain_one_in_runs_of_32_tokens():
    plain, gfx950 = formats.index("index.mxfp4.page64"), formats.index("index.mxfp4.gfx950.page64")
    keys = torch.from_numpy(some_keys(64))
    pages = [torch.zeros(1, 4352, dtype=torch.uint8) for _ in range(2)]
    for fmt, page in zip((plain, gfx950), pages, strict=True):
        fmt.write(page, torch.arange(64), keys)
    values = pages[0][0, :4096].reshape(2, 32, 4, 16).permute(0, 2, 1, 3).reshape(-1)
    # Scale s of a token: s = 2 * high + low, stored [run, low, token, high].
    scales = pages[0][0, 4096:].reshape(2, 32, 2, 2).permute(0, 3, 1, 2).reshape(-1)
    assert torch.equal(pages[1][0], torch.cat((values, scales)))


@pytest.mark.parametrize("name", NAMES)
def test_read_gives_element_times_scale_of_the_named_slots(name):
    fmt = formats.index(name)
    _, cache = strided_cache(fmt)
    slots, keys = [5, 70, 127, 128, 0], some_keys(5)
    fmt.write(cache, torch.tensor(slots), torch.from_numpy(keys))
    order = torch.tensor([128, 5, 5, 0])
    expected = []
    for slot in order.tolist():
        elements, scale = oracle.index_row(keys[slots.index(slot)], fmt.element, fmt.scale)
        expected.append(decoded(fmt, elements, scale))
    ours = fmt.read(cache, order, torch.float64)
    assert ours.tolist() == np.array(expected).tolist()


def decoded(fmt: IndexFormat, elements: np.ndarray, scale: np.ndarray) -> np.ndarray:
    if fmt.element == "e2m1":
        nibbles = np.stack((elements & 15, elements >> 4), axis=-1).reshape(-1)
        return oracle.decode(nibbles, "e2m1") * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32)
    power = 2.0 ** (float(scale[0]) - 127)
    factor = power if fmt.scale == "ue8m0x4" else float(scale.copy().view("<f4")[0])
    return oracle.decode(elements, fmt.element) * factor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_read_multiplies_in_the_dtype_asked_for(name, dtype):
    fmt = formats.index(name)
    _, cache = strided_cache(fmt)
    slots = torch.arange(64, 96)
    fmt.write(cache, slots, torch.from_numpy(some_keys(32)))
    elements, scale = (x.double() for x in parts(fmt, cache, slots))
    assert fmt.read(cache, slots, dtype).dtype == dtype
    assert torch.equal(fmt.read(cache, slots, dtype), elements.to(dtype) * scale.to(dtype))


def parts(fmt: IndexFormat, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, and the scale of each, read one by one through the offsets."""
    elements, scale = [], []
    for slot in slots.tolist():
        page = cache[slot // 64].numpy()
        row = [page[fmt.element_offset(slot % 64, dim)] for dim in range(128)]
        four = np.array([page[fmt.scale_offset(slot % 64, byte)] for byte in range(4)])
        if fmt.element == "e2m1":
            row = [byte >> 4 if dim % 2 else byte & 15 for dim, byte in enumerate(row)]
        elements.append(oracle.decode(np.array(row), fmt.element))
        e8m0 = np.repeat(2.0 ** (four.astype(np.float64) - 127), 32)
        plain = np.full(128, four.view("<f4")[0].astype(np.float64))
        scale.append(e8m0 if "e8m0" in fmt.scale else plain)
    return torch.tensor(np.array(elements)), torch.tensor(np.array(scale))


@pytest.mark.parametrize("name", NAMES)
def test_reading_looks_at_no_other_byte(name):
    fmt = formats.index(name)
    slots = torch.tensor([3, 64, 190])
    results = []
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        cache = torch.full((PAGES, fmt.page_bytes), fill, dtype=torch.uint8)
        fmt.write(cache, slots, torch.from_numpy(some_keys(3)))
        results.append(fmt.read(cache, slots))
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("name", NAMES)
def test_read_pages_gives_every_key_in_token_order(name):
    fmt = formats.index(name)
    _, cache = strided_cache(fmt)
    fmt.write(cache, torch.arange(192), torch.from_numpy(some_keys(192)))
    pages = fmt.read_pages(cache, torch.float64)
    assert pages.shape == (3, 64, 128)
    assert torch.equal(pages.reshape(192, 128), fmt.read(cache, torch.arange(192), torch.float64))
    assert torch.equal(fmt.read_pages(cache[1:2])[0].double(), pages[1].float().double())


@pytest.mark.parametrize("name", NAMES)
def test_of_two_rows_with_one_slot_the_later_is_kept_whole(name):
    fmt = formats.index(name)
    keys = torch.from_numpy(some_keys(6))
    both, last = (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8) for _ in range(2))
    fmt.write(both, torch.tensor([7, 9, 7, 9, 7, 8]), keys)
    fmt.write(last, torch.tensor([9, 7, 8]), keys[3:])
    assert torch.equal(both, last)


@pytest.mark.parametrize("name", NAMES)
def test_no_slots_write_and_read_nothing(name):
    fmt = formats.index(name)
    pool, cache = strided_cache(fmt)
    none = torch.empty(0, dtype=torch.int64)
    fmt.write(cache, none, torch.empty(0, 128))
    assert (pool == POISON).all()
    assert fmt.read(cache, none).shape == (0, 128)
    assert fmt.read_pages(cache[:0]).shape == (0, 64, 128)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_keys_give_the_bytes_of_the_same_float32_keys(name):
    fmt = formats.index(name)
    keys = torch.from_numpy(some_keys(64)).bfloat16()
    ours, theirs = (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8) for _ in range(2))
    fmt.write(ours, torch.arange(64), keys)
    fmt.write(theirs, torch.arange(64), keys.float())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_strided_key_tensor_is_read_by_its_strides(name):
    fmt = formats.index(name)
    wide = torch.from_numpy(some_keys(64).repeat(2, axis=1).copy())
    ours, theirs = (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8) for _ in range(2))
    fmt.write(ours, torch.arange(64), wide[:, 64:192])
    fmt.write(theirs, torch.arange(64), wide[:, 64:192].contiguous())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [n for n in NAMES if "fp8" in n])
def test_a_nan_element_stays_one_element(name):
    fmt = formats.index(name)
    keys = torch.ones(1, 128)
    keys[0, 77] = torch.nan
    cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.tensor([5]), keys)
    ours = fmt.read(cache, torch.tensor([5]), torch.float64)[0]
    assert torch.isnan(ours).nonzero().tolist() == [[77]]
    other = torch.arange(128) != 77
    torch.testing.assert_close(ours[other], torch.ones(127, dtype=torch.float64), rtol=1e-6, atol=0)


def test_four_unequal_ue8m0_bytes_scale_32_elements_each():
    fmt = formats.index("index.fp8.e4m3fn.ue8m0x4.page64")
    cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    cache[0, :128] = 0x38  # 1.0
    cache[0, 8192:8196] = torch.tensor([127, 128, 0, 255], dtype=torch.uint8)
    row = fmt.read(cache, torch.tensor([0]))[0].reshape(4, 32)
    assert row[:3, 0].tolist() == [1.0, 2.0, 2.0**-127]
    assert torch.isnan(row[3]).all()
    assert torch.equal(row[:3], row[:3, :1].expand(3, 32))


def test_page_sizes_are_those_of_the_field():
    sizes = {name: (formats.index(name).row_bytes, formats.index(name).page_bytes) for name in NAMES}
    assert set(sizes.values()) == {(132, 8448), (68, 4352)}
    assert sizes["index.mxfp4.gfx950.page64"] == (68, 4352)


def test_an_offset_beyond_2_to_the_31_is_reached():
    fmt = formats.index("index.fp8.e4m3fn.pow2.page64")
    # The pool is never touched but for one page, so the host commits a page or two of memory.
    cache = torch.empty(254_300, 8448, dtype=torch.uint8)
    slot = torch.tensor([254_250 * 64 + 9])
    key = torch.from_numpy(some_keys(2)[1:])
    fmt.write(cache, slot, key)
    elements, _ = oracle.index_row(key[0].numpy(), fmt.element, fmt.scale)
    start = 254_250 * 8448 + 9 * 128
    assert start > 2**31
    assert cache.view(-1)[start : start + 128].tolist() == elements.tolist()
    assert torch.equal(fmt.read(cache, slot), fmt.unpack(*fmt.pack(key), torch.float32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.zeros(2, 8449, dtype=torch.uint8),
            "index.fp8.e4m3fn.f32.page64 takes a cache of [pages, 8448] uint8, not [2, 8449] uint8",
        ),
        (
            lambda: torch.zeros(2, 8448),
            "index.fp8.e4m3fn.f32.page64 takes a cache of [pages, 8448] uint8, not [2, 8448] float32",
        ),
        (
            lambda: torch.zeros(8448, 2, dtype=torch.uint8).T,
            "index.fp8.e4m3fn.f32.page64 takes pages of consecutive bytes, stride(1) = 1, not 2",
        ),
    ],
)
def test_a_cache_that_is_not_in_the_format_is_refused(make, message):
    fmt = formats.index("index.fp8.e4m3fn.f32.page64")
    with pytest.raises(FormatError) as caught:
        fmt.read(make(), torch.tensor([0]))
    assert str(caught.value) == message


def test_a_tile_that_does_not_divide_the_page_is_refused():
    with pytest.raises(FormatError) as caught:
        IndexFormat(name="index.odd", element="e4m3fn", scale="f32", tile_tokens=48)
    assert str(caught.value) == "format 'index.odd': 48 does not divide 64; see IndexFormat"


def test_a_scale_that_the_element_does_not_take_is_refused():
    with pytest.raises(FormatError) as caught:
        IndexFormat(name="index.odd", element="e2m1", scale="f32")
    assert str(caught.value) == (
        "format 'index.odd': element 'e2m1' with scale 'f32' is not known; "
        "e4m3fn: f32 | pow2 | ue8m0x4, e4m3fnuz: f32 | pow2 | ue8m0x4, e2m1: e8m0"
    )
