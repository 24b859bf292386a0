"""The reference keeps its own contract: every case of the quick profile, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conformance_runs import once

from kimi_hal import ops
from kimi_hal_conformance.claims.made import is_made
from kimi_hal_conformance.claims.told import NOT_TRIED
from kimi_hal_conformance.schema import Report, read
from kimi_hal_conformance.verdict import PASSED


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    def run() -> Report:
        path = tmp_path_factory.mktemp("run") / "report.json"
        command = ["-m", "kimi_hal.cli.main", "conformance", "run", "--backend", "reference"]
        done = subprocess.run(
            [sys.executable, *command, "--json", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return read(path.read_bytes())

    return once(tmp_path_factory, "reference", run)


def test_every_case_passes(report: Report) -> None:
    assert [v for v in report.verdicts if v.status not in (PASSED, "not_run")] == []
    assert report.ok


def test_every_operator_was_tried(report: Report) -> None:
    assert {v.operator for v in report.verdicts if v.status == PASSED} == set(ops.OPERATORS)
    assert report.not_implemented == ()


def test_composites_are_tried_whole_and_in_parts(report: Report) -> None:
    for composite in ("dsa_decode", "kda_layer_decode", "moe_layer"):
        names = {v.implementation for v in report.verdicts if v.operator == composite}
        assert names == {"reference.torch", "reference.composed"}


def test_only_what_the_quick_profile_leaves_out_did_not_run(report: Report) -> None:
    left_out = [v for v in report.verdicts if v.status != PASSED and not is_made(v.case)]
    assert {"sparse_mla/tp1/top2048", "sparse_mla/tp2/top2048"} <= {v.case for v in left_out}
    assert {v.problems for v in left_out} == {
        (f"not in the quick profile; the {later} profile has it",) for later in ("standard", "full")
    }


def test_what_is_claimed_and_too_large_for_the_quick_profile_is_named(report: Report) -> None:
    left_out = {v.operator: v for v in report.verdicts if v.case.endswith("/claims/left-out")}
    assert {v.status for v in left_out.values()} == {"not_run"}
    assert {v.problems[0] for v in left_out.values()} == {NOT_TRIED}
    assert any(p.startswith("page=1048576: too large: ") for p in left_out["store_latent"].problems)


def test_every_operator_of_the_reference_has_claims_that_pass(report: Report) -> None:
    tried = {v.operator for v in report.verdicts if is_made(v.case) and v.status == PASSED}
    assert tried == set(ops.OPERATORS)


def test_floating_point_used_its_budget_and_no_more(report: Report) -> None:
    shares = [m.norm for v in report.verdicts for m in v.measures if not m.exact]
    assert max(share for share in shares if share is not None) <= 1
    assert None not in shares


def test_every_verdict_can_be_replayed(report: Report) -> None:
    ran = [v for v in report.verdicts if v.status == PASSED]
    assert all(v.replay.startswith(f"kimi-hal conformance replay {v.case} --backend reference ") for v in ran)
    assert json.loads(json.dumps(report.environment.versions)).keys() >= {
        "kimi-hal",
        "reference",
        "torch",
        "python",
    }
