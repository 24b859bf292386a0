from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_cases import LIMITS, PrefillCase
from torch import Tensor

from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import ContractError, GroupError, PlanError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.divided import RowDividedPrefill, divided_specs
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup


def prefill(case: PrefillCase, group: Group, interleave: int = 1, **more: Any) -> tuple[Any, ...]:
    """Run one rank; return its selection, out, lse, and whether latents were gathered."""
    index = more.pop("index", "sharded")
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=interleave, index=index)
    sizes = {"tokens": sum(case.contexts), "requests": len(case.contexts), **more}
    made = RowDividedPrefill.planned(case.dsa.spec(dcp), LIMITS, group, device="cpu", **sizes)
    t = case.operands(dcp)
    rows = (t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
    step = made.begin(case.lengths, case.contexts, *rows)
    own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
    picks = made.select(step, *own, t["index_cache"])
    caches = (t["latent_cache"], t["index_cache"])
    out, lse = made.run(step, case.heads_of(group), *own, *caches, t["k_scale"])
    return picks, out, lse, step.latents is not None


def alone(case: PrefillCase, heads: slice) -> tuple[Tensor, ...]:
    """Return selection, out and lse of one rank with all tokens and some heads."""
    spec, t = case.dsa.spec(), case.dsa.operands()
    parts = {n: plan(op, s, LIMITS, device="cpu").run for n, (op, s) in divided_specs(spec).items()}
    rows = (t["row_req"], t["row_len"])
    quantised = parts["query"](t["index_q"], t["index_w"])
    picks, _ = parts["select"](*quantised, t["index_cache"], t["index_table"], *rows)
    local = case.plan_attention(heads.stop - heads.start)
    table = (t["latent_table"], t["row_req"])
    out, lse = local.run(t["q"][:, heads], t["latent_cache"], picks, t["k_scale"], None, None, *table)
    return picks, out, lse


def own_heads(case: PrefillCase, rank: int, world: int) -> slice:
    return slice(rank * case.heads // world, (rank + 1) * case.heads // world)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 4), (8, 1), (8, 64)])
def test_over_gathered_latents_it_is_one_rank_with_the_same_heads(world: int, interleave: int) -> None:
    case = PrefillCase()
    got = LoopbackGroup.run(world, lambda group: prefill(case, group, interleave))
    for rank, (picks, out, lse, gathered) in enumerate(got):
        expected = alone(case, own_heads(case, rank, world))
        assert gathered
        assert picks.equal(expected[0])
        assert out.equal(expected[1])
        assert lse.equal(expected[2])


@pytest.mark.parametrize("index", ["sharded", "replicated"])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 4), (8, 64)])
def test_over_sharded_latents_the_selection_keeps_its_bits(world: int, interleave: int, index: str) -> None:
    case = PrefillCase()
    got = LoopbackGroup.run(
        world, lambda group: prefill(case, group, interleave, index=index, latent_tokens=0)
    )
    for rank, (picks, out, lse, gathered) in enumerate(got):
        expected = alone(case, own_heads(case, rank, world))
        assert not gathered
        assert picks.equal(expected[0])
        torch.testing.assert_close(out, expected[1], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse, expected[2], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("requests", [((0, 17),), ((0, 0),), ((60, 3), (0, 0), (1, 2)), ((129, 1), (9, 1))])
@pytest.mark.parametrize("latent_tokens", [0, 400])
def test_ragged_and_empty_rows(requests: tuple[tuple[int, int], ...], latent_tokens: int) -> None:
    case = PrefillCase(requests, padding=1)
    got = LoopbackGroup.run(4, lambda group: prefill(case, group, latent_tokens=latent_tokens))
    for rank, (picks, out, lse, _) in enumerate(got):
        expected = alone(case, own_heads(case, rank, 4))
        assert picks.equal(expected[0])
        torch.testing.assert_close(out, expected[1], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse, expected[2], rtol=2e-6, atol=2e-6)
        assert (picks[-1] == -1).all()  # the padded row
        assert out[-1].count_nonzero() == 0
        assert lse[-1].tolist() == [-torch.inf] * (case.heads // 4)


def test_latents_are_gathered_where_that_sends_less() -> None:
    """Two tokens over a long prefix: their queries and parts are fewer bytes than the prefix."""
    short, long = PrefillCase(((700, 2),), padding=0), PrefillCase(((0, 80),), padding=0)
    for case, expected in ((short, False), (long, True)):
        got = LoopbackGroup.run(4, lambda group, case=case: prefill(case, group))
        assert [each[3] for each in got] == [expected] * 4


def test_latents_that_do_not_fit_stay_sharded() -> None:
    case = PrefillCase(((0, 80), (0, 80)), padding=0)
    got = LoopbackGroup.run(4, lambda group: prefill(case, group, latent_tokens=100))
    assert [each[3] for each in got] == [False] * 4


def test_keys_that_do_not_fit_are_refused() -> None:
    case = PrefillCase(((0, 80),), padding=0)

    def rank(group: Group) -> str:
        with pytest.raises(PlanError) as caught:
            prefill(case, group, tokens=10)
        return str(caught.value)

    text = "contexts of 80 tokens take 2 pages of 64, the workspace has 1: make it with tokens=80, requests=1"
    assert LoopbackGroup.run(2, rank) == [text] * 2


def test_fewer_rows_than_lengths_are_refused() -> None:
    case = PrefillCase(((0, 8),), padding=0)
    case.lengths = [9]

    def rank(group: Group) -> str:
        with pytest.raises(ContractError) as caught:
            prefill(case, group)
        return str(caught.value)

    assert LoopbackGroup.run(2, rank)[0] == "row-divided prefill: lengths are 9 rows together, row_req has 8"


def test_an_interleave_that_differs_between_ranks_is_an_error_on_every_rank() -> None:
    case = PrefillCase()
    with pytest.raises(
        GroupError, match=r"^ranks do not agree on dcp\.interleave: rank 0 has 1, rank 1 has 4$"
    ):
        LoopbackGroup.run(2, lambda group: prefill(case, group, 1 + 3 * group.rank()))


@pytest.mark.parametrize("call", range(6))
def test_a_rank_that_dies_ends_the_prefill_and_nothing_is_returned(call: int) -> None:
    case, returned = PrefillCase(((0, 20),)), []

    def rank(group: Group) -> None:
        returned.append(prefill(case, group))

    with pytest.raises(GroupError, match=r"^rank 1 died$"):
        LoopbackGroup.run(2, rank, faults=Faults(dead={1: call}), timeout=5)
    assert returned == []
