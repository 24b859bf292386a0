"""Checkpoints: where a plan can store a state on the way, and who says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.verdict import NOT_RUN, PASSED, Verdict

IMPLEMENTATIONS = """
IMPLEMENTATIONS = tuple(
    Implementation(
        operator,
        "blocks",
        build="blocky_kernels:build",
        capabilities=tuple(
            Capability(("*",), covered, checkpoint_multiple=64) for covered in coverage(get(operator).spec_type)
        ),
    )
    for operator in ("kda_prefill", "kda_conv")
)
"""
KERNELS = "from kimi_hal.reference.backend import build\n"


def verdicts(folder: Path, operator: str) -> dict[str, Verdict]:
    write(folder, "blocky", IMPLEMENTATIONS, KERNELS)
    only = tuple(f"{operator}/small/checkpoints{more}" for more in ("", "-of-blocks"))
    with installed(folder):
        return {v.case: v for v in suite.run(Request("blocky", only=only)).verdicts}


@pytest.mark.parametrize("operator", ["kda_prefill", "kda_conv"])
def test_a_plan_stores_states_at_multiples_of_its_own_alone(tmp_path: Path, operator: str) -> None:
    found = verdicts(tmp_path, operator)
    between, borders = (
        found[f"{operator}/small/checkpoints"],
        found[f"{operator}/small/checkpoints-of-blocks"],
    )
    assert (borders.status, borders.problems) == (PASSED, ())
    assert between.status == NOT_RUN
    stored = {"kda_prefill": "16", "kda_conv": "2, 16"}[operator]
    assert between.problems == (
        f"it stores states after {stored} rows; the plan can only at multiples of 64",
    )
