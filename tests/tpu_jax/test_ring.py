"""Remote DMA over a mesh of eight simulated devices: the ring's gather and the merge, with the race detector on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_hal.errors import ContractError, GroupError, SpecError
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import LoopbackGroup, ownership
from kimi_hal.reference import all_gather as gather_reference
from kimi_hal.reference import selection
from kimi_hal.reference import topk_merge as merge_reference
from kimi_hal_tpu.pallas import aot, merge, ring
from kimi_hal_tpu.pallas.bridge import races_found, to_jax
from kimi_hal_tpu.pallas.mode import Mode

SIMULATED = Mode(simulated=True)
NAN, INF = float("nan"), float("inf")


def on_mesh(world: int, body: Callable[..., Any], *parts: list[Tensor]) -> list[np.ndarray[Any, Any]]:
    """Run ``body`` on every device, each with its own parts; returns its results, ``[W, …]`` each."""
    mesh = Mesh(np.array(jax.devices()[:world]), ("ring",))

    def program(*stacked: Any) -> Any:
        return jax.tree.map(lambda x: x[None], body(*(x[0] for x in stacked)))

    sharded = jax.shard_map(program, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=False)
    place = NamedSharding(mesh, P("ring"))
    operands = [jax.device_put(jnp.stack([to_jax(part) for part in each]), place) for each in parts]
    return [np.asarray(result) for result in jax.tree.leaves(jax.jit(sharded)(*operands))]


def of_ranks(spec: Any, body: Callable[..., Any]) -> list[Any]:
    """Return what the reference gives every rank of a group."""

    def one(group: LoopbackGroup) -> Any:
        dcp = dataclasses.replace(spec.dcp, rank=group.rank())
        return body(dataclasses.replace(spec, dcp=dcp), group)

    return LoopbackGroup.run(spec.dcp.world, one)


# --- the ring's gather ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "layout", "shape", "dtype", "interleave", "total"),
    [
        (8, "rank_major", (5, 3, 16), "bfloat16", 1, None),
        (8, "token_order", (6, 144), "uint8", 2, None),
        (
            8,
            "token_order",
            (7, 16),
            "float32",
            3,
            49,
        ),  # a last run that is not whole, and rows that are left out
        (3, "last_dim", (2, 5, 16), "int32", 1, None),
        (2, "rank_major", (9,), "float32", 1, None),
        (4, "token_order", (4, 0), "float32", 2, None),
        (1, "token_order", (5, 16), "float32", 1, 4),
    ],
)
def test_the_ring_gathers_the_bits_of_every_layout_without_a_race(
    world: int, layout: str, shape: tuple[int, ...], dtype: str, interleave: int, total: int | None
) -> None:
    dcp = DCP(world=world, interleave=interleave)
    spec = GatherSpec(layout=layout, dtype=dtype, ndim=len(shape), dcp=dcp)
    kind = getattr(torch, dtype)
    size = kind.itemsize * int(np.prod(shape))
    noise = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(world)]
    parts = [each.view(kind).reshape(shape) for each in noise]
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.itemsize]

    def body(words: Any) -> Any:  # what XLA's CPU does to a NaN outside of the gather is not looked at
        x = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
        return ring.as_words(ring.all_gather(spec, x, "ring", SIMULATED, total=total))

    (found,) = on_mesh(world, body, [part.view(whole) for part in parts])
    expected = of_ranks(
        spec, lambda own, group: gather_reference.all_gather(own, parts[group.rank()], total, group=group)
    )
    for rank in range(world):
        assert found[rank].shape == tuple(expected[rank].shape)
        assert found[rank].tobytes() == expected[rank].contiguous().view(torch.uint8).numpy().tobytes()
    assert not races_found()


def test_an_axis_of_another_size_and_a_total_that_does_not_fit_are_refused() -> None:
    spec = GatherSpec(layout="token_order", dtype="float32", dcp=DCP(world=4, interleave=2))
    parts = [torch.zeros(2, 8)] * 2
    with pytest.raises(GroupError) as error:
        on_mesh(2, lambda x: ring.all_gather(spec, x, "ring", SIMULATED), parts)
    assert str(error.value) == (
        "mesh axis 'ring' has 2 devices, the Spec has dcp.world=4: give the axis of the group, or a Spec of 2 ranks"
    )
    with pytest.raises(ContractError, match="total=9 is outside 0 to 8"):
        on_mesh(2, lambda x: ring.all_gather(spec, x, "ring", SIMULATED, total=9), parts)


def test_what_is_gathered_must_be_what_the_spec_says() -> None:
    spec = GatherSpec(layout="rank_major", dtype="float32", dcp=DCP(world=2))

    def gather(x: Any, axis: str = "ring", **fields: Any) -> Any:
        return ring.all_gather(dataclasses.replace(spec, **fields), x, axis, SIMULATED)

    with pytest.raises(ContractError) as error:
        on_mesh(2, gather, [torch.zeros(2, 8, 1, dtype=torch.int32)] * 2)
    assert str(error.value) == (
        "all_gather: x must be float32, got int32; x must have 2 dimensions, got shape [2, 8, 1]"
    )
    with pytest.raises(ContractError) as error:
        gather(np.zeros((2, 8)), dtype="float64")  # type: ignore[arg-type]
    assert str(error.value) == "all_gather: x must have elements of 1, 2 or 4 bytes for the ring, got float64"
    nowhere = "here: call it in a program under jax.shard_map, over a mesh that has the axis"
    with pytest.raises(GroupError) as lost:
        gather(jnp.zeros((2, 8)))
    assert str(lost.value) == f"no mesh axis 'ring' {nowhere}"
    with pytest.raises(GroupError) as lost:
        on_mesh(2, lambda x: gather(x, "rings"), [torch.zeros(2, 8)] * 2)
    assert str(lost.value) == f"no mesh axis 'rings' {nowhere}"


# --- the merge --------------------------------------------------------------------------------------------------


def hard_scores(rows: int, width: int) -> Tensor:
    scores = torch.randn(rows, width)
    scores[1] = scores[1].round()  # ties at the cut
    scores[2, ::5], scores[2, 1::3], scores[2, 7] = NAN, -INF, INF
    scores[3], scores[3, ::2] = 0.0, -0.0
    return scores


def shards(spec: TopKMergeSpec, scores: Tensor, row_len: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return each rank's selected scores and local positions, these in no order; its padding scores highest."""
    chosen, places = [], []
    for rank in range(spec.dcp.world):
        dcp = dataclasses.replace(spec.dcp, rank=rank)
        column = torch.arange(scores.shape[1])
        own = scores[:, ownership.owner(column, dcp) == rank].to(getattr(torch, spec.score))
        index = selection.select_positions(own, ownership.local_length(row_len.long(), dcp), spec.topk)
        index = index[:, torch.randperm(spec.topk)]
        best = own.gather(1, index.clamp(min=0)).masked_fill(index < 0, INF)
        chosen.append(best)
        places.append(index.int())
    return chosen, places


