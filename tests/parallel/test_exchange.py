from __future__ import annotations

import pytest
import torch

from kimi_hal.parallel import exchange
from kimi_hal.parallel.groups import LoopbackGroup

WORLDS = [1, 2, 4]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_heads_are_gathered_in_rank_order(world: int, dtype: torch.dtype) -> None:
    whole = torch.randn(3, 2 * world, 5).to(dtype)
    parts = whole.chunk(world, dim=1)
    got = LoopbackGroup.run(world, lambda group: exchange.gather_heads(group, parts[group.rank()]))
    for each in got:
        assert each.view(torch.uint8).equal(whole.view(torch.uint8))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["a2a", "ag_rs"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (3, 2), (0, 2)])
def test_each_rank_gets_every_part_of_its_own_heads(
    world: int, how: str, dtypes: tuple[torch.dtype, torch.dtype], rows: int, heads: int
) -> None:
    out = torch.randn(world, rows, world * heads, 7).to(dtypes[0])
    lse = torch.randn(world, rows, world * heads).to(dtypes[1])
    if lse.numel():
        lse[0, 0, 0] = torch.nan  # bytes move, whatever they mean

    def rank(group: LoopbackGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return exchange.exchange_heads(group, out[group.rank()], lse[group.rank()], how)

    for number, (outs, lses) in enumerate(LoopbackGroup.run(world, rank)):
        mine = slice(number * heads, (number + 1) * heads)
        torch.testing.assert_close(outs, out[:, :, mine], rtol=0, atol=0)
        torch.testing.assert_close(lses, lse[:, :, mine], rtol=0, atol=0, equal_nan=True)
        assert outs[0].is_contiguous()
        assert lses[0].is_contiguous()


def test_one_message_carries_heads_and_lse() -> None:
    def rank(group: LoopbackGroup) -> int:
        exchange.exchange_heads(group, torch.zeros(2, 8, 512).bfloat16(), torch.zeros(2, 8))
        return group.bytes_sent

    piece = 2 * 2 * 512 * 2 + 2 * 2 * 4
    assert LoopbackGroup.run(4, rank) == [3 * piece] * 4


@pytest.mark.parametrize("world", WORLDS)
def test_partial_sums_are_added_from_rank_0_up(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.randn(world, 5, 3) * 10.0 ** torch.randint(-4, 5, (world, 5, 3))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    monkeypatch.setattr(exchange, "GATHERED", world * 2 * parts[0, :1].nbytes)
    got = LoopbackGroup.run(world, lambda group: exchange.sum_in_rank_order(group, parts[group.rank()]))
    for each in got:
        assert each.equal(expected)


def test_a_sum_of_no_rows() -> None:
    got = LoopbackGroup.run(2, lambda group: exchange.sum_in_rank_order(group, torch.zeros(0, 3)))
    assert [each.shape for each in got] == [(0, 3), (0, 3)]
