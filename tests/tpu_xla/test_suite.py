"""The suite over the traced programs, on torch-xla's CPU device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")

from kimi_hal_conformance.schema import read
from kimi_hal_conformance.verdict import PASSED
from kimi_hal_tpu.xla_claims import SPECS

COMMAND = ["-m", "kimi_hal.cli.main", "conformance", "run", "--backend", "tpu", "--execution", "interpreted"]


def run(path: Path, *options: str) -> list[tuple[str, str, str]]:
    done = subprocess.run(
        [sys.executable, *COMMAND, *options, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [(v.case, v.implementation, v.status) for v in read(path.read_bytes()).verdicts]


@pytest.mark.full  # some 700 cases, longer than the part's share
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operator", sorted(SPECS))
def test_the_programs_keep_the_contract(operator: str, tmp_path: Path) -> None:
    options = ("--implementation", "tpu.xla", "--profile", "interp", "--operator", operator)
    verdicts = run(tmp_path / "report.json", *options)  # its exit status is checked there: none fails
    assert any(status == PASSED for _, _, status in verdicts)


@pytest.mark.timeout(600)
def test_composites_are_made_of_the_programs(tmp_path: Path) -> None:
    cases = ("dsa_decode/one-rank", "kda_layer_decode/tp32/rows1", "moe_layer/one-rank/rows9")
    verdicts = run(tmp_path / "report.json", *(word for case in cases for word in ("--case", case)))
    assert {(case, by) for case, by, status in verdicts if status == PASSED} == {
        (case, "tpu.composed") for case in cases
    }
