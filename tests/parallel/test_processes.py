"""Real processes over ``torch.distributed`` with Gloo: the same code gives the same bits as over threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from kda_cases import Layer, Rows, cuts, ids, same_bits
from rank_process import (
    DECODE,
    GATHERED,
    INTERLEAVE,
    KDA,
    LIMITS,
    MERGED,
    PREFILL,
    STOP,
    TOKENS,
    TOPK,
    one_rank_of,
)

from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.parallel.shards import Shards
from kimi_hal.reference import selection


def run(world: int, folder: Path) -> list[dict[str, Any]]:
    """Run W processes and return what each wrote."""
    context = processes.get_context("spawn")
    ranks = [
        context.Process(target=one_rank_of, args=(world, rank, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full), 8]
)
def test_processes_of_gloo(world: int, tmp_path: Path) -> None:
    seen = run(world, tmp_path)
    check_prefills(seen)
    check_decodes(seen)
    check_merges(seen)
    check_gathers(seen)
    check_recurrence(seen)
    check_errors(seen)


def joined(seen: list[dict[str, Any]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = zip(*(each[name] for each in seen), strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def check_prefills(seen: list[dict[str, Any]]) -> None:
    expected = PREFILL.expected()
    for name in ("sharded", "gathered"):
        assert all(same_bits(a, b) for a, b in zip(joined(seen, name), expected, strict=True)), name
    torch.testing.assert_close(joined(seen, "divided"), expected, rtol=2e-5, atol=2e-5)
    t, spec = PREFILL.dsa.operands(), PREFILL.dsa.spec()
    query = plan("quantize_index_query", spec.query, LIMITS, device="cpu").run(t["index_q"], t["index_w"])
    topk = plan("indexer_topk", spec.indexer, LIMITS, device="cpu")
    picks, _ = topk.run(*query, t["index_cache"], t["index_table"], t["row_req"], t["row_len"])
    assert all(each["picks"].equal(picks) for each in seen)


def check_decodes(seen: list[dict[str, Any]]) -> None:
    expected = plan("dsa_decode", DECODE.spec(), LIMITS, device="cpu").run(**DECODE.operands())
    first = joined(seen, "answer full")
    torch.testing.assert_close(first, expected, rtol=2e-5, atol=2e-5)
    for protocol in ("full", "compact", "scores_only"):
        for name in (f"decode {protocol}", f"answer {protocol}"):
            assert all(same_bits(a, b) for a, b in zip(joined(seen, name), first, strict=True)), name


def check_merges(seen: list[dict[str, Any]]) -> None:
    expected = selection.select_positions(*MERGED, TOPK)
    for protocol in ("full", "compact", "scores_only"):
        parts = []
        for rank, each in enumerate(seen):
            local = each[f"merge {protocol}"].long()
            dcp = DCP(world=len(seen), rank=rank, interleave=INTERLEAVE)
            parts.append(torch.where(local >= 0, ownership.position(local, dcp), -1))
        union = selection.ascending(torch.cat(parts, dim=1))
        assert union[:, :TOPK].equal(expected)
        assert (union[:, TOPK:] == -1).all()


def check_gathers(seen: list[dict[str, Any]]) -> None:
    whole = GATHERED.to(torch.uint8)
    for each in seen:
        assert each["gather token_order"].equal(whole)
        ranks = each["gather rank_major"]
        assert torch.cat(list(ranks), dim=1).equal(each["gather last_dim"])
        for rank, rows in enumerate(ranks):
            dcp = DCP(world=len(seen), rank=rank, interleave=INTERLEAVE)
            mine = whole[ownership.owner(torch.arange(len(whole)), dcp) == rank]
            assert rows[: len(mine)].equal(mine)
            assert (rows[len(mine) :] == 77).all()


def check_recurrence(seen: list[dict[str, Any]]) -> None:
    rows, layer = Rows.random(KDA, TOKENS), Layer.random(KDA)
    state, conv_state = layer.pool(3), layer.conv_pool(3)
    y = layer.conv(rows, conv_state, ids(0), cuts(TOKENS))
    o = layer.prefill(layer.convolved(rows, y), state, ids(0), cuts(TOKENS)).bfloat16()
    shards = Shards.interleaved(TOKENS, len(seen))
    assert same_bits(shards.restore(torch.stack([each["kda"] for each in seen])), o)
    got = torch.cat([each["state"] for each in seen], dim=1)
    assert same_bits(got[0], state[0])
    half, conv_state = layer.pool(3), layer.conv_pool(3)
    some = rows.some(slice(STOP))
    y = layer.conv(some, conv_state, ids(0), cuts(STOP))
    layer.prefill(layer.convolved(some, y), half, ids(0), cuts(STOP))
    assert same_bits(got[2], half[0])


def check_errors(seen: list[dict[str, Any]]) -> None:
    world = len(seen)
    even, odd = (", ".join(map(str, range(first, world, 2))) for first in (0, 1))
    interleave = f"ranks {even} have 1, ranks {odd} have 2"
    if world == 2:
        interleave = "rank 0 has 1, rank 1 has 2"
    before = ", ".join(map(str, range(world - 1)))
    for each in seen:
        assert each["interleave"][0] == f"ranks do not agree on dcp.interleave: {interleave}"
        assert each["dtype"][0].endswith(
            f": rank{'s' if world > 2 else ''} {before} all_gather [2] int32; "
            f"rank {world - 1} all_gather [2] float32"
        )
    for rank, each in enumerate(seen[:-1]):
        text, seconds = each["dead"]
        assert text.startswith(f"rank {rank} of {world}: all_gather (call 0) did not end within 20 s: ")
        assert seconds < 30
