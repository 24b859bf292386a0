"""Implementations that lie to the suite or change the process that it shares with them: none may pass.

One plugin with one implementation a misdeed, run once on one case.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import schema, suite, waivers
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import CRASHED, FAILED, PASSED, Verdict

CASE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
DOWNWARD = {"x86_64": 0x400, "aarch64": 0x800000}[platform.machine()]  # of C's fesetround
MARK = "299.25"  # the seconds for which a process that is left behind sleeps

KERNELS = f"""
import ctypes, gc, logging, os, random, signal, subprocess, tempfile
import torch
from kimi_hal.reference.backend import build as reference


def fault(act):
    def build(ctx):
        right = reference(ctx)

        def run(outs, lses, *, out=None, lse_out=None):
            results = right(outs, lses, out=out, lse_out=lse_out)
            return act(*results, out is not None) or results

        return run

    return build


class Agreeable(torch.Tensor):
    pass


@fault
def right(out, lse, given):
    pass


@fault
def subclass(out, lse, given):
    return (out, lse) if given else ((out * 3).as_subclass(Agreeable), lse)


@fault
def becomes_a_subclass(out, lse, given):
    out.__class__ = Agreeable if given else torch.Tensor


@fault
def exchanges_memory(out, lse, given):
    out.data = out.clone()


@fault
def graph(out, lse, given):
    return (out, lse) if given else (out.requires_grad_(), lse)


@fault
def sparse_layout(out, lse, given):
    return (out, lse) if given else (out.to_sparse(), lse)


@fault
def dtype(out, lse, given):
    torch.set_default_dtype(torch.float64)


@fault
def subnormals(out, lse, given):
    torch.set_flush_denormal(True)


@fault
def products(out, lse, given):
    torch.set_float32_matmul_precision("medium")


@fault
def threads(out, lse, given):
    torch.set_num_threads(torch.get_num_threads() + 1)


@fault
def folder(out, lse, given):
    os.chdir("/")


@fault
def alarms(out, lse, given):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@fault
def autocast(out, lse, given):
    torch.set_autocast_enabled("cpu", True)
    out.mul_(1.01)  # which a judge in bfloat16 would let pass


@fault
def rounding(out, lse, given):
    ctypes.CDLL(None).fesetround({DOWNWARD})


@fault
def draws(out, lse, given):
    torch.rand(1)


@fault
def python_draws(out, lse, given):
    random.random()


@fault
def garbage(out, lse, given):
    gc.disable()


@fault
def silence(out, lse, given):
    logging.disable()


@fault
def judge(out, lse, given):
    from kimi_hal_conformance import judges
    from kimi_hal_conformance.verdict import Measure

    judges.compare = lambda name, *rest, **more: Measure(tensor=name, exact=False)
    out.mul_(2)


@fault
def budget(out, lse, given):
    from kimi_hal_conformance import budget

    budget.ROUNDING_NORM = budget.ROUNDING_MAX = 1e9
    out.mul_(1.01)


@fault
def code(out, lse, given):
    from kimi_hal.reference import selection

    own = (f for f in vars(selection).values() if getattr(f, "__module__", "") == selection.__name__)
    function = next(f for f in own if hasattr(f, "__code__"))
    function.__defaults__ = (*(function.__defaults__ or ()), None)


@fault
def torch_itself(out, lse, given):
    torch.isnan = lambda x: torch.zeros(x.shape, dtype=torch.bool)


@fault
def comes_back_twice(out, lse, given):
    os.fork()


@fault
def leaves_a_process(out, lse, given):
    subprocess.Popen(["sleep", "{MARK}"])


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")


@fault
def unprintable(out, lse, given):
    raise Unprintable


@fault
def no_text(out, lse, given):
    raise RuntimeError("\\udc80 \\x1b[31m")


@fault
def long_text(out, lse, given):
    raise RuntimeError("y" * 20_000_000)


@fault
def circular(out, lse, given):
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@fault
def interrupts(out, lse, given):
    raise KeyboardInterrupt
