"""What was run on an H200 and compiled is what is here: kept reports are whole, and of a release's own sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kimi_hal.dispatch.contract import Implementation, Properties
from kimi_hal.dispatch.loader import Loaded, candidates
from kimi_hal.ops import OPERATORS
from kimi_hal_conformance import plugins, schedule, schema
from kimi_hal_conformance.resume import read
from kimi_hal_conformance.schema import Report
from kimi_hal_nvidia.adapters.claims import ADAPTERS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LOADED: Loaded = plugins.registry("nvidia").get("nvidia")
EVERY = [i for operator in OPERATORS for i in candidates(LOADED, operator)]
#: Made of parts of which this backend lacks some.
PARTLESS = ("kda_layer_decode", "moe_layer")
#: Of whose devices one was here.
TRIED = [i for i in ADAPTERS if not i.not_run]
RUN = [i for i in EVERY if "native" in i.execution and i not in ADAPTERS and i.operator not in PARTLESS]
FILES = {
    "deepgemm": "conformance_deepgemm",
    "flashmla": "conformance_flashmla",
    "vllm": "conformance_vllm_topk",
    "flashinfer": "conformance_flashinfer_topk",
}
#: Why a case stands in a whole report without a verdict.
REASONS = re.compile(
    r"not in the standard profile; |it is compiled only; |it runs interpreted; |\S+ is not installed; it needs |"
    r"nvidia does not implement its parts: |claimed, but not tried in this profile; "
)


@pytest.fixture(scope="module")
def device() -> Report:
    return read(RESULTS / "h200_conformance_nvidia.json")


@pytest.fixture(scope="module")
def code() -> Report:
    return read(RESULTS / "compile_nvidia.json")


def found(report: Report, operator: str, name: str) -> schema.Tested:
    return next(t for t in report.implementations if (t.operator, t.name) == (operator, f"nvidia.{name}"))


def test_the_suite_ran_to_its_end_on_the_device(device: Report) -> None:
    about = device.environment
    assert (device.verdict, about.execution, about.profile) == ("conforms", "native", "standard")
    assert not about.limited_to
    assert not device.waivers
    assert "NVIDIA H200" in about.devices[0]
    waiting = [v for v in device.verdicts if v.status == "not_run"]
    assert [v.case for v in waiting if not any(map(REASONS.match, v.problems))] == []


@pytest.mark.parametrize("kernel", [pytest.param(i, id=f"{i.operator}-{i.name}") for i in RUN])
def test_a_kernel_that_may_run_was_run(device: Report, kernel: Implementation) -> None:
    tested = found(device, kernel.operator, kernel.name)
    assert tested.passed
    assert not tested.failed
    assert tested.level >= (3 if kernel.operator in ("topk_merge", "all_gather") else 4)


def test_who_says_that_it_was_not_run_is_for_another_device_than_the_suite_ran_on() -> None:
    never = [i for i in EVERY if i.not_run]
    assert never
    assert not {arch for i in never for c in i.capabilities for arch in c.arch} & {"sm_90", "*"}
    assert not any(c.properties != Properties() for i in never for c in i.capabilities)


@pytest.mark.parametrize("kernel", [pytest.param(i, id=i.name) for i in TRIED])
def test_an_adapter_was_run(kernel: Implementation) -> None:
    report = read(RESULTS / "h200" / f"{FILES[kernel.name]}.json")
    assert report.verdict == "conforms"
    assert found(report, kernel.operator, kernel.name).passed


@pytest.mark.parametrize(
    "kernel", [pytest.param(i, id=f"{i.operator}-{i.name}") for i in EVERY if i.compile is not None]
)
def test_a_kernel_was_compiled(code: Report, kernel: Implementation) -> None:
    tested = found(code, kernel.operator, kernel.name)
    assert tested.passed
    assert not tested.failed


@pytest.mark.full
def test_a_release_is_what_was_run_and_compiled(device: Report, code: Report) -> None:
    """Who changes a kernel runs the suite on a device again (``--resume`` keeps the other verdicts), and compiles."""
    adapters = [read(RESULTS / "h200" / f"{name}.json") for name in FILES.values()]
    now = {
        (r.operator, r.implementation): r.source_hash for r in (schedule.on_record(i, LOADED) for i in EVERY)
    }
    changed = [
        f"{t.name} of {t.operator}"
        for report in (device, code, *adapters)
        for t in report.implementations
        if t.passed and now[t.operator, t.name] != t.source_hash
    ]
    assert not changed
