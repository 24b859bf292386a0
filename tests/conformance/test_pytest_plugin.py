"""The suite as a vendor's CI runs it: an installed pytest plugin, and no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from plugin_package import installed, write

from kimi_hal_conformance.conclusions import UNTESTED
from kimi_hal_conformance.sessions import objections, told
from kimi_hal_conformance.verdict import CRASHED, NOT_RUN, PASSED, REFUSED, Verdict

KERNELS = """
from kimi_hal.reference.backend import build as right


def wrong(ctx):
    reference = right(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        return reference(raw_g, raw_beta, A_log, dt_bias * 0, g_out=g_out, beta_out=beta_out)

    return run
"""
BOTH = 'IMPLEMENTATIONS = (covering("kda_gate", "right"), covering("kda_gate", "wrong"))'
CASE = "kda_gate/odd/rows1"


def pytest_run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the plugin in a folder of its own, which has no settings of this repository."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    junit = folder / "junit.xml"
    options = ["-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    command = [sys.executable, "-m", "pytest", *options, "--pyargs", "kimi_hal_conformance", *arguments]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KIMI_HAL_"))}
    environment = inherited | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done, junit


def test_the_installed_distribution_names_the_plugin() -> None:
    (found,) = entry_points(group="pytest11", name="kimi_hal_conformance")
    assert found.value == "kimi_hal_conformance.pytest_plugin"


def test_without_a_backend_neither_torch_nor_the_suite_is_imported() -> None:
    code = (
        "import sys, kimi_hal_conformance.pytest_plugin; "
        "print({'torch', 'kimi_hal', 'kimi_hal_conformance.suite'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_reference_passes_what_is_selected_and_says_what_is_left_out(tmp_path: Path) -> None:
    selected = "(merge_attn_states and parts1 and float32) or tp1/top2048"
    done, junit = pytest_run(tmp_path, "--kimi-backend", "reference", "-rs", "-k", selected)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kimi-hal: backend reference, native, profile quick" in done.stdout
    assert "not in the quick profile; the standard profile has it" in done.stdout
    tests = list(ET.parse(junit).getroot().iter("testcase"))
    passed = [t.get("name") for t in tests if t.find("skipped") is None]
    assert passed == [
        f"test_case[reference.torch:merge_attn_states/parts1/heads12/dim512/float32/rows{rows}]"
        for rows in (0, 1, 7)
    ]
    assert len(tests) == 4
    assert "warning" not in done.stdout


def test_a_failure_says_its_problems_and_its_replay(tmp_path: Path) -> None:
    write(tmp_path, "gates", BOTH, KERNELS)
    with installed(tmp_path):
        done, junit = pytest_run(tmp_path, "--kimi-backend", "gates", "--kimi-case", CASE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    (failure,) = ET.parse(junit).getroot().iter("failure")
    first, problem, *rest = str(failure.text).splitlines()
    assert first == f"failed: gates.wrong {CASE}"
    assert problem.startswith("g_out: error")
    replay = f"kimi-hal conformance replay {CASE} --backend gates --implementation gates.wrong"
    assert rest[-1] == f"replay: {replay}"


def test_a_call_without_a_backend_says_what_to_type(tmp_path: Path) -> None:
    done, _ = pytest_run(tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "say which backend is to be tried: --kimi-backend NAME" in done.stdout


def test_a_device_that_is_absent_is_not_green(tmp_path: Path) -> None:
    done, _ = pytest_run(tmp_path, "--kimi-backend", "ppu", "-rs")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no device: " in done.stdout
    assert "kimi-hal: nothing passed, so nothing is proven" in done.stdout


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({}, []),
        ({"a x.y": Counter({PASSED: 1, NOT_RUN: 3})}, []),
        ({"a x.y": Counter({NOT_RUN: 3})}, ["nothing passed, so nothing is proven"]),
        ({"a x.y": Counter({PASSED: 2}), "b x.z": Counter({REFUSED: 2})}, [f"b x.z: {UNTESTED}"]),
        ({"a x.y": Counter({PASSED: 2}), "b x.z": Counter({REFUSED: 1})}, []),
        ({"a x.y": Counter({PASSED: 2}), "unnamed x.z": Counter({REFUSED: 2})}, []),
    ],
)
def test_a_run_that_proves_nothing_says_so(statuses: dict[str, Counter[str]], said: list[str]) -> None:
    assert list(objections(statuses, {"a x.y": 2, "b x.z": 2})) == said


def test_what_a_lost_process_printed_stands_in_the_failure() -> None:
    verdict = Verdict(
        case=CASE,
        operator="kda_gate",
        implementation="acme.fast",
        status=CRASHED,
        problems=("the process ended by SIGABRT",),
        output="one\ntwo",
        replay="kimi-hal …",
    )
    assert told(verdict).splitlines() == [
        f"crashed: acme.fast {CASE}",
        "the process ended by SIGABRT",
        "| one",
        "| two",
        "replay: kimi-hal …",
    ]
