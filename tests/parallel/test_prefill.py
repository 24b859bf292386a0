from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from prefill_cases import LIMITS, PrefillCase, joined
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import ContractError, GroupError, PlanError
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup
from kimi_hal.parallel.prefill import TokenShardedPrefill, one_rank


def sharded(case: PrefillCase, world: int, limits: Limits = LIMITS, **more: Any) -> tuple[Tensor, Tensor]:
    """Prefill over ranks that hold all tokens each; return out and lse of all heads."""

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        prefill, t = TokenShardedPrefill(case.plan(limits=limits), group), case.operands()
        step = prefill.begin(case.lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        index = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        caches = (t["latent_cache"], t["index_cache"])
        return prefill.run(step, case.heads_of(group), *index, *caches, t["k_scale"])

    return joined(LoopbackGroup.run(world, rank, **more))


def gathered(
    case: PrefillCase, world: int, interleave: int = 1, index: str = "sharded"
) -> tuple[Tensor, Tensor]:
    """Prefill over ranks that hold their own tokens alone."""

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave, index=index)
        t, made = case.operands(dcp), case.plan(one_rank(case.dsa.spec(dcp)))
        prefill = GatheredPrefill(made, group, dcp, tokens=sum(case.contexts), requests=len(case.contexts))
        rows = (t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        step = prefill.begin(case.lengths, case.contexts, *rows)
        own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        caches = (t["latent_cache"], t["index_cache"])
        return prefill.run(step, case.heads_of(group), *own, *caches, t["k_scale"])

    return joined(LoopbackGroup.run(world, rank))


def same_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(
        a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
        for a, b in zip(got, expected, strict=True)
    )


# --- token-sharded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_prefill_over_ranks_has_the_bits_of_one_rank(world: int) -> None:
    case = PrefillCase()
    expected = case.expected()
    assert case.plan().properties.batch_invariant
    assert expected[0][: sum(case.lengths)].isfinite().all()
    assert same_bits(sharded(case, world), expected)


@pytest.mark.parametrize(
    "requests",
    [
        ((0, 17),),  # seven pieces of eight ranks are empty
        ((0, 1),),
        ((0, 0), (5, 0)),
        ((60, 3), (0, 0), (1, 2)),
        ((129, 1), (64, 1), (9, 1), (0, 1), (30, 1)),  # a decode step
    ],
)
def test_ragged_lengths_and_empty_pieces(requests: tuple[tuple[int, int], ...]) -> None:
    case = PrefillCase(requests, padding=1)
    assert same_bits(sharded(case, 8), case.expected())


def test_a_short_append_on_a_long_cached_prefix() -> None:
    case = PrefillCase(((3000, 20), (1500, 3)), padding=0)
    expected = case.expected()
    assert same_bits(sharded(case, 4), expected)
    assert same_bits(gathered(case, 4), expected)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("score", ["bfloat16", "float32"])
def test_types_of_scores_and_outputs(score: str, out_dtype: str) -> None:
    case = PrefillCase(fields={"score": score, "out_dtype": out_dtype})
    assert same_bits(sharded(case, 4), case.expected())


def test_padded_rows_are_zero_and_minus_infinity() -> None:
    case = PrefillCase(padding=3)
    case.dsa.q[-3:] = torch.nan
    out, lse = sharded(case, 4)
    assert out[-3:].count_nonzero() == 0
    assert (lse[-3:] == -torch.inf).all()


def test_more_rows_than_a_call_takes_are_several_calls() -> None:
    case = PrefillCase()
    few = dataclasses.replace(LIMITS, max_rows=5)
    assert same_bits(sharded(case, 2, few), case.expected())


def test_without_an_lse_none_is_sent() -> None:
    case = PrefillCase()
    spec = case.dsa.spec()
    spec = dataclasses.replace(spec, attn=dataclasses.replace(spec.attn, return_lse=False))
    made = case.plan(spec)

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        prefill, t = TokenShardedPrefill(made, group, verify=False), case.operands()
        step = prefill.begin(case.lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        before = group.bytes_sent
        index = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        result = prefill.run(
            step, case.heads_of(group), *index, t["latent_cache"], t["index_cache"], t["k_scale"]
        )
        assert group.bytes_sent - before == 3 * step.shards.width * 2 * (576 * 2 + 512 * 4)
        return result

    out, lse = joined(LoopbackGroup.run(4, rank))
    assert lse.shape == (sum(case.lengths) + 2, 0)
    assert out.equal(case.expected()[0])


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    case = PrefillCase()
    assert same_bits(sharded(case, 4, faults=Faults(reorder=seed)), case.expected())


def test_causal_work_is_balanced_over_the_ranks() -> None:
    case = PrefillCase(((0, 320),), padding=0)

    def rank(group: Group) -> int:
        prefill, t = TokenShardedPrefill(case.plan(), group), case.operands()
        step = prefill.begin(case.lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        return sum(int(call.row_len.sum()) for call in step.calls)

    keys = LoopbackGroup.run(8, rank)
    assert max(keys) == min(keys) == 320 * 321 // 2 // 8


# --- gathered context -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (4, 4), (8, 64), (8, 1)])
def test_a_gathered_context_gives_the_bits_of_one_rank(world: int, interleave: int) -> None:
    case = PrefillCase()
    assert same_bits(gathered(case, world, interleave), case.expected())


def test_replicated_index_keys_are_not_gathered() -> None:
    case = PrefillCase()
    assert same_bits(gathered(case, 4, index="replicated"), case.expected())


@pytest.mark.parametrize("index", formats.names("index"))
def test_every_format_of_index_keys(index: str) -> None:
    case = PrefillCase(((90, 20),), fields={"index": index})
    assert same_bits(gathered(case, 4), case.expected())


@pytest.mark.parametrize("latent", formats.names("latent"))
def test_every_format_of_latents(latent: str) -> None:
    case = PrefillCase(((90, 20),), fields={"latent": latent})
    assert same_bits(gathered(case, 4, 16), case.expected())


def test_rows_of_a_request_may_be_fewer_than_ranks_in_the_last_chunk() -> None:
    """The second chunk of a prompt has fewer tokens than there are ranks."""
    case = PrefillCase(((64, 3),), padding=0)
    assert same_bits(gathered(case, 8), case.expected())


# --- errors ---------------------------------------------------------------------------------------------


def failures(fn: Any, world: int = 2) -> list[str]:
    """Return what each rank raises."""

    def rank(group: Group) -> str:
        with pytest.raises((PlanError, GroupError, ContractError)) as caught:
            fn(group)
        return str(caught.value)

    return LoopbackGroup.run(world, rank)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda case: plan("sparse_mla", case.dsa.spec().attn, LIMITS, device="cpu"),
            "takes a plan of dsa_decode, got one of sparse_mla",
        ),
        (
            lambda case: PrefillCase(heads=3).plan(),
            "3 heads cannot be parted over 2 ranks",
        ),
        (
            lambda case: case.plan(limits=Limits(max_rows=8, max_reqs=8)),
            "pieces are ragged: plan with Limits(uniform=False, …)",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused_on_every_rank(made: Any, text: str) -> None:
    case = PrefillCase()
    seen = failures(lambda group: TokenShardedPrefill(made(case), group))
    assert seen == [f"token-sharded prefill: {text}"] * 2


def test_a_plan_that_is_spread_over_ranks_itself_is_refused() -> None:
    case = PrefillCase()

    def rank(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank())
        made = plan("dsa_decode", case.dsa.spec(dcp), LIMITS, device="cpu", group=group)
        TokenShardedPrefill(made, group)

    assert (
        failures(rank)
        == [
            "token-sharded prefill: rows are computed by one rank, the plan is for dcp.world=2: "
            "plan one_rank(spec)"
        ]
        * 2
    )


def test_plans_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    def rank(group: Group) -> None:
        out_dtype = "bfloat16" if group.rank() else "float32"
        TokenShardedPrefill(PrefillCase(fields={"out_dtype": out_dtype}).plan(), group)

    seen = failures(rank)
    assert seen[0] == seen[1]
    assert seen[0].startswith("ranks do not agree: rank 0 'reference.torch for dsa_decode, source ")
    assert '"out_dtype": "float32"' in seen[0]
    assert '"out_dtype": "bfloat16"' in seen[0]


def test_an_interleave_that_differs_between_ranks_is_an_error_on_every_rank() -> None:
    case = PrefillCase()

    def rank(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank(), interleave=64 if group.rank() else 1)
        GatheredPrefill(case.plan(), group, dcp, tokens=300, requests=4)

    assert failures(rank) == ["ranks do not agree on dcp.interleave: rank 0 has 1, rank 1 has 64"] * 2


def test_a_world_that_differs_between_ranks_is_an_error_on_every_rank() -> None:
    case = PrefillCase()

    def rank(group: Group) -> None:
        dcp = DCP(world=2 + 2 * group.rank(), rank=group.rank())
        GatheredPrefill(case.plan(), group, dcp, tokens=300, requests=4)

    assert failures(rank) == ["ranks do not agree on dcp.world: rank 0 has 2, rank 1 has 4"] * 2


def test_lengths_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    case = PrefillCase(((0, 8), (0, 8)), padding=0)

    def rank(group: Group) -> None:
        prefill, t = TokenShardedPrefill(case.plan(), group), case.operands()
        lengths = [8, 8] if group.rank() else [9, 7]
        prefill.begin(lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])

    text = 'ranks do not agree on lengths: rank 0 has "[9, 7]", rank 1 has "[8, 8]"'
    assert failures(rank) == [text] * 2


def test_fewer_rows_than_lengths_are_refused() -> None:
    case = PrefillCase(((0, 8),), padding=0)

    def rank(group: Group) -> None:
        prefill, t = TokenShardedPrefill(case.plan(), group), case.operands()
        prefill.begin([9], t["row_req"], t["row_len"], t["latent_table"], t["index_table"])

    text = "token-sharded prefill: lengths are 9 rows together, row_req has 8"
    assert failures(rank) == [text] * 2


@pytest.mark.parametrize("call", range(8))
def test_a_rank_that_dies_ends_the_prefill_and_nothing_is_returned(call: int) -> None:
    case, texts, returned = PrefillCase(((0, 20),)), [], []

    def layer(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank())
        prefill = GatheredPrefill(case.plan(), group, dcp, tokens=40, requests=1)
        t = case.operands(dcp)
        rows = (t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        step = prefill.begin(case.lengths, case.contexts, *rows)
        own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        operands = (case.heads_of(group), *own, t["latent_cache"], t["index_cache"], t["k_scale"])
        returned.append(prefill.run(step, *operands))

    def rank(group: Group) -> None:
        try:
            layer(group)
        except GroupError as error:
            texts.append(str(error))
            raise

    with pytest.raises(GroupError, match=r"^rank 1 died$"):
        LoopbackGroup.run(2, rank, faults=Faults(dead={1: call}), timeout=5)
    collective = "all_to_all" if call > 5 else "all_gather"
    assert texts == [f"rank 1 died; {collective} (call {call}) cannot end"]
    assert returned == []


def test_index_queries_of_other_rows_are_refused() -> None:
    case = PrefillCase()

    def rank(group: Group) -> None:
        prefill, t = TokenShardedPrefill(case.plan(), group), case.operands()
        step = prefill.begin(case.lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        caches = (t["latent_cache"], t["index_cache"])
        prefill.run(step, case.heads_of(group), case.dsa.index_q, case.dsa.index_w, *caches, t["k_scale"])

    with pytest.raises(
        GroupError, match=r"index_q must have this rank's 48 rows, got 93; index_w must have "
    ):
        LoopbackGroup.run(2, rank)


def test_a_context_shorter_than_what_a_row_sees_is_refused() -> None:
    case = PrefillCase()
    case.contexts = [50, 106, 1, 70]
    with pytest.raises(GroupError, match=r"row 56 of request 1 sees 107 keys, its context has 106 tokens"):
        gathered(case, 2)


def test_a_block_table_without_a_place_for_a_token_is_refused() -> None:
    case = PrefillCase()
    case.contexts = [50, 107, 1, 70, 0, 1]
    with pytest.raises(
        GroupError, match=r"gathered context: the block table must hold 6 requests of up to \d+ pages"
    ):
        gathered(case, 2)
