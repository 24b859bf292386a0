"""Prefix caching: shared blocks and a stored state give the bits of a cold run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_cases import Layer, Rows, cuts, ids, same_bits
from prefill_cases import LIMITS, PrefillCase
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.chunks import last_stop
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.parallel.kda import ContextKDA
from kimi_hal.parallel.prefill import one_rank
from kimi_hal.parallel.shards import Shards

#: Tokens that two requests have in common: whole blocks on each of up to 4 ranks.
PREFIX, BLOCK = 256, 64


def share(case: PrefillCase, t: dict[str, Any], world: int) -> None:
    """Let request 1 read request 0's pages for the prefix, and poison the pages that it had instead."""
    pages = {"latent": case.dsa.page, "index": formats.index(case.dsa.index).page}
    for kind, page in pages.items():
        table, cache = t[f"{kind}_table"], t[f"{kind}_cache"]
        shared = PREFIX // world // page
        cache[table[1, :shared].long()] = 0x7F
        table[1, :shared] = table[0, :shared]


def prefill(case: PrefillCase, world: int, warm: bool) -> Tensor:
    """Prefill request 1's new rows; return all heads of them."""

    def rank(group: Group) -> Tensor:
        dcp = DCP(world=world, rank=group.rank())
        t = case.operands(dcp)
        if warm:
            share(case, t, world)
        made = case.plan(one_rank(case.dsa.spec(dcp)))
        layer = GatheredPrefill(made, group, dcp, tokens=sum(case.contexts), requests=2)
        rows = (t["row_req"], t["row_len"], t["latent_table"], t["index_table"])
        step = layer.begin(case.lengths, case.contexts, *rows)
        own = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
        caches = (t["latent_cache"], t["index_cache"], t["k_scale"])
        return layer.run(step, case.heads_of(group), *own, *caches)[0]

    return torch.cat(LoopbackGroup.run(world, rank), dim=1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_blocks_give_the_bits_of_a_cold_run(world: int) -> None:
    tail = 40
    # Request 0 left the blocks behind and computes nothing now; request 1 is cold, or has its prefix cached.
    cold = PrefillCase(((PREFIX + 9, 0), (0, PREFIX + tail)), padding=0)
    warm = PrefillCase(((PREFIX + 9, 0), (PREFIX, tail)), padding=0)
    first, second = cold.dsa.tokens
    common = [tuple(torch.cat((a[:PREFIX], b[PREFIX:])) for a, b in zip(first, second, strict=True))]
    cold.dsa.tokens = warm.dsa.tokens = [first, *common]
    for name in ("q", "index_q", "index_w"):
        setattr(warm.dsa, name, getattr(cold.dsa, name)[PREFIX:])
    assert same_bits(prefill(warm, world, warm=True), prefill(cold, world, warm=False)[PREFIX:].contiguous())


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_stored_state_gives_the_bits_of_a_cold_run(world: int, checkpoints: bool) -> None:
    """Request 0 stores its states at the end of its last full block; request 1 goes on from there."""
    heads, own, other = 2, 70, 31
    spec = KDASpec(num_heads=heads, head_dim=8, scale=8**-0.5, checkpoints=checkpoints)
    layer, stop = Layer.random(spec), last_stop(0, own, BLOCK)
    assert stop == 64
    prompts = [Rows.random(spec, own, seed=1), Rows.random(spec, stop + other, seed=2)]
    joined = {
        n: torch.cat((getattr(prompts[0], n)[:stop], getattr(prompts[1], n)[stop:])) for n in vars(prompts[0])
    }
    prompts[1] = Rows(**joined)
    plans = [plan(op, spec, LIMITS, device="cpu") for op in ("kda_conv", "kda_prefill")]
    gates = (layer.A_log, layer.dt_bias)

    def run(group: Group, rows: Rows, slot: int, pools: tuple[Tensor, Tensor], **more: Any) -> Tensor:
        kda = ContextKDA(*plans, group)
        shards = Shards.interleaved(len(rows), group.size())
        step = kda.begin([len(rows)], shards, ids(slot), **more)
        tokens = (kda.gather(step, shards.take(x, group.rank())) for x in (rows.x, rows.raw_g, rows.raw_beta))
        x, raw_g, raw_beta = tokens
        return kda.run(step, x, layer.weight, raw_g, raw_beta, *gates, *pools)

    def rank(group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        fresh = torch.tensor([False])
        pools, again = ((layer.conv_pool(4), layer.pool(4)) for _ in range(2))
        cold = run(group, prompts[1], 1, pools, has_initial_state=fresh)
        run(group, prompts[0], 0, again, has_initial_state=fresh, stops={0: [(stop, 3)]})
        for pool in again:
            pool[2] = pool[3]  # request 1 takes the stored state over, into a slot of its own
        warm = run(group, prompts[1].some(slice(stop, None)), 2, again)
        return cold[stop:].contiguous(), warm, pools[1][1], again[1][2]

    for cold, warm, state, warm_state in LoopbackGroup.run(world, rank):
        assert same_bits(warm, cold)
        assert same_bits(warm_state, state)


def test_the_operators_own_checkpoint_is_that_state() -> None:
    spec = KDASpec(num_heads=2, head_dim=8, scale=8**-0.5, checkpoints=True)
    layer, rows = Layer.random(spec), Rows.random(spec, 70)
    state, whole = layer.pool(4), layer.pool(4)
    stored = {"checkpoint_offsets": ids(64), "checkpoint_ids": ids(3)}
    layer.prefill(rows, state, ids(0), cuts(70), **stored)
    none = {"checkpoint_offsets": ids(-1), "checkpoint_ids": ids(-1)}
    layer.prefill(rows.some(slice(64)), whole, ids(0), cuts(64), **none)
    assert same_bits(state[3], whole[0])
