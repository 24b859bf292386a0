"""Plugins that exchange the judge or end the suite when they are imported or probed: none comes away with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from plugin_package import installed, write

from kimi_hal.errors import PluginError
from kimi_hal_conformance import plugins, suite
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.integrity import Integrity
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import DOES_NOT_CONFORM, Report
from kimi_hal_conformance.verdict import FAILED

CASE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
#: Three times what is right.
KERNELS = """
from kimi_hal.reference.backend import build


def wrong(ctx):
    right = build(ctx)

    def run(outs, lses, *, out=None, lse_out=None):
        results = right(outs, lses, out=out, lse_out=lse_out)
        results[0].mul_(3)
        return results

    return run
"""
DECLARED = 'IMPLEMENTATIONS = (covering("merge_attn_states", "wrong"),)\n'
#: Where a case is run, and where the report is made.
WORKER = """
import sys
from msgspec.structs import replace

main = sys.modules["__main__"]
if hasattr(main, "run_case"):
    case = main.run_case
    main.run_case = lambda *given: replace(case(*given), status="passed", problems=())
"""
PARENT = """
import sys
from msgspec.structs import replace

if "kimi_hal_conformance.suite" in sys.modules:
    from kimi_hal_conformance import suite

    true = suite.answered

    def answered(*given):
        found, outcome = true(*given)
        return {k: [replace(v, status="passed", problems=()) for v in vs] for k, vs in found.items()}, outcome

    suite.answered = answered
    suite.beyond = lambda *given: ["what nobody tried"]
"""


def judged(folder: Path, name: str, source: str) -> Report:
    """Return the report on a wrong implementation whose plugin does something when it is imported."""
    write(folder, name, DECLARED + source, KERNELS)
    with installed(folder):
        return suite.run(Request(name, only=(CASE,)))


def test_an_honest_wrapper_of_a_function_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, real = Integrity.now(), torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *given, **named: real(self, *given, **named))
    assert judge.problems() == [
        "replaced, although the judge is made of it: torch.Tensor.to (a wrapper that calls it replaces it too). "
        "Nothing is proven"
    ]
    monkeypatch.undo()
    assert judge.problems() == []


def test_a_worker_whose_own_module_is_exchanged_proves_nothing(tmp_path: Path) -> None:
    (found,) = judged(tmp_path, "slyworker", WORKER).verdicts
    assert (found.status, found.problems) == (
        FAILED,
        (
            "replaced, although the judge is made of it: kimi_hal_conformance.worker.run_case. "
            "Nothing is proven",
        ),
    )


def test_a_suite_whose_own_module_is_exchanged_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("answered", "beyond"):
        monkeypatch.setattr(suite, name, getattr(suite, name))  # put back after the test
    report = judged(tmp_path, "slyparent", PARENT)
    assert report.verdict == DOES_NOT_CONFORM
    assert report.could_be_claimed == ()
    ((status, problems),) = [(v.status, v.problems) for v in report.verdicts]
    assert (status, problems) == (
        FAILED,
        (
            "replaced, although the judge is made of it: kimi_hal_conformance.suite.answered, "
            "kimi_hal_conformance.suite.beyond. Nothing is proven",
        ),
    )


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        (
            "leavesearly",
            "import os\nos._exit(0)",
            "importing leavesearly_plugin ended the process with status 0",
        ),
        (
            "leaveslate",
            "def probe():\n    import os\n    os._exit(0)",
            "its probe ended the process with status 0",
        ),
        (
            "falls",
            "def probe():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
            "its probe ended the process by SIGKILL",
        ),
    ],
)
def test_a_plugin_that_ends_its_process_is_an_error_and_not_a_green_run(
    tmp_path: Path, name: str, source: str, problem: str
) -> None:
    write(tmp_path, name, DECLARED + source, KERNELS)
    with installed(tmp_path):
        result = CliRunner().invoke(cli, ["run", "--backend", name])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: plugin {name!r}: {problem}"


def test_a_probe_that_hangs_is_ended_and_shows_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "LIMIT", 2.0)
    write(tmp_path, "waits", DECLARED + "def probe():\n    import time\n    time.sleep(300)", KERNELS)
    began = time.monotonic()
    with installed(tmp_path), pytest.raises(PluginError) as caught:
        plugins.registry("waits")
    lines = str(caught.value).splitlines()
    assert lines[0] == "plugin 'waits': its probe gave no answer within 2 s"
    assert any("waits_plugin.py" in line and "in probe" in line for line in lines)
    assert time.monotonic() - began < 20


def test_what_came_back_once_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    source = f"from pathlib import Path\nwith Path({str(count)!r}).open('a') as f:\n    f.write('x')"
    write(tmp_path, "counts", DECLARED + source, KERNELS)
    with installed(tmp_path):
        plugins.registry("counts")
        assert count.read_text() == "xx"  # in a process of its own, then here
        monkeypatch.setattr(plugins, "Rehearsal", lambda *given: os.abort())
        plugins.registry("counts")
