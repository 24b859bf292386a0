"""Faults met in the field where ranks work together. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from composite_cases import DSACase
from kda_cases import Layer, Rows, cuts, ids, same_bits
from latent_cases import FP8
from prefill_cases import LIMITS, PrefillCase, joined
from torch import Tensor

from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import GroupError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import exchange, ownership
from kimi_hal.parallel.captured import Capacity
from kimi_hal.parallel.context import ContextCache
from kimi_hal.parallel.decode import CapturedDecode
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup
from kimi_hal.parallel.kda import ContextKDA
from kimi_hal.parallel.prefill import TokenShardedPrefill, one_rank
from kimi_hal.parallel.shards import Shards

INF, NAN = math.inf, math.nan
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def decode(case: DSACase, world: int, interleave: int = 1) -> tuple[Tensor, Tensor]:
    """Return out and lse of all heads over ranks."""

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        made = plan("dsa_decode", case.spec(dcp), LIMITS, device="cpu", group=group)
        return made.run(**case.operands(dcp))

    return joined(LoopbackGroup.run(world, rank))


def alone(case: DSACase) -> tuple[Tensor, Tensor]:
    """Return out and lse of one rank."""
    return plan("dsa_decode", case.spec(), LIMITS, device="cpu").run(**case.operands())


def sharded(case: PrefillCase, world: int) -> tuple[Tensor, Tensor]:
    """Prefill by token shards over whole caches."""

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        prefill, t = TokenShardedPrefill(case.plan(), group), case.operands()
        step = prefill.begin(case.lengths, t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        return prefill.run(
            step, case.heads_of(group), *own, t["latent_cache"], t["index_cache"], t["k_scale"]
        )

    return joined(LoopbackGroup.run(world, rank))


def gathered(case: PrefillCase, world: int, interleave: int = 1) -> tuple[Tensor, Tensor]:
    """Prefill over a gathered context."""

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        t, made = case.operands(dcp), case.plan(one_rank(case.dsa.spec(dcp)))
        prefill = GatheredPrefill(made, group, dcp, tokens=sum(case.contexts), requests=len(case.contexts))
        rows = (t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        step = prefill.begin(case.lengths, case.contexts, *rows)
        own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        return prefill.run(
            step, case.heads_of(group), *own, t["latent_cache"], t["index_cache"], t["k_scale"]
        )

    return joined(LoopbackGroup.run(world, rank))


def merged(outs: list[float], lses: list[float]) -> tuple[float, float]:
    """Exchange one number and its LSE over a rank each, and merge: what every rank gets."""
    world = len(outs)

    def rank(group: Group) -> tuple[float, float]:
        out = torch.full((1, world, 8), outs[group.rank()])
        lse = torch.full((1, world), lses[group.rank()])
        spec = MergeSpec(parts=world, num_heads=1, dim=8, dtype="float32", return_lse=True)
        merge = plan("merge_attn_states", spec, LIMITS, device="cpu").run
        o, combined = merge(*exchange.exchange_heads(group, out, lse))
        assert o.eq(o[0, 0, 0]).all()
        return float(o[0, 0, 0]), float(combined[0, 0])

    answers = LoopbackGroup.run(world, rank)
    assert len(set(answers)) == 1
    return answers[0]


# --- class 2: empty shards ------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
def test_fault_02_parts_of_ranks_without_keys_weigh_nothing(empty: float) -> None:
    assert merged([1.0, 3.0, NAN, NAN], [0.5, 0.5, empty, empty]) == (2.0, pytest.approx(0.5 + math.log(2)))
    assert merged([NAN] * 4, [empty] * 4) == (0.0, -INF)


def test_fault_02_a_small_lse_is_not_clamped() -> None:
    assert merged([2.0, NAN], [-20000.0, -INF]) == (2.0, -20000.0)


def test_fault_02_fewer_tokens_than_ranks() -> None:
    """Two tokens on four ranks: ranks 2 and 3 own none, and their pools hold nothing but NaN."""
    case = DSACase(lengths=(2,), rows=((0, 2), (0, 1)))
    out, lse = decode(case, 4)
    torch.testing.assert_close((out, lse), alone(case), **CLOSE)
    assert out.isfinite().all()


def test_fault_02_no_rank_has_a_key() -> None:
    out, lse = decode(DSACase(lengths=(2,), rows=((0, 0), (5, -3))), 4)
    assert out.count_nonzero() == 0
    assert (lse == -INF).all()


# --- class 11: base, global bounds, interleave ----------------------------------------------------------


def test_fault_11_parts_are_merged_in_natural_log() -> None:
    assert merged([1.0, 3.0], [0.0, math.log(3)]) == (pytest.approx(2.5), pytest.approx(math.log(4)))


@pytest.mark.parametrize(("bound", "counts"), [(9, [3, 2, 2, 2]), (10, [3, 3, 2, 2])])
def test_fault_11_two_rows_of_a_request_have_their_own_bounds_on_every_rank(
    bound: int, counts: list[int]
) -> None:
    case = DSACase(lengths=(10,), rows=((0, 9), (0, 10)))

    def rank(group: Group) -> list[int]:
        dcp = DCP(world=4, rank=group.rank())
        spec, t = case.spec(dcp), case.operands(dcp)
        query = plan("quantize_index_query", spec.query, LIMITS, device="cpu").run(t["index_q"], t["index_w"])
        topk = plan("indexer_topk", spec.indexer, LIMITS, device="cpu")
        rows = (t["row_req"], t["row_len"])
        index, scores = topk.run(*query, t["index_cache"], t["index_table"], *rows)
        merge = plan("topk_merge", spec.merge, LIMITS, device="cpu", group=group)
        return merge.run(scores, index, t["row_len"])[1].tolist()

    found = LoopbackGroup.run(4, rank)
    assert [each[bound - 9] for each in found] == counts


def test_fault_11_position_9_is_taken_from_slot_45() -> None:
    """Runs of 4 on 2 ranks, pages of 8, block 5: rank 0 has 0-3 and 8-11, position 9 at 5·8 + 5."""
    lengths = {6: [4, 2], 5: [4, 1], 16: [8, 8]}

    def rank(group: Group) -> tuple[list[int], list[int]]:
        dcp = DCP(world=2, rank=group.rank(), interleave=4)
        cache = ContextCache(FP8, 8, dcp, group, tokens=16, requests=1, device="cpu")
        table = torch.tensor([[5]], dtype=torch.int32)
        route = cache.route([16], table)
        place = route.target[group.rank()].tolist().index(9) if group.rank() == 0 else 0
        counts = [int((cache.route([n], table).source >= 0).sum()) for n in lengths]
        return [int(route.source[place])], counts

    (first, second) = LoopbackGroup.run(2, rank)
    assert first[0] == [45]
    assert [list(pair) for pair in zip(first[1], second[1], strict=True)] == list(lengths.values())


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("length", [97, 111, 112, 113, 119, 127, 128])
def test_fault_11_sharding_changes_nothing_at_any_remainder(length: int, interleave: int) -> None:
    """A long row whose length is no multiple of ranks times page (16): as on one rank."""
    case = DSACase(lengths=(length,), rows=((0, length),), topk=64)
    torch.testing.assert_close(decode(case, 2, interleave), alone(case), **CLOSE)


def test_fault_11_a_last_chunk_with_fewer_tokens_than_ranks() -> None:
    """A prompt of 67 in two chunks on 8 ranks, the second of 3 tokens."""
    whole = PrefillCase(((0, 67),), padding=0)
    chunk = PrefillCase(((64, 3),), padding=0)
    chunk.dsa.tokens = whole.dsa.tokens
    for name in ("q", "index_q", "index_w"):
        setattr(chunk.dsa, name, getattr(whole.dsa, name)[64:])
    expected = whole.expected()
    for got, one in zip(gathered(chunk, 8), expected, strict=True):
        assert same_bits(got, one[64:].contiguous())


def test_fault_11_cached_prefix_and_new_tokens_are_gathered_together() -> None:
    """130 tokens of which 128 are cached, pages of 64, 4 ranks: each gives its positions of both parts."""
    case = PrefillCase(((128, 2),), padding=0, fields={"page": 64})
    for got, one in zip(gathered(case, 4), case.expected(), strict=True):
        assert same_bits(got, one)
    positions = [
        [p for p in range(130) if ownership.owner(p, DCP(world=4)) == rank and p >= 128] for rank in range(4)
    ]
    assert positions == [[128], [129], [], []]


def test_fault_11_ranks_that_read_different_interleaves_are_found_at_the_start() -> None:
    case = PrefillCase()

    def rank(group: Group) -> str:
        dcp = DCP(world=2, rank=group.rank(), interleave=case.dsa.page if group.rank() else 1)
        with pytest.raises(GroupError) as caught:
            GatheredPrefill(case.plan(), group, dcp, tokens=300, requests=4)
        return str(caught.value)

    text = "ranks do not agree on dcp.interleave: rank 0 has 1, rank 1 has 16"
    assert LoopbackGroup.run(2, rank) == [text] * 2


# --- class 12: ragged sequences -------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 3, 0, 2), (1, 1, 64)])
def test_fault_12_empty_and_single_requests_of_a_prefill(lengths: tuple[int, ...]) -> None:
    case = PrefillCase(tuple((7 * i, n) for i, n in enumerate(lengths)))
    for got, one in zip(sharded(case, 4), case.expected(), strict=True):
        assert same_bits(got, one)


def test_fault_12_rows_behind_the_last_request_are_padding() -> None:
    """Offsets [0, 7] of 8 rows: the eighth is nobody's, and its query is NaN."""
    case = PrefillCase(((0, 7),), padding=1)
    case.dsa.q[7] = NAN
    out, lse = sharded(case, 2)
    assert out[:7].isfinite().all()
    assert out[7].count_nonzero() == 0
    assert (lse[7] == -INF).all()


