"""The suite over the Pallas kernels: interpreted with race detection, and compiled for every generation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

from kimi_hal_conformance.schema import read
from kimi_hal_conformance.verdict import PASSED
from kimi_hal_tpu.pallas_claims import PALLAS

KDA = ("kda_prefill", "kda_decode", "kda_verify", "kda_commit")
ATTENTION = ("gather", "decode", "prefill")


def run(path: Path, *options: str) -> list[tuple[str, str, tuple[str, ...]]]:
    command = [
        "-m",
        "kimi_hal.cli.main",
        "conformance",
        "run",
        "--backend",
        "tpu",
        "--implementation",
        "tpu.pallas",
    ]
    done = subprocess.run(
        [sys.executable, *command, *options, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [(v.case, v.status, v.problems) for v in read(path.read_bytes()).verdicts]


@pytest.mark.full  # in a simulator, longer than the part's share
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("operator", sorted({implementation.operator for implementation in PALLAS}))
def test_the_kernels_keep_the_contract_interpreted(operator: str, tmp_path: Path) -> None:
    options = ("--execution", "interpreted", "--profile", "interp", "--operator", operator, "--limit", "1500")
    verdicts = run(tmp_path / "report.json", *options)  # its exit status is checked there: none fails
    assert any(status == PASSED for _, status, _ in verdicts)


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_generation_that_can_run_it(tmp_path: Path) -> None:
    verdicts = run(tmp_path / "compiled.json", "--compile-only", "--strict")
    compiled = {case for case, status, _ in verdicts if status == PASSED}
    for target in ("v5p", "v6e", "tpu7x"):
        names = {case.split("/", 1)[1].rsplit("/", 1)[0] for case in compiled if case.endswith(f"/{target}")}
        assert names == {
            "indexer_logits/decode",
            "indexer_logits/prefill",
            "indexer_topk/decode",
            "topk_select/select",
            *(f"sparse_mla/{kernel}{latent}" for kernel in ATTENTION for latent in ("", "-nvfp4", "-bf16")),
            *(f"{operator}/{operator.removeprefix('kda_')}" for operator in KDA),
            "moe_experts/decode",
            "moe_experts/prefill",
        }
    assert {case for case in compiled if case.endswith("/v5e")} == {
        "compile/indexer_logits/decode/v5e",
        "compile/indexer_logits/prefill/v5e",
        *(f"compile/{operator}/{operator.removeprefix('kda_')}/v5e" for operator in KDA),
        "compile/moe_experts/decode/v5e",
        "compile/moe_experts/prefill/v5e",
    }
