"""What one of W processes, each with a device of its own, does in the tests over NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from merge_cases import PROTOCOLS, share, tied_rows
from prefill_cases import PrefillCase
from torch import Tensor

from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import TorchGroup
from kimi_hal.parallel.prefill import TokenShardedPrefill, one_rank
from kimi_hal.reference import topk_merge as reference

ROWS, TOPK, WIDTH, SEEDS = 64, 256, 4000, 3
PREFILL = PrefillCase(((90, 21), (0, 30), (40, 1), (0, 0)))
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


def one_device_of(world: int, rank: int, folder: str) -> None:
    """Run every check and write the answers to ``<folder>/<rank>.pt``."""
    os.environ["KIMI_HAL_BACKEND"] = "reference"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(merges() | prefills(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
