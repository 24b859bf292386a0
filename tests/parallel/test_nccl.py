"""Processes over NCCL with a device each: captured merges, and prefill with the bits of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from kda_cases import same_bits
from merge_cases import PROTOCOLS, tied_rows
from nccl_process import ROWS, SEEDS, TOPK, WIDTH, one_device_of

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.reference import selection

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("nccl")
    processes.start_processes(one_device_of_rank, (DEVICES, str(folder)), DEVICES, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(DEVICES)]


def one_device_of_rank(rank: int, world: int, folder: str) -> None:
    one_device_of(world, rank, folder)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_graph_that_holds_the_collectives_is_replayed_with_new_scores(
    protocol: str, seen: list[dict[str, Any]]
) -> None:
    missed = 0
    for seed in range(SEEDS):
        expected = selection.select_positions(*tied_rows(ROWS, WIDTH, seed), TOPK)
        parts = []
        for rank, each in enumerate(seen):
            local = each[f"{protocol} {seed}"][0].long()
            dcp = DCP(world=DEVICES, rank=rank)
            parts.append(torch.where(local >= 0, ownership.position(local, dcp), -1))
        found = selection.ascending(torch.cat(parts, dim=1))
        assert (found[:, TOPK:] == -1).all()
        wrong = (found[:, :TOPK] != expected).any(dim=1)
        assert (found[wrong] == -1).all()
        assert [each[f"{protocol} {seed}"][1] for each in seen] == [int(wrong.sum())] * DEVICES
        missed += int(wrong.sum())
    assert (missed > 0) == (protocol != "full")


@pytest.mark.parametrize("name", ["sharded", "gathered"])
def test_a_prefill_over_devices_has_the_bits_of_one(name: str, seen: list[dict[str, Any]]) -> None:
    outs, lses = zip(*(each[name] for each in seen), strict=True)
    for got, expected in zip((torch.cat(outs, 1), torch.cat(lses, 1)), seen[0]["one"], strict=True):
        assert same_bits(got, expected)
