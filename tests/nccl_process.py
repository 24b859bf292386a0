"""What one of W processes, each with a device of its own, does in the tests over NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composite_cases import DSACase
from merge_cases import PROTOCOLS, share, tied_rows
from prefill_cases import PrefillCase
from torch import Tensor

from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import Group, TorchGroup
from kimi_hal.parallel.prefill import TokenShardedPrefill, one_rank
from kimi_hal.reference import all_gather as gather
from kimi_hal.reference import topk_merge as reference

ROWS, TOPK, WIDTH, SEEDS = 64, 256, 4000, 3
PREFILL = PrefillCase(((90, 21), (0, 30), (40, 1), (0, 0)))
DECODE = DSACase(
    lengths=(150, 1, 700), rows=((0, 149), (0, 150), (1, 1), (2, 699), (2, 700), (9, 0)), heads=8
)
LAYOUTS = ("rank_major", "token_order", "last_dim")
SPREAD = 4
LIMITS = Limits(max_rows=512, max_reqs=64, max_context=4096, rows_per_req=512, uniform=False)


def on_device(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in operands.items()}


def merges() -> dict[str, Any]:
    """Capture each protocol once, replay it with new scores; return winners and flags of every replay."""
    group = TorchGroup(verify=False)
    dcp, answers = DCP(world=group.size(), rank=group.rank()), {}
    for protocol in PROTOCOLS:
        spec = TopKMergeSpec(
            dcp=dcp,
            topk=TOPK,
            score="bfloat16",
            protocol=protocol,
            return_global=False,
            quota=TOPK // group.size() if protocol == "compact" else None,
        )
        merge = CapturedMerge(
            spec, group, Limits(max_rows=ROWS, max_reqs=ROWS), device="cuda", capacity=Capacity(8, 64)
        )
        scores = torch.zeros(ROWS, TOPK, dtype=torch.bfloat16, device="cuda")
        index = torch.full((ROWS, TOPK), -1, dtype=torch.int32, device="cuda")
        lengths = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        local, count = torch.zeros_like(index), torch.zeros_like(lengths)
        outputs = {"local_out": local, "len_out": count}
        merge.run(scores, index, lengths, **outputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            merge.run(scores, index, lengths, **outputs)
        for seed in range(SEEDS):
            rows, bounds = tied_rows(ROWS, WIDTH, seed)
            select = TopKSpec(
                topk=TOPK, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp
            )
            picked, chosen = reference.topk_select(select, share(rows, dcp), bounds)
            for buffer, value in ((scores, chosen), (index, picked), (lengths, bounds)):
                buffer.copy_(value)
            merge.flag.zero_()
            graph.replay()
            torch.cuda.synchronize()
            answers[f"{protocol} {seed}"] = (local.cpu(), int(merge.flag))
    return answers


def prefills() -> dict[str, Any]:
    """Prefill over the ranks, eagerly and verified; return out and lse of this rank's heads, and of one rank."""
    case, group = PREFILL, TorchGroup(timeout=60)
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=4)
    q, whole, own = case.heads_of(group).cuda(), on_device(case.operands()), on_device(case.operands(dcp))
    alone = plan("dsa_decode", case.dsa.spec(), LIMITS, device="cuda")
    answers: dict[str, Any] = {"one": alone.run(**on_device(case.dsa.operands()))}
    index = (case.dsa.index_q.cuda(), case.dsa.index_w.cuda())

    sharded = TokenShardedPrefill(alone, group)
    names = ("row_req", "row_len", "latent_table", "index_table")
    step = sharded.begin(case.lengths, *(whole[n] for n in names))
    caches = (whole["latent_cache"], whole["index_cache"], whole["k_scale"])
    answers["sharded"] = sharded.run(step, q, *map(step.own, index), *caches)

    made = plan("dsa_decode", one_rank(case.dsa.spec(dcp)), LIMITS, device="cuda")
    sizes = {"tokens": sum(case.contexts), "requests": len(case.contexts)}
    gathered = GatheredPrefill(made, group, dcp, **sizes)
    laid = gathered.begin(case.lengths, case.contexts, *(own[n] for n in names))
    caches = (own["latent_cache"], own["index_cache"], own["k_scale"])
    answers["gathered"] = gathered.run(laid, q, *map(laid.own, index), *caches)
    return {name: tuple(x.cpu() for x in pair) for name, pair in answers.items()}


def portable(operator: str, spec: Any, group: Group, device: str) -> Plan:
    """Plan the portable kernels."""
    name = "nvidia.composed" if operator == "dsa_decode" else "nvidia.triton"
    return plan(operator, spec, LIMITS, device=device, group=group, implementation=name)


