"""Processes over NCCL with a device each: captured merges, and prefill with the bits of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from kda_cases import same_bits
from merge_cases import PROTOCOLS, tied_rows
from nccl_process import DECODE, LIMITS, ROWS, SEEDS, SPREAD, TOPK, WIDTH, one_device_of

from kimi_hal.dispatch.plan import plan
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


def union(locals_: list[torch.Tensor], interleave: int) -> torch.Tensor:
    """Return all ranks' winners as ascending global positions."""
    parts = []
    for rank, local in enumerate(locals_):
        dcp = DCP(world=len(locals_), rank=rank, interleave=interleave)
        parts.append(torch.where(local >= 0, ownership.position(local.long(), dcp), -1))
    found = selection.ascending(torch.cat(parts, dim=1))
    assert (found[:, TOPK:] == -1).all()
    return found[:, :TOPK]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_graph_that_holds_the_collectives_is_replayed_with_new_scores(
    protocol: str, seen: list[dict[str, Any]]
) -> None:
    missed = 0
    for seed in range(SEEDS):
        expected = selection.select_positions(*tied_rows(ROWS, WIDTH, seed), TOPK)
        found = union([each[f"{protocol} {seed}"][0] for each in seen], interleave=1)
        wrong = (found != expected).any(dim=1)
        assert (found[wrong] == -1).all()
        assert [each[f"{protocol} {seed}"][1] for each in seen] == [int(wrong.sum())] * DEVICES
        missed += int(wrong.sum())
    assert (missed > 0) == (protocol != "full")


@pytest.mark.parametrize("name", ["sharded", "gathered"])
def test_a_prefill_over_devices_has_the_bits_of_one(name: str, seen: list[dict[str, Any]]) -> None:
    outs, lses = zip(*(each[name] for each in seen), strict=True)
    for got, expected in zip((torch.cat(outs, 1), torch.cat(lses, 1)), seen[0]["one"], strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kernels_merge_as_the_reference_does_and_send_as_much(
    protocol: str, seen: list[dict[str, Any]]
) -> None:
    for seed in range(SEEDS):
        locals_, same, bytes_alike = zip(*(each[f"kernels {protocol} {seed}"] for each in seen), strict=True)
        expected = selection.select_positions(*tied_rows(ROWS, WIDTH, seed), TOPK)
        assert torch.equal(union(list(locals_), SPREAD), expected)
        assert all(same)
        assert all(bytes_alike)


def test_a_graph_of_kernels_and_their_message_is_replayed_with_new_scores(seen: list[dict[str, Any]]) -> None:
    for seed in range(SEEDS):
        expected = selection.select_positions(*tied_rows(ROWS, WIDTH, seed), TOPK)
        assert torch.equal(union([each[f"replayed {seed}"] for each in seen], SPREAD), expected)


def test_kernels_gather_every_byte(seen: list[dict[str, Any]]) -> None:
    found = {name: [each[name] for each in seen] for name in seen[0] if name.startswith("gathered ")}
    assert len(found) == 9
    assert {name for name, same in found.items() if not all(same)} == set()


@pytest.mark.parametrize("protocol", ["full", "scores_only"])
def test_a_layer_of_kernels_over_devices_decodes_as_the_reference(
    protocol: str, seen: list[dict[str, Any]]
) -> None:
    out, lse = zip(*(each[f"decoded {protocol}"] for each in seen), strict=True)
    expected = plan(
        "dsa_decode", DECODE.spec(), LIMITS, device="cpu", implementation="reference.composed"
    ).run(**DECODE.operands())
    torch.testing.assert_close((torch.cat(out, 1), torch.cat(lse, 1)), expected, rtol=1e-3, atol=1e-3)
