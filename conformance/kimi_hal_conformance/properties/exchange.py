"""What ranks exchange: heads in rank order, parts given back whole, sums with the same bits everywhere."""

from __future__ import annotations

from typing import Any

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain, raises


@holds("exchange/heads-in-rank-order", "2 ranks with 3 heads each, two rows of 5 numbers")
def heads_in_rank_order(modules: Modules) -> None:
    """Gathered heads stand in rank order."""
    exchange, groups = modules("parallel.exchange"), modules("parallel.groups")
    q = [torch.arange(30.0).view(2, 3, 5) + 100 * rank for rank in range(2)]
    found = groups.LoopbackGroup.run(2, lambda group: exchange.gather_heads(group, q[group.rank()]))
    for rank, heads in enumerate(found):
        expect(f"heads on rank {rank}", heads.tolist(), torch.cat(q, dim=1).tolist())


@holds("exchange/heads-given-back", "3 ranks, one row of 3 heads a rank, 5 bfloat16 numbers and an LSE each")
def heads_given_back(modules: Modules) -> None:
    """Each rank gets every rank's part for its own heads, by either exchange, whatever its size in bytes."""
    exchange, groups = modules("parallel.exchange"), modules("parallel.groups")
    world, heads = 3, 3
    g = torch.Generator().manual_seed(2)
    outs = torch.randn(world, 1, world * heads, 5, generator=g).bfloat16()
    lses = torch.randn(world, 1, world * heads, generator=g)
    for how in ("a2a", "ag_rs"):

        def give_back(group: Any, how: str = how) -> Any:
            return exchange.exchange_heads(group, outs[group.rank()], lses[group.rank()], how)

        for rank, (out, lse) in enumerate(groups.LoopbackGroup.run(world, give_back)):
            mine = slice(rank * heads, (rank + 1) * heads)
            expect(f"parts on rank {rank} by {how}", out.tolist(), outs[:, :, mine].tolist())
            expect(f"LSEs on rank {rank} by {how}", lse.tolist(), lses[:, :, mine].tolist())


@holds("exchange/sum-in-rank-order", "10^8, 1, −10^8 and 1 on 4 ranks, for 1 row and for 64")
def sum_in_rank_order(modules: Modules) -> None:
    """A sum over the ranks is added from rank 0 up: the same bits on every rank, for any number of rows."""
    exchange, groups = modules("parallel.exchange"), modules("parallel.groups")
    parts = (1e8, 1.0, -1e8, 1.0)
    for rows in (1, 64):

        def add(group: Any, rows: int = rows) -> Any:
            return exchange.sum_in_rank_order(group, torch.full((rows, 3), parts[group.rank()]))

        for rank, total in enumerate(groups.LoopbackGroup.run(4, add)):
            expect(f"sum of {rows} rows on rank {rank}", total.unique().tolist(), [1.0])


@holds("exchange/pieces-by-rank", "3 ranks, each with a piece for each")
def pieces_by_rank(modules: Modules) -> None:
    """Piece i goes to rank i, and what stands at j came from rank j."""
    groups = modules("parallel.groups")

    def send(group: Any) -> Any:
        return group.all_to_all(torch.tensor([10 * group.rank() + to for to in range(3)]))

    for rank, got in enumerate(groups.LoopbackGroup.run(3, send)):
        expect(f"pieces on rank {rank}", got.tolist(), [10 * sender + rank for sender in range(3)])


@holds("exchange/order-of-arrival", "4 ranks that arrive in a drawn order, three times")
def order_of_arrival(modules: Modules) -> None:
    """A gathered tensor is in rank order, whoever arrives first."""
    groups = modules("parallel.groups")

    def gather(group: Any) -> Any:
        return [
            group.all_gather(torch.tensor([group.rank() + 10 * call])).flatten().tolist() for call in range(3)
        ]

    found = groups.LoopbackGroup.run(4, gather, faults=groups.Faults(reorder=7))
    for rank, calls in enumerate(found):
        expect(f"gathered on rank {rank}", calls, [[r + 10 * call for r in range(4)] for call in range(3)])


@holds("exchange/disagreement", "2 ranks, one with 3 numbers and one with 4")
def disagreement(modules: Modules) -> None:
    """Ranks that bring other shapes to a call all get an error that names them."""
    groups, errors = modules("parallel.groups"), modules("errors")

    def gather(group: Any) -> Any:
        return group.all_gather(torch.zeros(3 + group.rank()))

    raises(errors.GroupError, lambda: groups.LoopbackGroup.run(2, gather), "rank 0", "rank 1")


@plain("exchange")
def even_sizes(modules: Modules) -> torch.Tensor:
    """Return what two ranks exchange in messages of whole alignments, each rank in its turn."""
    exchange, groups = modules("parallel.exchange"), modules("parallel.groups")
    g = torch.Generator().manual_seed(5)
    outs, lses = torch.randn(2, 4, 8, 64, generator=g), torch.randn(2, 4, 8, generator=g)

    def step(group: Any) -> torch.Tensor:
        out, lse = exchange.exchange_heads(group, outs[group.rank()], lses[group.rank()])
        total = exchange.sum_in_rank_order(group, outs[group.rank()].flatten(1))
        return torch.cat([out.flatten(), lse.flatten(), total.flatten()])

    return torch.stack(groups.LoopbackGroup.run(2, step))
