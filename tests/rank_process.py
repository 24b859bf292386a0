"""What one of W real processes does in the tests of ``torch.distributed``; its answers go into a file."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composite_cases import DSACase
from kda_cases import Layer, Rows, ids
from merge_cases import PROTOCOLS, share, tied_rows
from prefill_cases import LIMITS, PrefillCase
from torch import Tensor

from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import GroupError
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.agreement import agree_dcp
from kimi_hal.parallel.captured import Capacity
from kimi_hal.parallel.decode import CapturedDecode
from kimi_hal.parallel.divided import RowDividedPrefill
from kimi_hal.parallel.gathered import GatheredPrefill
from kimi_hal.parallel.groups import Group, TorchGroup
from kimi_hal.parallel.kda import ContextKDA
from kimi_hal.parallel.prefill import TokenShardedPrefill, one_rank
from kimi_hal.parallel.shards import Shards

INTERLEAVE = 4
PREFILL = PrefillCase(((90, 21), (0, 30), (40, 1), (0, 0)))
DECODE = DSACase(
    lengths=(150, 1, 5), rows=((0, 149), (0, 150), (1, 1), (2, 5), (9, 0)), heads=8, score="bfloat16"
)
KDA = KDASpec(num_heads=8, head_dim=8, scale=8**-0.5)
TOKENS, STOP = 37, 19
GATHERED = torch.randint(0, 256, (8 * 2 * INTERLEAVE - 3, 6), generator=torch.Generator().manual_seed(3))
MERGED, TOPK = tied_rows(60, 150, seed=8), 16


def seconds(fn: Any) -> tuple[str, float]:
    """Run what must fail; return its sentence and how long it took."""
    began = time.perf_counter()
    try:
        fn()
    except GroupError as error:
        return str(error), time.perf_counter() - began
    return "", time.perf_counter() - began


def prefills(group: Group) -> dict[str, Any]:
    case, world, rank = PREFILL, group.size(), group.rank()
    dcp = DCP(world=world, rank=rank, interleave=INTERLEAVE)
    sizes = {"tokens": sum(case.contexts), "requests": len(case.contexts)}
    whole, own = case.operands(), case.operands(dcp)
    q, answers = case.heads_of(group), {}

    sharded = TokenShardedPrefill(case.plan(), group)
    tables = (whole["row_req"], whole["row_len"], whole["latent_table"], whole["index_table"])
    step = sharded.begin(case.lengths, *tables)
    index = (step.own(case.dsa.index_q), step.own(case.dsa.index_w))
    caches = (whole["latent_cache"], whole["index_cache"], whole["k_scale"])
    answers["sharded"] = sharded.run(step, q, *index, *caches)

    tables = (own["row_req"], own["row_len"], own["latent_table"], own["index_table"])
    caches = (own["latent_cache"], own["index_cache"], own["k_scale"])
    gathered = GatheredPrefill(case.plan(one_rank(case.dsa.spec(dcp))), group, dcp, **sizes)
    answers["gathered"] = gathered.run(
        gathered.begin(case.lengths, case.contexts, *tables), q, *index, *caches
    )

    divided = RowDividedPrefill.planned(case.dsa.spec(dcp), LIMITS, group, device="cpu", **sizes)
    laid = divided.begin(case.lengths, case.contexts, *tables)
    answers["picks"] = divided.select(laid, *index, own["index_cache"])
    answers["divided"] = divided.run(laid, q, *index, *caches)
    return answers


def decodes(group: Group) -> dict[str, Any]:
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=INTERLEAVE)
    answers = {}
    for protocol in PROTOCOLS:
        made = CapturedDecode(
            DECODE.spec(dcp, protocol=protocol), LIMITS, group, device="cpu", capacity=Capacity(5, 16)
        )
        answers[f"decode {protocol}"] = made.run(**DECODE.operands(dcp))
        answers[f"answer {protocol}"] = made.answer(**DECODE.operands(dcp))
    return answers


def merges(group: Group) -> dict[str, Any]:
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=INTERLEAVE)
    scores, lengths = MERGED
    select = TopKSpec(
        topk=TOPK, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp, ordered=True
    )
    index, chosen = plan("topk_select", select, device="cpu").run(share(scores, dcp), lengths)
    answers = {}
    for protocol in PROTOCOLS:
        spec = TopKMergeSpec(
            dcp=dcp, topk=TOPK, score="bfloat16", protocol=protocol, return_global=protocol != "scores_only"
        )
        merge = plan("topk_merge", spec, device="cpu", group=group)
        answers[f"merge {protocol}"] = merge.run(chosen, index, lengths)[0]
    return answers


def gathers(group: Group) -> dict[str, Any]:
    """Gather this rank's share of some rows into each layout; what is no row of its own is 77."""
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=INTERLEAVE)
    mine = ownership.owner(torch.arange(len(GATHERED)), dcp) == dcp.rank
    x = torch.full((8 * 2 * INTERLEAVE // dcp.world, 6), 77, dtype=torch.uint8)
    x[: int(mine.sum())] = GATHERED[mine].to(torch.uint8)
    answers = {}
    for layout, total in (("rank_major", None), ("token_order", len(GATHERED)), ("last_dim", None)):
        spec = GatherSpec(layout=layout, dtype="uint8", dcp=dcp)
        answers[f"gather {layout}"] = plan("all_gather", spec, device="cpu", group=group).run(x, total)
    return answers


def recurrence(group: Group) -> dict[str, Any]:
    rank, per = group.rank(), KDA.num_heads // group.size()
    own = KDASpec(num_heads=per, head_dim=8, scale=8**-0.5)
    limits = Limits(max_rows=64, max_reqs=8, rows_per_req=64, uniform=False)
    plans = [plan(name, own, limits, device="cpu") for name in ("kda_conv", "kda_prefill")]
    rows, layer, part = Rows.random(KDA, TOKENS), Layer.random(KDA), slice(rank * per, (rank + 1) * per)

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], 3, KDA.num_heads, 8)[..., part, :].flatten(-3).contiguous()

    kda, shards = ContextKDA(*plans, group), Shards.interleaved(TOKENS, group.size())
    step = kda.begin([TOKENS], shards, ids(0), None, {0: [(STOP, 2)]})
    x, g, beta = (kda.gather(step, shards.take(t, rank)) for t in (rows.x, rows.raw_g, rows.raw_beta))
    state = layer.pool(3)[:, part].clone()
    gates = (g[:, part].contiguous(), beta[:, part].contiguous())
    parameters = (layer.A_log[part], layer.dt_bias[8 * part.start : 8 * part.stop])
    o = kda.run(
        step,
        heads(x),
        heads(layer.weight.T).T.contiguous(),
        *gates,
        *parameters,
        heads(layer.conv_pool(3)),
        state,
    )
    return {"kda": kda.give_back(step, o), "state": state}


