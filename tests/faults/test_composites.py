"""Faults met in the field, on whole steps of a layer. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import pytest
import torch
from composite_cases import DSACase, KDACase, MoECase
from torch import Tensor

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal.reference import composites


def test_fault_03_graph_padding_advances_no_state() -> None:
    """Four graph rows over slots 0 and 2; slot 1 and the last are somebody else's."""
    case = KDACase(rows=4, slots=4)
    t, before, live = case.operands(), case.operands(), case.operands()
    t["state_ids"] = torch.tensor([0, 2, -1, -1], dtype=torch.int32)
    t["x"][2:], t["out_gate"][2:] = torch.nan, torch.inf
    o = composites.kda_layer_decode(case.spec, **t)
    assert o[2:].count_nonzero() == 0
    for name in ("state", "conv_state"):
        assert t[name][[1, 3]].equal(before[name][[1, 3]])

    for name in ("x", "raw_g", "raw_beta", "out_gate"):
        live[name] = live[name][:2]
    live["state_ids"] = t["state_ids"][:2]
    alone = composites.kda_layer_decode(case.spec, **live)
    assert o[:2].equal(alone)  # each live slot advanced exactly once
    assert t["state"].equal(live["state"])


def test_fault_03_graph_padding_of_a_selection_is_zero() -> None:
    case = DSACase(rows=((0, 200), (7, 0), (-3, -1)))
    t = case.operands()
    t["q"] = t["q"].clone()
    t["q"][1:] = torch.nan
    out, lse = composites.dsa_decode(case.spec(), **t)
    assert out[0].isfinite().all()
    assert out[1:].count_nonzero() == 0
    assert (lse[1:] == -torch.inf).all()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fault_05_tied_scores_select_the_first_positions_on_any_number_of_ranks(world: int) -> None:
    """All index keys are equal, so that the 16 smallest positions are the answer, and only they."""
    case = DSACase(lengths=(64,), rows=((0, 64), (0, 40)), topk=16)
    case.tokens = [(kv_c, k_pe, keys[:1].expand_as(keys)) for kv_c, k_pe, keys in case.tokens]
    first = DSACase(lengths=(64,), rows=((0, 16), (0, 16)), topk=16)
    first.tokens = case.tokens
    expected = composites.dsa_decode(first.spec(), **first.operands(), dtype=torch.float64)

    def rank(group: LoopbackGroup) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank())
        return composites.dsa_decode(case.spec(dcp), **case.operands(dcp), dtype=torch.float64, group=group)

    outs, lses = zip(*LoopbackGroup.run(world, rank), strict=True)
    got = torch.cat(outs, dim=1), torch.cat(lses, dim=1)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", [(3, 0, 0, 5), (0, 8, 0, 0), (0, 0, 0, 8)])
def test_fault_16_ranks_whose_experts_get_no_token(sizes: tuple[int, ...]) -> None:
    """Eight rows, one expert each, four ranks of one expert: some ranks have nothing to add."""
    case = MoECase(rows=8, experts=4, topk=1)
    chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    case.x = torch.nn.functional.one_hot(chosen, case.width).bfloat16()
    case.dense["gate"] = torch.eye(4, case.width) * 8
    case.dense["bias"] = torch.zeros(4)

    def layer(tp: int, rank: int, group: LoopbackGroup | None) -> Tensor:
        weights = list(case.weights(tp, rank, "experts").values())
        return composites.moe_layer(case.spec(tp, rank, "experts"), case.x, weights, group=group)

    results = LoopbackGroup.run(4, lambda group: layer(4, group.rank(), group))
    for result in results:
        torch.testing.assert_close(result, layer(1, 0, None), rtol=1e-5, atol=1e-5)


def test_fault_24_a_row_has_its_bits_wherever_it_stands() -> None:
    """One row alone, as the last of 44, and as the last of 64."""
    case = DSACase(rows=tuple((0, 1 + n) for n in range(64)))
    by_row = ("q", "index_q", "index_w", "row_req", "row_len")
    whole = case.operands()
    order = torch.randperm(64)

    def run(rows: Tensor) -> Tensor:
        given = {name: t[rows] if name in by_row else t for name, t in whole.items()}
        return composites.dsa_decode(case.spec(), **given)[0]

    alone = run(torch.tensor([63]))[0]
    assert run(torch.arange(20, 64))[43].equal(alone)
    assert run(torch.arange(64))[63].equal(alone)
    assert run(order)[int((order == 63).nonzero())].equal(alone)
