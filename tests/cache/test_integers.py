"""Numbers that are none, or too small, in whatever takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimi_hal import cache
from kimi_hal.errors import CacheError

LATENT = "latent.fp8.e4m3fn.tensor"
LAYOUT = cache.plan(block_size=1024, tp=8, latent=LATENT, num_blocks=300)
PAIR = cache.pair(LAYOUT, LAYOUT)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: cache.plan(block_size=1024.0, latent=LATENT),
            "block_size must be a whole number, got float 1024.0",
        ),
        (
            lambda: cache.plan(block_size=1024, tp="8", latent=LATENT),
            "tp must be a whole number, got str '8'",
        ),
        (
            lambda: cache.plan(block_size=1024, dcp=None, latent=LATENT),
            "dcp must be a whole number, got NoneType None",
        ),
        (
            lambda: cache.plan(block_size=1024, max_context=0, latent=LATENT),
            "max_context=0 must be at least 1",
        ),
        (lambda: LAYOUT.sized(memory=float("inf")), "memory must be a whole number, got float inf"),
        (lambda: LAYOUT.sized(num_blocks=True), "num_blocks must be a whole number, got bool True"),
        (lambda: cache.capacity(LAYOUT, float("nan")), "memory must be a whole number, got float nan"),
        (
            lambda: cache.capacity(LAYOUT, 1 << 36, context=1.5),
            "context must be a whole number, got float 1.5",
        ),
        (lambda: cache.descriptors(LAYOUT, [1.5]), "a block id must be a whole number, got float 1.5"),
        (lambda: PAIR.moves("0", {}, {}), "rank must be a whole number, got str '0'"),
        (
            lambda: cache.TokenCache(name="x", layers=(0,), entry_bytes=1.5),
            "cache 'x': entry_bytes must be a whole number, got float 1.5",
        ),
        (
            lambda: cache.TokenCache(name="x", layers=(-1,), entry_bytes=1),
            "'x': a layer=-1 must be at least 0",
        ),
        (
            lambda: cache.StateCache(name="x", layers=(0,), heads=None, parts=()),
            "state 'x' has no parts",
        ),
        (
            lambda: cache.copy([cache.Move(0, 0, 1, "m")], torch.zeros(4), torch.zeros(4, dtype=torch.uint8)),
            "the source pool must be 1-D uint8, got [4] torch.float32",
        ),
        (lambda: LAYOUT.views([1]), "the pool must be a tensor, got list"),
        (
            lambda: cache.Layout.from_dict({}),
            "this is not what Layout.to_dict() returns: KeyError('caches')",
        ),
        (
            lambda: cache.Layout.from_dict(LAYOUT.to_dict() | {"tp": "8"}),
            "tp must be a whole number, got str '8'",
        ),
        (
            lambda: PAIR.moves(0, {"tokens": [1, 2]}, {"tokens": [3, 3]}),
            "decode blocks [3] are named twice: one would overwrite the other",
        ),
        (
            lambda: cache.slots(torch.zeros(2, dtype=torch.int32), [0], torch.zeros(1), LAYOUT, "latent"),
            "block_table must be int32 or int64 with 2 dimension(s), got int32 [2]; row_req must be int32 or int64 "
            "with 1 dimension(s), got list; positions must be int32 or int64 with 1 dimension(s), got float32 [1]",
        ),
    ],
)
def test_what_is_no_number_is_refused(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(CacheError) as caught:
        call()
    assert str(caught.value) == sentence


def test_addresses_of_block_ids_in_a_tensor_do_not_wrap() -> None:
    ids = torch.tensor([250], dtype=torch.int32)
    assert LAYOUT.block_bytes * 250 > 1 << 31
    (one,) = cache.descriptors(LAYOUT, ids)
    assert one == cache.descriptors(LAYOUT, [250])[0]
    assert type(one.address) is int
    (move,) = PAIR.moves(0, {"tokens": ids}, {"tokens": ids})[0]
    assert (move.source, type(move.source)) == (250 * LAYOUT.block_bytes, int)