def errors(group: TorchGroup) -> dict[str, Any]:
    """What goes wrong on purpose; the last rank's death comes last."""
    last = group.size() - 1
    seen: dict[str, Any] = {
        "interleave": seconds(
            lambda: agree_dcp(
                group, DCP(world=group.size(), rank=group.rank(), interleave=1 + group.rank() % 2)
            )
        ),
        "dtype": seconds(
            lambda: group.all_gather(torch.zeros(2, dtype=[torch.int32, torch.float32][group.rank() == last]))
        ),
    }
    if group.rank() == last:
        return seen
    impatient = TorchGroup(timeout=20)
    seen["dead"] = seconds(lambda: impatient.all_gather(torch.zeros(3)))
    return seen


def one_rank_of(world: int, rank: int, folder: str) -> None:
    """Run every check and write the answers to ``<folder>/<rank>.pt``."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # a call that torch has renamed
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    group = TorchGroup(timeout=60)
    answers: dict[str, Any] = {}
    for check in (prefills, decodes, merges, gathers, recurrence, errors):
        answers |= check(group)
    torch.save(answers, Path(folder) / f"{rank}.part")
    os.replace(Path(folder) / f"{rank}.part", Path(folder) / f"{rank}.pt")
    os._exit(0)  # as a killed process ends: without a word to the others