def merged(spec: TopKMergeSpec, rows: int, width: int) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
    """Return what the devices give, and what the reference's ranks give."""
    row_len = torch.full((rows,), width, dtype=torch.int32)
    row_len[rows // 2], row_len[-1] = width // 3, 0
    scores, index = shards(spec, hard_scores(rows, width), row_len)

    def body(s: Any, i: Any, lengths: Any) -> Any:
        return merge.topk_merge(spec, s, i, lengths, "ring", SIMULATED)

    found = on_mesh(spec.dcp.world, body, scores, index, [row_len] * spec.dcp.world)

    def reference(own: TopKMergeSpec, group: LoopbackGroup) -> Any:
        rank = group.rank()
        return merge_reference.topk_merge(own, scores[rank], index[rank], row_len, group=group)

    return found, of_ranks(spec, reference)


def same(found: list[np.ndarray[Any, Any]], expected: list[Any]) -> bool:
    return all(
        (found[i][rank] == expected[rank][i].numpy()).all() for rank in range(len(expected)) for i in range(3)
    )


@pytest.mark.parametrize(
    ("world", "interleave", "score", "everyones", "rows", "k"),
    [(8, 1, "float32", True, 20, 40), (3, 16, "bfloat16", False, 9, 600)],
)
def test_merged_selections_are_the_references_in_every_row_without_a_race(
    world: int, interleave: int, score: str, everyones: bool, rows: int, k: int
) -> None:
    dcp = DCP(world=world, interleave=interleave)
    spec = TopKMergeSpec(dcp=dcp, topk=k, score=score, return_global=everyones)
    found, expected = merged(spec, rows, 3000 if k > 500 else 1000)
    assert same(found, expected)
    assert not races_found()


def test_where_every_device_has_all_keys_nothing_is_sent() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=4, interleave=2, index="replicated"), topk=6)
    index = torch.tensor([[9, 1, 4, -1, 30, 2]], dtype=torch.int32)
    parts = [torch.zeros(1, 6)] * 4, [index] * 4, [torch.tensor([30], dtype=torch.int32)] * 4
    local, count, everyones = on_mesh(
        4, lambda s, i, n: merge.topk_merge(spec, s, i, n, "ring", SIMULATED), *parts
    )
    assert everyones[:, 0].tolist() == [[1, 2, 4, 9, -1, -1]] * 4
    assert count[:, 0].tolist() == [2, 1, 1, 0]
    assert local[0, 0].tolist() == [1, 3, -1, -1, -1, -1]


