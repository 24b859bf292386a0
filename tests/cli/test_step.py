"""``kimi-hal step`` runs three layers and refuses what cannot run with a sentence."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from kimi_hal import formats
from kimi_hal.cli.step import command
from kimi_hal.step.inputs import RandomInputs
from kimi_hal.step.measure import Row, difference
from kimi_hal.step.report import amount, context_of, duration, rows_table
from kimi_hal.workload.text import Text

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
        (("--device", "acme"), "torch has no device 'acme' here: "),
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


def test_what_ran_before_an_error_is_shown(small_shard: Path) -> None:
    options = ("--context", "70", "--batch", "1", "--tp", "32", "--layer", "7")
    result = step(*options, "--experts", str(small_shard))
    assert "layer 7" in str(result.exception)
    assert "kda_layer_decode" in result.output


def test_a_missing_workload_says_how_to_build_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--workload", str(tmp_path / "none.safetensors")])
    assert result.exit_code != 0
    assert "python -m kimi_hal_conformance.workload build" in str(result.exception)


def test_a_context_beyond_the_workload_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kimi_hal.step.inputs.load", lambda path: SimpleNamespace(context=64))
    result = CliRunner().invoke(command, ["--context", "65", "--device", "cpu"])
    assert result.exit_code == 1
    assert result.output == "Error: --context 65 is more than the workload's 64 tokens; or use --random\n"


def test_differences_are_relative_or_shares() -> None:
    assert difference(
        torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0], dtype=torch.float64)
    ) == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    assert difference(torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)) == 0.5


def test_units_read_well() -> None:
    assert [duration(s) for s in (2.0, 0.0123, 4.2e-5)] == ["2.00 s", "12.30 ms", "42 µs"]
    assert [amount(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_a_pick_is_marked_in_the_text_around_it() -> None:
    tokens = ["over", "last", "output", "value", "), it"]
    content = "over the\n    last output value), it"
    start = torch.tensor([content.index(token) for token in tokens])
    inputs = SimpleNamespace(
        source=Text(content, start, torch.tensor([len(t) for t in tokens]), (("x.py", 0),))
    )
    assert str(context_of(inputs, 3, around=2)) == "last output »value«), it"
    assert str(context_of(inputs, 0, around=2)) == "»over« the last output"
    assert str(context_of(RandomInputs(8, 0), 5)) == "token 5"


@pytest.mark.parametrize("columns", [80, 110])
def test_the_table_of_a_step_fits_a_terminal(columns: int) -> None:
    rows = [
        Row("quantize_index_query", "nvidia.triton", "interpreted", 0.93218, 4_800_000, 1.6e-3, False),
        Row("indexer_topk", "reference.torch", "native", 2.44, 17_400_000, 0.0, True),
        Row("store_latent", "reference.torch", "native", 1e-3, 17_400, 0.01, True),
    ]
    console = Console(width=columns, file=StringIO())
    console.print(rows_table(rows, "TP8, 32,768 tokens, 4 rows, cpu; real text 4a31166cfaf3"))
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= columns
    assert "…" not in shown
    assert [word in shown for word in ("1.6e-03", "exact", "1.00% differ")] == [True] * 3
    assert "its times say nothing of an accelerator" in " ".join(shown.split())
