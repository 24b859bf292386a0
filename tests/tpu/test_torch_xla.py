"""What is claimed of the Pallas kernels through torch-xla is what its own libtpu compiled."""

from __future__ import annotations

import json
from pathlib import Path

from kimi_hal_tpu import requirements
from kimi_hal_tpu.pallas_claims import BY_TORCH_XLA, KNOWN_TO_TORCH_XLA, PALLAS, TORCH_XLA

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_torch_xla.json"


def test_operators_and_generations_are_those_that_were_compiled() -> None:
    figures = json.loads(RESULTS.read_text())["figures"]
    compiled: dict[str, set[str]] = {}
    for kernel, targets in figures["compiled"].items():
        made = {name for name, found in targets.items() if found.get("kernels")}
        operator = kernel.partition("/")[0]
        compiled[operator] = compiled.get(operator, made) & made
    assert {operator for operator, targets in compiled.items() if targets} == BY_TORCH_XLA
    assert {frozenset(compiled[operator]) for operator in BY_TORCH_XLA} == {frozenset(KNOWN_TO_TORCH_XLA)}
    requirements.check_custom_call(*(figures["versions"][name] for name in ("torch_xla", "jax", "libtpu")))


def test_claims_for_torch_xla_are_of_these_alone() -> None:
    found = {i.operator: c.arch for i in PALLAS for c in i.capabilities if c.requires is TORCH_XLA}
    assert found == dict.fromkeys(BY_TORCH_XLA, KNOWN_TO_TORCH_XLA)
