"""Faults met in the field, on the gather and the groups under it. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import pytest
import torch
from index_cases import planned
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.ops import all_gather
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup


def gathered(group: Group, x: Tensor, layout: str, total: int | None = None, interleave: int = 1) -> Tensor:
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=interleave)
    dtype = str(x.dtype).removeprefix("torch.")
    spec = GatherSpec(layout=layout, dtype=dtype, ndim=x.dim(), dcp=dcp)
    result: Tensor = planned(all_gather, spec, group=group)(x, total)
    return result


def shards(context: Tensor, world: int, interleave: int, rank: int) -> Tensor:
    """Return a rank's rows of a context, padded with 99 to the length of the first rank's."""
    first = ownership.local_length(len(context), DCP(world=world, interleave=interleave))
    dcp = DCP(world=world, rank=rank, interleave=interleave)
    mine = ownership.position(torch.arange(ownership.local_length(len(context), dcp)), dcp)
    x = torch.full((first, *context.shape[1:]), 99, dtype=context.dtype)
    x[: len(mine)] = context[mine]
    return x


# --- class 4: padding rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rank_major", "token_order", "last_dim"])
def test_fault_04_rows_around_a_view_are_not_sent(layout: str) -> None:
    def one_rank(group: Group) -> bool:
        pool = torch.full((8, 6), 99)
        pool[2:6, 1:4] = group.rank()
        return bool((gathered(group, pool[2:6, 1:4], layout) == 99).any())

    assert LoopbackGroup.run(2, one_rank) == [False, False]


# --- class 7: total lengths around whole shares ---------------------------------------------------------


@pytest.mark.parametrize("total", [0, 1, 127, 128, 129, 255, 256])
def test_fault_07_totals_around_whole_interleaves(total: int) -> None:
    context = torch.arange(total)[:, None]
    ranks = LoopbackGroup.run(
        2, lambda g: gathered(g, shards(context, 2, 64, g.rank()), "token_order", total, 64)
    )
    assert all(torch.equal(y, context) for y in ranks)


# --- class 9: a long context whose tail is ragged -------------------------------------------------------


def test_fault_09_a_context_that_is_no_multiple_of_anything() -> None:
    context = torch.arange(72_793, dtype=torch.int32)[:, None]
    ranks = LoopbackGroup.run(
        2, lambda g: gathered(g, shards(context, 2, 1, g.rank()), "token_order", 72_793)
    )
    assert all(torch.equal(y, context) for y in ranks)


def test_fault_09_a_last_piece_shorter_than_the_ranks() -> None:
    context = torch.arange(3)[:, None]
    ranks = LoopbackGroup.run(8, lambda g: gathered(g, shards(context, 8, 1, g.rank()), "token_order", 3))
    assert all(torch.equal(y, context) for y in ranks)


# --- class 11: interleave -------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "interleave"), [(2, 4), (4, 1), (3, 64), (8, 16)])
def test_fault_11_token_order_undoes_the_interleave(world: int, interleave: int) -> None:
    context = torch.arange(500)[:, None]
    ranks = LoopbackGroup.run(
        world,
        lambda g: gathered(g, shards(context, world, interleave, g.rank()), "token_order", 500, interleave),
    )
    assert all(torch.equal(y, context) for y in ranks)


def test_fault_11_a_reused_prefix_and_its_continuation_are_one_order() -> None:
    # 128 cached tokens and two new ones over four ranks: every rank holds its share of both.
    context = torch.cat((torch.arange(128), torch.tensor([1000, 1001])))[:, None]
    ranks = LoopbackGroup.run(4, lambda g: gathered(g, shards(context, 4, 1, g.rank()), "token_order", 130))
    assert all(torch.equal(y, context) for y in ranks)


# --- class 22: FP8 is moved as bytes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
@pytest.mark.parametrize("layout", ["rank_major", "token_order", "last_dim"])
def test_fault_22_every_byte_of_fp8_arrives(layout: str, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).reshape(4, 64)
    for y in LoopbackGroup.run(2, lambda g: gathered(g, every.view(dtype), layout)):
        counts = y.contiguous().view(torch.uint8).flatten().bincount(minlength=256)
        assert (counts == 2).all()


# --- class 23: strides and dtypes -----------------------------------------------------------------------


def test_fault_23_a_transposed_tensor_is_sent_as_it_is_seen() -> None:
    x = torch.arange(12).reshape(3, 4)
    for y in LoopbackGroup.run(2, lambda g: gathered(g, (x + 100 * g.rank()).t(), "last_dim")):
        assert torch.equal(y, torch.cat((x.t(), x.t() + 100), dim=1))


# --- class 24: collectives ------------------------------------------------------------------------------


def test_fault_24_three_rounds_with_a_late_rank_give_fresh_data() -> None:
    def one_rank(group: Group) -> list[int]:
        buffer, sums = torch.zeros(4, dtype=torch.int64), []
        for value in (1, 10, 100):
            buffer.fill_(value)
            sums.append(int(group.all_gather(buffer).sum(0)[0]))
        return sums

    assert LoopbackGroup.run(2, one_rank, faults=Faults(late={1: 0.02})) == [[2, 20, 200]] * 2


def test_fault_24_messages_of_alternating_size() -> None:
    def one_rank(group: Group) -> bool:
        right = True
        for call, size in enumerate((1024, 16384, 1024, 16384)):
            mine = torch.arange(size) * 10 + group.rank() + 1_000_000 * call
            for rank, part in enumerate(group.all_gather(mine)):
                right &= bool((part == torch.arange(size) * 10 + rank + 1_000_000 * call).all())
        return right

    assert LoopbackGroup.run(2, one_rank) == [True, True]


def test_fault_24_one_buffer_twice_in_a_row() -> None:
    def one_rank(group: Group) -> int:
        x = torch.full((3,), 5)
        for _ in range(2):
            x.copy_(group.all_gather(x).sum(0))
        return int(x[0])

    assert LoopbackGroup.run(4, one_rank) == [5 * 4 * 4] * 4


def test_fault_24_partial_sums_add_in_one_order_whatever_their_number() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])

    def one_rank(group: Group) -> list[float]:
        totals = []
        for size in (1, 64, 1000):
            total = torch.zeros(size)
            for part in group.all_gather(parts[group.rank()].expand(size)):
                total += part
            totals += total.unique().tolist()
        return totals

    # In rank order: 1e8 + 1 is 1e8 in float32, less 1e8 is 0, plus 1 is 1; for every element of every size.
    assert LoopbackGroup.run(4, one_rank, faults=Faults(reorder=1)) == [[1.0] * 3] * 4


def test_fault_24_minus_zero_is_no_sentinel() -> None:
    x = torch.full((7, 130), -0.0)
    for y in LoopbackGroup.run(2, lambda g: gathered(g, x, "rank_major")):
        assert torch.signbit(y).all()


def test_fault_24_a_dead_rank_ends_the_gather_and_is_named() -> None:
    with pytest.raises(GroupError, match=r"^rank 1 died$"):
        LoopbackGroup.run(
            2, lambda g: gathered(g, torch.zeros(2, 2), "rank_major"), faults=Faults(dead={1: 0})
        )


def test_fault_24_lengths_that_differ_are_named_on_every_rank() -> None:
    with pytest.raises(GroupError) as caught:
        LoopbackGroup.run(2, lambda g: gathered(g, torch.zeros(2 + g.rank(), 3), "rank_major"))
    text = "ranks disagree at call 0: rank 0 all_gather [2, 3] float32; rank 1 all_gather [3, 3] float32"
    assert str(caught.value) == text
