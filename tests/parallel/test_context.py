from __future__ import annotations

from typing import Any

import pytest
import torch
from composite_cases import DSACase
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import GroupError, PlanError
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import context
from kimi_hal.parallel.context import ContextCache
from kimi_hal.parallel.groups import Group, LoopbackGroup


def gathered(case: DSACase, world: int, interleave: int, kind: str, **more: Any) -> list[Tensor]:
    """Return what each rank reads of every request in turn, decoded, after gathering one of the caches."""
    fmt = {"index": case.index, "latent": case.latent}[kind]

    def rank(group: Group) -> Tensor:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        t = case.operands(dcp)
        cache = ContextCache(
            fmt,
            case.page,
            dcp,
            group,
            tokens=sum(case.lengths),
            requests=len(case.lengths),
            device="cpu",
            **more,
        )
        route = cache.route(case.lengths, t[f"{kind}_table"])
        assert cache.gather(route, t[f"{kind}_cache"]) is cache.cache
        return read(case, kind, cache.cache, route.table, t["k_scale"])

    return LoopbackGroup.run(world, rank)


def read(case: DSACase, kind: str, cache: Tensor, table: Tensor, k_scale: Tensor | None) -> Tensor:
    """Return every request's tokens in order, decoded."""
    fmt = formats.get({"index": case.index, "latent": case.latent}[kind])
    page = fmt.page if kind == "index" else case.page
    found = []
    for request, length in enumerate(case.lengths):
        place = torch.arange(length)
        slots = table[request, place // page].long() * page + place % page
        found.append(fmt.read(cache, slots) if kind == "index" else fmt.read(cache, page, slots, k_scale))
    return torch.cat(found)


def whole(case: DSACase, kind: str) -> Tensor:
    t = case.operands()
    return read(case, kind, t[f"{kind}_cache"], t[f"{kind}_table"], t["k_scale"])


@pytest.mark.parametrize("name", formats.names("index"))
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 64), (8, 4)])
def test_index_keys_are_what_one_rank_would_hold(name: str, world: int, interleave: int) -> None:
    case = DSACase(lengths=(200, 1, 77, 0, 64), rows=(), index=name)
    for each in gathered(case, world, interleave, "index"):
        assert each.equal(whole(case, "index"))


@pytest.mark.parametrize("name", formats.names("latent"))
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 64), (8, 4)])
def test_latents_are_what_one_rank_would_hold(name: str, world: int, interleave: int) -> None:
    case = DSACase(lengths=(200, 1, 77, 0, 64), rows=(), latent=name)
    for each in gathered(case, world, interleave, "latent"):
        assert each.equal(whole(case, "latent"))


def test_a_context_in_several_messages_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = DSACase(rows=())
    monkeypatch.setattr(context, "GATHERED", 4 * 7 * 132)
    for each in gathered(case, 4, 1, "index"):
        assert each.equal(whole(case, "index"))


def test_a_planned_all_gather_moves_the_bytes() -> None:
    case, world = DSACase(rows=()), 2

    def rank(group: Group) -> Tensor:
        dcp = DCP(world=world, rank=group.rank())
        spec = GatherSpec(layout="rank_major", dtype="uint8", ndim=2, dcp=dcp)
        moved = plan("all_gather", spec, device="cpu", group=group)
        cache = ContextCache(
            case.index, 64, dcp, group, tokens=400, requests=3, device="cpu", gather=moved.run
        )
        t = case.operands(dcp)
        route = cache.route(case.lengths, t["index_table"])
        return read(case, "index", cache.gather(route, t["index_cache"]), route.table, None)

    for each in LoopbackGroup.run(world, rank):
        assert each.equal(whole(case, "index"))


def test_a_workspace_serves_layer_after_layer_and_step_after_step() -> None:
    cases = [DSACase(lengths=lengths, rows=(), seed=seed) for lengths, seed in (((200, 77), 1), ((5,), 2))]

    def rank(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank())
        cache = ContextCache(cases[0].latent, 16, dcp, group, tokens=277, requests=2, device="cpu")
        for case in (*cases, *cases):
            t = case.operands(dcp)
            route = cache.route(case.lengths, t["latent_table"])
            for _layer in range(2):
                cache.gather(route, t["latent_cache"])
                found = read(case, "latent", cache.cache, route.table, t["k_scale"])
                assert found.equal(whole(case, "latent"))

    LoopbackGroup.run(2, rank)


def test_what_a_gather_sends_is_known_before() -> None:
    case = DSACase(lengths=(200, 1, 77), rows=())

    def rank(group: Group) -> tuple[int, int]:
        dcp = DCP(world=4, rank=group.rank(), interleave=4)
        cache = ContextCache(case.latent, 16, dcp, group, tokens=300, requests=3, device="cpu")
        t = case.operands(dcp)
        cache.gather(cache.route(case.lengths, t["latent_table"]), t["latent_cache"])
        return group.bytes_sent, cache.bytes(case.lengths)

    # 200 = 12 rounds of 16 and 8: 52; 1: 1; 77 = 4 rounds of 16 and 13: 20.
    assert LoopbackGroup.run(4, rank) == [((52 + 1 + 20) * 576,) * 2] * 4


def test_no_context_sends_nothing() -> None:
    def rank(group: Group) -> tuple[int, tuple[int, ...]]:
        dcp = DCP(world=2, rank=group.rank())
        cache = ContextCache("latent.bf16", 16, dcp, group, tokens=0, requests=1, device="cpu")
        route = cache.route([0], torch.zeros(1, 3, dtype=torch.int32))
        cache.gather(route, torch.zeros(1, 16 * 1152, dtype=torch.uint8))
        return group.bytes_sent, tuple(route.table.shape)

    assert LoopbackGroup.run(2, rank) == [(0, (1, 0))] * 2


def test_a_workspace_that_is_too_small_says_how_large_it_must_be() -> None:
    def rank(group: Group) -> str:
        dcp = DCP(world=2, rank=group.rank())
        cache = ContextCache("latent.bf16", 16, dcp, group, tokens=64, requests=2, device="cpu")
        assert cache.holds([33, 48])
        assert not cache.holds([33, 49])
        with pytest.raises(PlanError) as caught:
            cache.route([33, 64], torch.zeros(2, 4, dtype=torch.int32))
        return str(caught.value)

    assert LoopbackGroup.run(2, rank)[0] == (
        "contexts of 97 tokens take 7 pages of 16, the workspace has 6: make it with tokens=97, requests=2"
    )


def test_contexts_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    def rank(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank())
        cache = ContextCache("latent.bf16", 16, dcp, group, tokens=64, requests=1, device="cpu")
        route = cache.route([20 + 10 * group.rank()], torch.zeros(1, 2, dtype=torch.int32))
        cache.gather(route, torch.zeros(2, 16 * 1152, dtype=torch.uint8))

    text = r"^ranks disagree at call 0: rank 0 all_gather \[10, 1152\] uint8; rank 1 all_gather \[15, 1152\]"
    with pytest.raises(GroupError, match=text):
        LoopbackGroup.run(2, rank)