def merged_by_kernels(group: Group, device: str, rows: int = ROWS, topk: int = TOPK) -> dict[str, Any]:
    """Merge rows full of ties under each protocol; return each rank's winners, and what was sent."""
    dcp, answers = DCP(world=group.size(), rank=group.rank(), interleave=SPREAD), {}
    for protocol in PROTOCOLS:
        spec = TopKMergeSpec(
            dcp=dcp, topk=topk, score="bfloat16", protocol=protocol, return_global=protocol != "scores_only"
        )
        made = portable("topk_merge", spec, group, device)
        for seed in range(SEEDS):
            scores, bounds = tied_rows(rows, WIDTH, seed)
            select = TopKSpec(
                topk=topk, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp
            )
            picked, chosen = reference.topk_select(select, share(scores, dcp), bounds)
            given = [t.to(device) for t in (chosen.bfloat16(), picked, bounds)]
            group.bytes_sent = 0
            got, sent = made.run(*given), group.bytes_sent
            group.bytes_sent = 0
            expected = reference.topk_merge(spec, *given, group=group)
            same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            answers[f"kernels {protocol} {seed}"] = (got[0].cpu(), same, sent == group.bytes_sent)
    return answers


def replayed_by_kernels(group: TorchGroup) -> dict[str, Any]:
    """Capture the protocol without a second message, and replay it with new scores."""
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=SPREAD)
    made = portable("topk_merge", TopKMergeSpec(dcp=dcp, topk=TOPK, score="bfloat16"), group, "cuda")
    scores = torch.zeros(ROWS, TOPK, dtype=torch.bfloat16, device="cuda")
    index = torch.full((ROWS, TOPK), -1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    made.run(scores, index, lengths)
    torch.cuda.synchronize()
    graph, answers = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph):
        results = made.run(scores, index, lengths)
    for seed in range(SEEDS):
        rows, bounds = tied_rows(ROWS, WIDTH, seed)
        select = TopKSpec(topk=TOPK, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp)
        picked, chosen = reference.topk_select(select, share(rows, dcp), bounds)
        for buffer, value in ((scores, chosen), (index, picked), (lengths, bounds)):
            buffer.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        answers[f"replayed {seed}"] = results[0].cpu()
    return answers


def gathered_by_kernels(group: Group, device: str) -> dict[str, Any]:
    """Gather bytes into each layout, into a given buffer and without; tell whether they are the reference's."""
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=SPREAD)
    drawn, answers = torch.Generator().manual_seed(group.rank()), {}
    for layout in LAYOUTS:
        for dtype, width in ((torch.uint8, 576), (torch.bfloat16, 7), (torch.float8_e4m3fn, 24)):
            spec = GatherSpec(layout=layout, dtype=str(dtype).removeprefix("torch."), dcp=dcp)
            x = torch.randint(0, 256, (64, width * dtype.itemsize), generator=drawn, dtype=torch.uint8)
            x, total = x.to(device).view(dtype), 64 * group.size() - 5 if layout == "token_order" else None
            expected = gather.all_gather(spec, x, total, group=group)
            made = portable("all_gather", spec, group, device)
            results = (made.run(x, total), made.run(x, total, out=torch.empty_like(expected)))
            answers[f"gathered {layout} {dtype}"] = all(
                torch.equal(r.view(torch.uint8), expected.view(torch.uint8)) for r in results
            )
    return answers


def decoded_by_kernels(group: Group, device: str) -> dict[str, Any]:
    """Decode a layer over the ranks under both protocols of float32 scores; return out and lse."""
    dcp, answers = DCP(world=group.size(), rank=group.rank(), interleave=SPREAD), {}
    for protocol in ("full", "scores_only"):
        made = portable("dsa_decode", DECODE.spec(dcp, protocol=protocol), group, device)
        operands = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in DECODE.operands(dcp).items()}
        answers[f"decoded {protocol}"] = tuple(x.cpu() for x in made.run(**operands))
    return answers


def one_device_of(world: int, rank: int, folder: str) -> None:
    """Run every check and write the answers to ``<folder>/<rank>.pt``."""
    os.environ["KIMI_HAL_BACKEND"] = "reference"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    answers, group = merges() | prefills(), TorchGroup(timeout=60)
    os.environ["KIMI_HAL_BACKEND"] = "nvidia"
    for check in (merged_by_kernels, gathered_by_kernels, decoded_by_kernels):
        answers |= check(group, "cuda")
    answers |= replayed_by_kernels(TorchGroup(verify=False))
    torch.save(answers, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