"""
NAMES = [line[4 : line.index("(")] for line in KERNELS.splitlines() if line.endswith("(out, lse, given):")]


@pytest.fixture(scope="module", autouse=True)
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("liar")
    declared = f"IMPLEMENTATIONS = tuple(covering('merge_attn_states', name) for name in {NAMES!r})"
    write(folder, "liar", declared, KERNELS)
    with installed(folder):
        yield folder


@pytest.fixture(scope="module")
def verdicts(liar: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    report: Report = once(tmp_path_factory, "liar", lambda: suite.run(Request("liar", only=(CASE,))))
    return {v.implementation.partition(".")[2]: v for v in report.verdicts}


def test_a_right_one_passes(verdicts: dict[str, Verdict]) -> None:
    assert (verdicts["right"].status, verdicts["right"].problems) == (PASSED, ())


OTHER_MEMORY = "out was given other memory or another form: a call writes where its caller's buffer is"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("subclass", "out is of the class Agreeable, which answers for itself: expected a plain tensor"),
        ("becomes_a_subclass", OTHER_MEMORY),
        ("exchanges_memory", OTHER_MEMORY),
        ("graph", "without out=, it requires grad: no gradient is part of the contract"),
        ("sparse_layout", "without out=, its layout is torch.sparse_coo, expected torch.strided"),
    ],
)
def test_a_result_that_is_not_what_it_seems_fails(
    verdicts: dict[str, Verdict], name: str, problem: str
) -> None:
    assert verdicts[name].status == FAILED
    assert problem in verdicts[name].problems


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("dtype", "the call changed torch's default dtype: torch.float32 before, torch.float64 after"),
        ("subnormals", "the call changed how this thread rounds subnormals: kept before, flushed after"),
        ("products", "the call changed torch's precision of float32 products: highest before, medium after"),
        ("alarms", "the call changed the handler of SIGALRM: SIG_DFL before, SIG_IGN after"),
        ("rounding", "the call changed how this thread rounds: to nearest before, up, down or to zero after"),
        ("draws", "the call changed the state of torch's default generator"),
        ("python_draws", "the call changed the state of Python's default generator"),
        ("garbage", "the call changed Python's garbage collection: on before, off after"),
        ("silence", "the call changed what logging leaves out: 0 before, 50 after"),
    ],
)
def test_a_call_that_changes_its_process_fails(verdicts: dict[str, Verdict], name: str, problem: str) -> None:
    assert verdicts[name].status == FAILED
    assert verdicts[name].problems == (problem,)


def test_a_judge_computes_with_settings_of_its_own(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["autocast"]
    assert found.status == FAILED
    assert found.problems[0] == "the call changed autocast on cpu: off before, on after"
    assert found.problems[1].startswith("out: error ")


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("threads", "the call changed torch's number of threads: "),
        ("folder", "the call changed the working folder: "),
    ],
)
def test_what_it_changed_is_named(verdicts: dict[str, Verdict], name: str, start: str) -> None:
    assert verdicts[name].status == FAILED
    (problem,) = verdicts[name].problems
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("judge", "kimi_hal_conformance.judges.compare"),
        ("budget", "kimi_hal_conformance.budget.ROUNDING_MAX"),
        ("code", "kimi_hal.reference.selection."),
        ("torch_itself", "torch.isnan"),
    ],
)
def test_a_judge_that_was_exchanged_proves_nothing(
    verdicts: dict[str, Verdict], name: str, part: str
) -> None:
    assert verdicts[name].status == FAILED
    (problem,) = verdicts[name].problems
    assert problem.startswith("replaced, although the judge is made of it: ")
    assert part in problem
    assert problem.endswith("Nothing is proven")


def test_a_copy_of_the_process_says_nothing(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["comes_back_twice"].status == PASSED


def test_what_a_call_started_ends_with_its_batch(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["leaves_a_process"].status == PASSED
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {MARK}" not in running


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("unprintable", "Unprintable: its own message raised ValueError"),
        ("no_text", "RuntimeError: \\udc80 \\x1b[31m"),
        ("long_text", f"RuntimeError: {'y' * 2000} … (20000000 characters)"),
        ("circular", "RuntimeError: first (from RuntimeError: second)"),
    ],
)
def test_an_exception_that_cannot_be_printed_has_its_sentence(
    verdicts: dict[str, Verdict], name: str, problem: str
) -> None:
    assert verdicts[name].status == FAILED
    assert verdicts[name].problems == (problem,)


def test_what_a_call_interrupts_is_its_own_process(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["interrupts"].status == CRASHED
    assert verdicts["interrupts"].output.endswith("KeyboardInterrupt")


def asked(*arguments: str) -> tuple[int, str]:
    """Return status and last line of a run that is refused."""
    result = CliRunner().invoke(cli, ["run", "--backend", "reference", *arguments])
    return result.exit_code, result.output.strip().splitlines()[-1]


@pytest.mark.parametrize("limit", ["nan", "inf", "1e9", "0"])
def test_a_limit_that_is_no_time_is_refused(limit: str) -> None:
    said = f"Error: Invalid value for '--limit': {float(limit)} is not in the range 0<x<=604800."
    assert asked("--limit", limit) == (2, said)


@pytest.mark.parametrize("option", ["--json", "--junitxml", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, option: str) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere" / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused = "Error: cannot write {}: {}".format
    gone, loop = tmp_path / "gone", tmp_path / "loop"
    assert asked(option, str(gone)) == (2, refused(gone, "No such file or directory"))
    assert asked(option, str(loop)) == (2, refused(loop, "Too many levels of symbolic links"))


def test_one_file_for_two_purposes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "report")
    said = f"Error: --json and --html are one file, {tmp_path / 'link'}: name two"
    assert asked("--json", str(tmp_path / "report"), "--html", str(tmp_path / "link")) == (2, said)
    assert not (tmp_path / "report").exists()


def test_files_that_are_nested_without_end_are_a_sentence(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"^this is no report: it is nested without end$"):
        schema.read(deep.read_bytes())
    deep.write_text(f"waiver = {'[' * 100_000}")
    with pytest.raises(waivers.WaiverError, match=r"deep is no TOML: it is nested without end$"):
        waivers.read(deep)


def test_waivers_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbfwaiver = []\r\n")
    assert waivers.read(tmp_path / "w.toml") == ()