@pytest.mark.parametrize("index", ["sharded", "replicated"])
@pytest.mark.parametrize("everyones", [True, False])
def test_a_merge_of_no_rows_is_empty(index: str, everyones: bool) -> None:
    spec = TopKMergeSpec(dcp=DCP(world=3, index=index), topk=4, return_global=everyones)
    none = torch.zeros(0, 4)
    parts = [none] * 3, [none.int()] * 3, [torch.zeros(0, dtype=torch.int32)] * 3
    found = on_mesh(3, lambda s, i, n: merge.topk_merge(spec, s, i, n, "ring", SIMULATED), *parts)
    assert [x.shape for x in found] == [(3, 0, 4), (3, 0), (3, 0, 4 * everyones)]
    assert {x.dtype for x in found} == {np.dtype(np.int32)}


def test_what_is_merged_must_be_what_the_spec_says() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=2), topk=4)
    with pytest.raises(ContractError) as error:
        merge.topk_merge(
            spec,
            jnp.zeros((3, 7), jnp.bfloat16),
            jnp.zeros((3, 4)),
            jnp.zeros(2, jnp.int32),
            "ring",
            SIMULATED,
        )
    assert str(error.value) == (
        "topk_merge: scores must be float32, got bfloat16; scores must be [T k] with k=4, got shape [3, 7]; "
        "indices must be int32, got float32; row_len must be [T] with T=3, got shape [2]"
    )
    given = jnp.zeros((3, 4)), jnp.zeros((3, 4), jnp.int32), jnp.zeros(3, jnp.int32)
    with pytest.raises(GroupError, match="no mesh axis 'ring' here"):
        merge.topk_merge(spec, *given, "ring", SIMULATED)


def test_another_protocol_is_refused() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=2), topk=4, protocol="compact", score="bfloat16")
    with pytest.raises(SpecError) as error:
        merge.topk_merge(spec, jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.zeros(1), "ring", SIMULATED)
    assert str(error.value) == (
        "the merge by remote DMA has protocol 'full', got 'compact': TopKMergeSpec(protocol='full') gives the "
        "same winners"
    )


# --- compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["v6e:2x4", "tpu7x:2x2x1"])
def test_the_gather_and_the_merge_compile_for_eight_devices(topology: str) -> None:
    mesh = aot.mesh(topology, ring=8)
    eight = ring.Ring("ring", 8)
    spec = TopKMergeSpec(dcp=DCP(world=8))

    def gathered(runs: Any) -> Any:
        return ring.gather_runs(eight, runs, Mode())

    def selected(planes: Any) -> Any:
        return merge.merge(eight, planes, spec, Mode())

    keys = (64, 64, 576), jnp.uint8, P("ring")  # latents of 4,096 positions in runs of 64
    found = aot.compile_on(mesh, over(mesh, gathered, P("ring"), P(None, None, "ring")), [keys])
    assert found.kernels == 1
    planes = (2, 8 * 64, 2048), jnp.int32, P(None, "ring")
    found = aot.compile_on(mesh, over(mesh, selected, P(None, "ring"), P(None, "ring")), [planes])
    assert found.kernels == 1


def over(mesh: Mesh, body: Any, given: P, result: P) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=result, check_vma=False)


# --- a kernel with one realistic fault must be found wrong -------------------------------------------------------

SMALL = TopKMergeSpec(dcp=DCP(world=3), topk=20)


def test_one_buffer_for_two_blocks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge.Buffers, "slot", lambda self, block: block * 0)
    found, expected = merged(SMALL, 24, 300)
    assert races_found() or not same(found, expected)


def test_a_block_sent_before_its_buffer_is_free_is_a_race_that_the_detector_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = merge.Buffers.open

    def hasty(self: Any, block: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(merge.pl, "semaphore_wait", lambda *a: None)
            opened(self, block)

    monkeypatch.setattr(merge.Buffers, "open", hasty)
    monkeypatch.setattr(merge.Buffers, "close", lambda self, block: None)
    merged(SMALL, 40, 300)
    assert races_found()


def test_ties_by_rank_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = merge.candidates

    def rank_major(scores: Any, index: Any, dcp: DCP, rank: Any) -> Any:
        planes = honest(scores, index, dcp, rank)
        return planes.at[1].set(jnp.where(planes[1] < 0, -1, planes[1] + rank * 300 - rank * 300 % 3))

    monkeypatch.setattr(merge, "candidates", rank_major)
    found, expected = merged(SMALL, 4, 300)
    assert not (found[0] == np.stack([own.numpy() for own, _, _ in expected])).all()


def test_a_kernel_that_meets_nobody_is_refused_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.Ring, "meet", lambda self: None)
    mesh = aot.mesh("tpu7x:2x2x1", ring=8)
    eight = ring.Ring("ring", 8)
    body = over(mesh, lambda x: ring.gather_runs(eight, x, Mode()), P("ring"), P(None, None, "ring"))
    with pytest.raises(Exception, match="not using a custom barrier"):
        aot.compile_on(mesh, body, [((8, 64, 128), jnp.int32, P("ring"))])
