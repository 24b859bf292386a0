"""Which compute unit of a TPU does what: said for each operator and generation, and printed by ``explain``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kimi_hal_tpu.claims import SPARSE_CORES, TPUS
from kimi_hal_tpu.implementations import IMPLEMENTATIONS
from kimi_hal_tpu.pallas_claims import ON_SPARSE_CORE
from kimi_hal_tpu.xla_claims import INTERPRETED

UNITS = {"TensorCore", "SparseCore", "XLA"}


def explained(operator: str, *options: str) -> str:
    env = os.environ | {"KIMI_HAL_BACKEND": "tpu", "KIMI_HAL_EXECUTION": "interpreted"}
    command = [sys.executable, "-m", "kimi_hal.cli.main", "explain", operator, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode in (0, 1), (
        done.stderr
    )  # 1: nothing fits where neither jax nor torch-xla is installed
    return done.stdout


@pytest.mark.parametrize("item", IMPLEMENTATIONS, ids=lambda item: f"{item.name}-{item.operator}")
def test_every_generation_that_is_claimed_has_a_split_into_known_units(item) -> None:
    claimed = {arch for capability in item.capabilities for arch in capability.arch} - set(INTERPRETED)
    said = {arch: split.parts for split in item.split for arch in split.arch}
    assert set(said) == claimed
    assert all(parts and set(parts) <= UNITS for parts in said.values())


@pytest.mark.parametrize("item", IMPLEMENTATIONS, ids=lambda item: f"{item.name}-{item.operator}")
def test_sparse_core_has_a_part_where_there_is_one_and_a_kernel_needs_it(item) -> None:
    using = {arch for split in item.split for arch in split.arch if "SparseCore" in split.parts}
    expected = SPARSE_CORES if item.name == "pallas" and item.operator in ON_SPARSE_CORE else ()
    assert using == set(expected)


def test_explain_says_who_gathers_and_who_attends_on_each_generation() -> None:
    split = {c["full_name"]: c["split"] for c in json.loads(explained("sparse_mla", "--json"))["candidates"]}
    assert set(split["tpu.pallas"]) == {"v5p", "v6e", "tpu7x"}
    assert split["tpu.pallas"]["tpu7x"] == {
        "SparseCore": "gathers the selected latents, packed as they are",
        "TensorCore": "unpacks and attends",
        "XLA": "turns positions into slots",
    }
    assert split["tpu.xla"] == {arch: {"XLA": "compiles all of it for TensorCore"} for arch in TPUS}


def test_explain_prints_the_split_below_its_implementation() -> None:
    text = explained("topk_select")
    pallas = text[text.index("  tpu.pallas: ") :].splitlines()
    assert (
        pallas[1] == "    on v5p, v6e, tpu7x: SparseCore selects the top k; XLA fetches the selected scores"
    )
    assert "    on v5e, v5p, v6e, tpu7x: XLA compiles all of it for TensorCore" in text