KDA = KDASpec(num_heads=4, head_dim=8, scale=8**-0.5)


def recurrence(lengths: tuple[int, ...], rows: int, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o and states over ranks, and those of one rank."""
    tokens, layer = Rows.random(KDA, rows), Layer.random(KDA)
    state_ids, total = torch.arange(len(lengths), dtype=torch.int32), sum(lengths)
    per = KDA.num_heads // world
    own = KDASpec(num_heads=per, head_dim=8, scale=8**-0.5)

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        part = slice(per * group.rank(), per * (group.rank() + 1))

        def heads(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:-1], 3, KDA.num_heads, 8)[..., part, :].flatten(-3).contiguous()

        kda = ContextKDA(*(plan(n, own, LIMITS, device="cpu") for n in ("kda_conv", "kda_prefill")), group)
        shards = Shards.interleaved(total, world)
        step = kda.begin(lengths, shards, state_ids, rows=rows)
        x, g, beta = (
            kda.gather(step, shards.take(t, group.rank())) for t in (tokens.x, tokens.raw_g, tokens.raw_beta)
        )
        state = layer.pool(6)[:, part].clone()
        gates = (g[:, part].contiguous(), beta[:, part].contiguous())
        parameters = (layer.A_log[part], layer.dt_bias[8 * part.start : 8 * part.stop])
        weight = heads(layer.weight.T).T.contiguous()
        return kda.run(step, heads(x), weight, *gates, *parameters, heads(layer.conv_pool(6)), state), state

    outs, states = zip(*LoopbackGroup.run(world, rank), strict=True)
    state, conv_state, cu = layer.pool(6), layer.conv_pool(6), cuts(*lengths)
    y = layer.conv(tokens, conv_state, state_ids, cu)
    o = layer.prefill(layer.convolved(tokens, y), state, state_ids, cu).bfloat16()
    return torch.cat(outs, 1), torch.cat(states, 1), o, state


@pytest.mark.parametrize("lengths", [(0, 3, 0, 2), (1, 1, 64)])
def test_fault_12_empty_and_single_sequences_of_a_recurrence(lengths: tuple[int, ...]) -> None:
    o, state, expected, one = recurrence(lengths, sum(lengths), 2)
    assert same_bits(o, expected)
    assert same_bits(state, one)
    for slot, length in enumerate(lengths):
        assert length or same_bits(state[slot], Layer.random(KDA).pool(6)[slot])


def test_fault_12_a_row_behind_the_last_sequence_is_zero() -> None:
    o, state, expected, one = recurrence((7,), 8, 2)
    assert same_bits(o[:7].contiguous(), expected[:7].contiguous())
    assert same_bits(state, one)
    assert o[7].count_nonzero() == 0


# --- class 24: collectives, eagerly ---------------------------------------------------------------------


def test_fault_24_replays_with_a_late_rank_see_this_rounds_data() -> None:
    def rank(group: Group) -> list[float]:
        buffer, sums = torch.zeros(1), []
        for value in (1.0, 10.0, 100.0):
            buffer.fill_(value)
            sums.append(float(exchange.sum_in_rank_order(group, buffer)))
        return sums

    assert LoopbackGroup.run(2, rank, faults=Faults(late={1: 0.02})) == [[2.0, 20.0, 200.0]] * 2


def test_fault_24_one_group_serves_messages_of_changing_size() -> None:
    """4 KiB and 64 KiB in turn, with a pattern of the rank in every element."""

    def rank(group: Group) -> bool:
        right = True
        for turn, size in enumerate((1024, 16384, 1024, 16384)):
            mine = torch.arange(size, dtype=torch.int32) * 4 + group.rank() + turn
            gathered = group.all_gather(mine)
            right &= all(bool((gathered[r] == mine - group.rank() + r).all()) for r in range(4))
            pieces = group.all_to_all(mine.view(4, -1))
            right &= all(
                bool((pieces[r] == (mine - group.rank() + r).view(4, -1)[group.rank()]).all())
                for r in range(4)
            )
        return right

    assert LoopbackGroup.run(4, rank, faults=Faults(reorder=3)) == [True] * 4


def test_fault_24_a_sum_in_place_may_be_repeated_at_once() -> None:
    def rank(group: Group) -> list[float]:
        x, seen = torch.tensor([3.0]), []
        for _ in range(2):
            x.copy_(exchange.sum_in_rank_order(group, x))
            seen.append(float(x))
        return seen

    assert LoopbackGroup.run(4, rank) == [[12.0, 48.0]] * 4


@pytest.mark.parametrize("rows", [1, 64])
def test_fault_24_sums_have_one_order_whatever_their_size(rows: int) -> None:
    """1e8 + 1 − 1e8 + 1 from rank 0 up is 1; any other order may give 0 or 2."""

    def rank(group: Group) -> Tensor:
        part = torch.full((rows, 5), (1e8, 1.0, -1e8, 1.0)[group.rank()])
        return exchange.sum_in_rank_order(group, part)

    for _ in range(5):
        assert all(each.eq(1.0).all() for each in LoopbackGroup.run(4, rank))


def test_fault_24_minus_zero_is_a_payload_like_any_other() -> None:
    def rank(group: Group) -> bool:
        sent = torch.full((3, 37), -0.0)
        everyone, swapped = group.all_gather(sent), exchange.swap(group, sent)[0]
        return bool(torch.signbit(everyone).all()) and bool(torch.signbit(swapped).all())

    assert LoopbackGroup.run(3, rank) == [True] * 3


def test_fault_24_a_row_has_its_bits_at_every_place_and_on_every_rank() -> None:
    """One row alone, as the last of 44 and of 64: other pieces, other ranks, the same bits."""
    whole = PrefillCase(((0, 64),), padding=0)
    expected = whole.expected()[0][63]

    def last(count: int, world: int) -> Tensor:
        case = PrefillCase(((64 - count, count),), padding=0)
        case.dsa.tokens = whole.dsa.tokens
        for name in ("q", "index_q", "index_w"):
            setattr(case.dsa, name, getattr(whole.dsa, name)[64 - count :])
        return sharded(case, world)[0][-1]

    for count in (1, 44, 64):
        for world in (2, 8):
            assert same_bits(last(count, world), expected)


@pytest.mark.parametrize("protocol", ["compact", "scores_only"])
def test_fault_24_the_captured_form_keeps_nothing_between_replays(protocol: str) -> None:
    """The same buffers with other lengths, and then the first ones again, on a rank that is late."""
    case = DSACase(rows=((0, 200), (0, 150), (2, 77)), score="bfloat16")

    def rank(group: Group) -> list[tuple[Tensor, Tensor]]:
        dcp = DCP(world=4, rank=group.rank())
        t: dict[str, Any] = case.operands(dcp)
        spec = case.spec(dcp, protocol=protocol)
        made = CapturedDecode(spec, LIMITS, group, device="cpu", capacity=Capacity(3, 16))
        out, lse = torch.full((3, 1, 512), NAN), torch.full((3, 1), NAN)
        seen = []
        for lengths in ((200, 150, 77), (3, 0, 60), (200, 150, 77)):
            t["row_len"].copy_(ids(*lengths))
            made.run(**t, out=out, lse_out=lse)
            seen.append((out.clone(), lse.clone()))
        return seen

    for first, second, third in LoopbackGroup.run(4, rank, faults=Faults(late={2: 0.01})):
        assert same_bits(first[0], third[0])
        assert same_bits(first[1], third[1])
        assert not same_bits(first[0], second[0])
        assert second[0][1].count_nonzero() == 0
