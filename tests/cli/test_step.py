"""``kimi-hal step`` runs three layers and refuses what cannot run with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from kimi_hal import formats
from kimi_hal.cli.step import command
from kimi_hal.step.measure import difference
from kimi_hal.step.report import amount, duration

safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed: no shard can be read"
)


def shard(path: Path, experts: int = 2, **changes: Any) -> Path:
    """Write experts of K3.1's width, all zero but for their scales, in the checkpoint's naming."""
    tensors = {}
    for expert in range(experts):
        for name, (rows, columns) in {"w1": (3072, 3584), "w3": (3072, 3584), "w2": (3584, 3072)}.items():
            prefix = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}"
            tensors[f"{prefix}.weight_packed"] = torch.full((rows, columns // 2), 0x11, dtype=torch.uint8)
            tensors[f"{prefix}.weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    safetensors.save_file(tensors | changes, str(path))
    return path


@pytest.fixture(scope="module")
def small_shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard(tmp_path_factory.mktemp("shard") / "experts.safetensors")


def step(*args: str) -> Result:
    return CliRunner().invoke(command, ["--random", "--local-experts", "2", *args])


def test_three_layers_run_and_agree_with_the_oracle(small_shard: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    args = (
        "--context",
        "200",
        "--batch",
        "3",
        "--tp",
        "32",
        "--experts",
        str(small_shard),
        "--json",
        str(out),
    )
    result = step(*args)
    assert result.exit_code == 0, result.output
    rows = {row["operator"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {
        "store_index_keys",
        "store_latent",
        "quantize_index_query",
        "indexer_topk",
        "sparse_mla",
        "dsa_decode",
        "kda_conv",
        "kda_gate",
        "kda_decode",
        "kda_layer_decode",
        "moe_route",
        "moe_experts",
    }
    for name, row in rows.items():
        assert row["error"] <= (0.0 if row["discrete"] else 4e-3), name
        assert row["seconds"] > 0
        assert row["bytes"] > 0


@pytest.mark.parametrize("latent", [n for n in formats.names("latent") if "fnuz" not in n])
def test_every_latent_format_runs(latent: str, small_shard: Path) -> None:
    args = (
        "--context",
        "70",
        "--batch",
        "1",
        "--tp",
        "32",
        "--experts",
        str(small_shard),
        "--latent",
        latent,
    )
    assert step(*args).exit_code == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--batch", "9", "--context", "8"), "--batch must be between 1 and --context 8, got 9"),
        (("--batch", "0"), "--batch must be between 1 and --context 32768, got 0"),
        (("--tp", "5"), "tp=5 does not divide 96 heads"),
        (("--latent", "latent.fp8.e4m3.tensor"), "did you mean 'latent.fp8.e4m3fn.tensor'"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(args: tuple[str, ...], text: str) -> None:
    result = step(*args)
    assert result.exit_code != 0
    assert text in result.output + str(result.exception)


def test_a_shard_that_lacks_experts_is_refused(small_shard: Path) -> None:
    args = [
        "--random",
        "--context",
        "70",
        "--batch",
        "1",
        "--local-experts",
        "3",
        "--experts",
        str(small_shard),
    ]
    result = CliRunner().invoke(command, args)
    assert result.exit_code != 0
    assert str(result.exception) == "layer 1: 1 of 3 experts are missing: 2"


def test_a_missing_workload_says_how_to_build_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--workload", str(tmp_path / "none.safetensors")])
    assert result.exit_code != 0
    assert "python -m kimi_hal_conformance.workload build" in str(result.exception)


def test_differences_are_relative_or_shares() -> None:
    assert difference(
        torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0], dtype=torch.float64)
    ) == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    assert difference(torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)) == 0.5


def test_units_read_well() -> None:
    assert [duration(s) for s in (2.0, 0.0123, 4.2e-5)] == ["2.00 s", "12.30 ms", "42 µs"]
    assert [amount(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
