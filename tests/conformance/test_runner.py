"""What becomes of implementations that misbehave: a verdict with a sentence, and the run goes on.

One plugin with one implementation a misdeed, as a vendor would install it, run once on one case.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import lane, suite
from kimi_hal_conformance import report as output
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import CRASHED, FAILED, HUNG, NOT_RUN, PASSED, REFUSED, Verdict

CASE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
OTHERS = [
    f"merge_attn_states/parts3/heads5/dim130/{dtype}/rows{n}"
    for dtype in ("bfloat16", "float32")
    for n in (1, 7)
]

IMPLEMENTATIONS = """
FAULTS = (
    "right prints aborts segfaults exits leaves hangs raises build_raises misses other_signature ignores_out "
    "view wrong_dtype wrong_device wrong_shape one_result a_list no_tensor "
    "past_end before_start modifies forgets fragile brittle"
).split()
IMPLEMENTATIONS = (
    *(covering("merge_attn_states", name) for name in FAULTS),
    covering(
        "merge_attn_states",
        "narrow",
        capabilities=(Capability(("*",), {"num_heads": Range(1, 4), "parts": OneOf((2,))}),),
    ),
    covering("merge_attn_states", "elsewhere", capabilities=(Capability(("acme9",), {}),)),
)
"""

KERNELS = """
import ctypes, os, sys, time
import torch
from kimi_hal.reference.backend import build as reference


def fault(act):
    def build(ctx):
        right = reference(ctx)

        def run(outs, lses, *, out=None, lse_out=None):
            return act(right, outs, lses, out, lse_out)

        return run

    return build


def call(right, outs, lses, out, lse_out):
    return right(outs, lses, out=out, lse_out=lse_out)


@fault
def prints(right, *operands):
    print('{"type": "Done"}', flush=True)
    os.write(2, b"noise without an end")
    return call(right, *operands)


@fault
def aborts(right, *operands):
    print("about to abort", flush=True)
    os.abort()


@fault
def segfaults(right, *operands):
    ctypes.string_at(0)


@fault
def exits(right, *operands):
    os._exit(3)


@fault
def leaves(right, *operands):
    sys.exit(5)


@fault
def hangs(right, *operands):
    while True:
        time.sleep(0.1)


@fault
def raises(right, *operands):
    raise RuntimeError("launch failed: 719")


def build_raises(ctx):
    raise RuntimeError("no such kernel")


def misses(ctx):
    import acme_runtime


def other_signature(ctx):
    return lambda outs, lses: None


@fault
def ignores_out(right, outs, lses, out, lse_out):
    return right(outs, lses, lse_out=lse_out)


@fault
def view(right, outs, lses, out, lse_out):
    result, lse = call(right, outs, lses, out, lse_out)
    if out is None:
        outs[0].copy_(result)
        return outs[0], lse
    return result, lse


@fault
def wrong_dtype(right, outs, lses, out, lse_out):
    result, lse = call(right, outs, lses, out, lse_out)
    return (result if out is not None else result.double()), lse


@fault
def wrong_device(right, outs, lses, out, lse_out):
    result, lse = call(right, outs, lses, out, lse_out)
    return (result if out is not None else result.to("meta")), lse


@fault
def wrong_shape(right, outs, lses, out, lse_out):
    result, lse = call(right, outs, lses, out, lse_out)
    return result, (lse if lse_out is not None else lse.flatten())


@fault
def one_result(right, *operands):
    return call(right, *operands)[0]


@fault
def a_list(right, *operands):
    return list(call(right, *operands))


@fault
def no_tensor(right, *operands):
    return call(right, *operands)[0], 0.0


@fault
def past_end(right, outs, lses, out, lse_out):
    results = call(right, outs, lses, out, lse_out)
    if out is not None:
        last = sum((n - 1) * stride for n, stride in zip(out.shape, out.stride()))
        out.as_strided((1,), (1,), out.storage_offset() + last + 1).fill_(0.0)
    return results


@fault
def before_start(right, outs, lses, out, lse_out):
    results = call(right, outs, lses, out, lse_out)
    if out is not None:
        lse_out.as_strided((1,), (1,), lse_out.storage_offset() - 1).fill_(0.0)
    return results


@fault
def modifies(right, outs, lses, out, lse_out):
    results = call(right, outs, lses, out, lse_out)
    lses.masked_fill_(lses.isnan(), -torch.inf)
    return results


@fault
def forgets(right, outs, lses, out, lse_out):
    results = right(outs[:, :-1], lses[:, :-1])
    if out is None:
        out, lse_out = (r.new_zeros((7, *r.shape[1:])) for r in results)
    for buffer, result in zip((out, lse_out), results):
        buffer[:-1] = result
    return out, lse_out


@fault
def fragile(right, outs, lses, out, lse_out):
    if outs.shape[1] == 1:
        os.abort()
    return call(right, outs, lses, out, lse_out)


@fault
def brittle(right, outs, lses, out, lse_out):
    if outs.shape[1] == 1:
        os.abort()
    result, lse = call(right, outs, lses, out, lse_out)
    return result.mul_(1.01), lse


right = reference
narrow = elsewhere = reference
"""


@pytest.fixture(scope="module", autouse=True)
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("acme")
    write(folder, "acme", IMPLEMENTATIONS, KERNELS)
    with pytest.MonkeyPatch.context() as patch, installed(folder):
        patch.setattr(lane, "FIRST_CASE", 1.0)
        yield folder


@pytest.fixture(scope="module")
def report(acme: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return once(tmp_path_factory, "acme", lambda: suite.run(Request("acme", only=(CASE,), limit=2.0)))


@pytest.fixture(scope="module")
def verdicts(report: Report) -> dict[str, Verdict]:
    return {v.implementation.partition(".")[2]: v for v in report.verdicts}


def test_every_implementation_has_its_verdict(report: Report) -> None:
    assert len(report.verdicts) == 27
    assert {v.case for v in report.verdicts} == {CASE}
    assert not report.ok


def test_the_report_says_who_was_tested_and_where(report: Report) -> None:
    assert report.environment.devices == ("The acme one",)
    assert report.environment.versions["acme"] == "1.0"
    assert report.environment.versions["acme-driver"] == "5.1"
    assert {"kimi-hal", "torch", "python"} <= report.environment.versions.keys()
    assert "sparse_mla" in report.not_implemented
    assert "merge_attn_states" not in report.not_implemented
    assert report.environment.profile == "cases"
    assert len(report.implementations) == 27
    assert report.implementations[0].version == "1.0"
    assert len(report.implementations[0].source_hash) == 64


@pytest.mark.parametrize("name", ["right", "prints", "fragile"])
def test_a_right_implementation_passes(verdicts: dict[str, Verdict], name: str) -> None:
    assert verdicts[name].status == PASSED
    assert verdicts[name].problems == ()
    assert [m.tensor for m in verdicts[name].measures] == ["out", "lse_out"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("aborts", "the process ended by SIGABRT"),
        ("segfaults", "the process ended by SIGSEGV"),
        ("exits", "the process ended with status 3"),
    ],
)
def test_a_process_that_dies_is_a_crash(verdicts: dict[str, Verdict], name: str, problem: str) -> None:
    assert verdicts[name].status == CRASHED
    assert verdicts[name].problems == (problem,)


def test_a_crash_shows_what_was_printed_and_where_it_was(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["aborts"].output.startswith("about to abort\nFatal Python error: Aborted")
    assert "in aborts" in verdicts["aborts"].output
    assert "in segfaults" in verdicts["segfaults"].output


@pytest.mark.parametrize("name", ["aborts", "segfaults", "hangs"])
def test_the_terminal_shows_where_a_process_died(verdicts: dict[str, Verdict], name: str) -> None:
    shown = output.shown(verdicts[name].output)
    fatal = next(i for i, line in enumerate(shown) if line.startswith("Fatal Python error: "))
    assert shown[fatal + 1].startswith("Current thread ")
    assert f" in {name}" in "".join(shown[fatal + 2 : fatal + 5]), shown
    assert len(shown) == output.SHOWN
    assert not any(line.startswith("Extension modules") for line in shown)


def test_a_hang_is_ended_and_shows_its_stack(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["hangs"].status == HUNG
    assert verdicts["hangs"].problems == (
        "no answer within 2 s, and 1 s more for the first case of a process",
    )
    assert "in hangs" in verdicts["hangs"].output


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("leaves", ("SystemExit: 5",)),
        ("raises", ("RuntimeError: launch failed: 719",)),
        (
            "build_raises",
            (
                "PluginError: plugin 'acme': acme_kernels:build_raises raised RuntimeError: no such kernel. "
                "KIMI_HAL_OPS=merge_attn_states=<another> takes another implementation.",
            ),
        ),
        ("one_result", ("the call returned a Tensor, expected a tuple of 2 (out, lse_out)",)),
        ("a_list", ("the call returned a list of 2, expected a tuple of 2 (out, lse_out)",)),
        ("no_tensor", ("lse_out is a float, not a tensor",)),
        ("ignores_out", ("out was given, but another tensor was returned",)),
        (
            "wrong_dtype",
            ("without out=, it is float64 [7, 5, 130] on cpu, expected float32 [7, 5, 130] on cpu",),
        ),
        (
            "wrong_device",
            ("without out=, it is float32 [7, 5, 130] on meta, expected float32 [7, 5, 130] on cpu",),
        ),
        ("wrong_shape", ("without lse_out=, it is float32 [35] on cpu, expected float32 [7, 5] on cpu",)),
        ("view", ("without out=, it shares memory with outs", "outs was modified")),
        ("past_end", ("memory around out was written",)),
        ("before_start", ("memory around lse_out was written",)),
        ("modifies", ("lses was modified",)),
    ],
)
def test_a_misdeed_is_said_in_a_sentence(
    verdicts: dict[str, Verdict], name: str, problems: tuple[str, ...]
) -> None:
    assert verdicts[name].status == FAILED
    assert verdicts[name].problems == problems


def test_a_library_that_is_missing_is_named(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["misses"].status == FAILED
    assert "No module named 'acme_runtime'" in verdicts["misses"].problems[0]


def test_a_function_of_another_signature_is_refused_by_name(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["other_signature"].status == FAILED
    assert (
        "returned a function that is not merge_attn_states(outs, lses"
        in verdicts["other_signature"].problems[0]
    )


def test_an_output_that_nobody_wrote_shows(verdicts: dict[str, Verdict]) -> None:
    out, lse = verdicts["forgets"].problems[:2]
    assert out == "out: NaN at 650 entries, expected at 0; first difference at [6, 0, 0]"
    assert lse == "lse_out: NaN at 5 entries, expected at 0; first difference at [6, 0]"
    assert verdicts["forgets"].measures[0].norm is None


def test_what_is_not_claimed_is_refused_with_every_reason(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["narrow"].status == REFUSED
    assert verdicts["narrow"].problems == (
        "acme.narrow: parts=3 is not 2",
        "acme.narrow: num_heads=5 is not 1 to 4",
        "acme.narrow: dim=130 is not covered, only its default 512",
        "acme.narrow: dtype='float32' is not covered, only its default 'bfloat16'",
        "acme.narrow: return_lse=True is not covered, only its default False",
    )


def test_a_verdict_is_replayed_by_its_command(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["aborts"].replay == (
        f"kimi-hal conformance replay {CASE} --backend acme --implementation acme.aborts"
    )


def test_a_failure_is_cut_down_to_a_row_and_what_is_lost_is_not(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["ignores_out"].smallest == f"{CASE}, row 0 of 7"
    assert verdicts["ignores_out"].input == "outs float32[3, 1, 5, 130], lses float32[3, 1, 5]"
    assert verdicts["aborts"].smallest == CASE
    assert verdicts["aborts"].input == "the whole case: what ends its process is not cut down"
    assert (verdicts["right"].smallest, verdicts["right"].input) == ("", "")


def test_a_part_that_ends_the_process_leaves_the_verdict_and_the_next_case() -> None:
    found = suite.run(Request("acme", only=[CASE, OTHERS[2]], implementation="acme.brittle"))
    assert [v.status for v in found.verdicts] == [FAILED, CRASHED]
    assert found.verdicts[0].input == ("the whole case: the process that looked for a smaller one was lost")


def test_the_run_goes_on_after_a_crash() -> None:
    found = suite.run(Request("acme", only=OTHERS, implementation="acme.fragile", seed=7))
    assert [v.status for v in found.verdicts] == [CRASHED, PASSED, CRASHED, PASSED]
    assert [v.case for v in found.verdicts] == OTHERS
    assert found.verdicts[0].replay.endswith("--seed 7")


def test_after_three_lost_cases_the_rest_is_not_tried() -> None:
    fifth = "merge_attn_states/parts3/heads5/dim130/float32/rows0"
    found = suite.run(Request("acme", only=[*OTHERS, fifth], implementation="acme.exits"))
    assert [v.status for v in found.verdicts] == [CRASHED, CRASHED, CRASHED, NOT_RUN, NOT_RUN]
    assert found.verdicts[3].problems == ("not tried: the 3 cases before it were lost",)


def test_an_implementation_that_refuses_every_case_does_not_conform() -> None:
    found = suite.run(Request("acme", profile="interp", implementation="acme.elsewhere"))
    last = found.verdicts[-1]
    assert (last.case, last.status) == ("merge_attn_states/*", FAILED)
    assert last.problems == (
        "it refuses every case: what it claims is not tested, and no claim stands without a test",
    )
    assert not found.ok


def test_device_hooks_that_raise_fail_every_case(tmp_path: Path) -> None:
    kernels = KERNELS + "\n\nclass Device:\n    def __init__(self):\n        raise OSError('no driver')\n"
    one = 'IMPLEMENTATIONS = (covering("merge_attn_states", "right"),)'
    write(tmp_path, "hookless", one, kernels, device="hookless_kernels:Device")
    with installed(tmp_path):
        found = suite.run(Request("hookless", only=OTHERS[:2]))
    problem = "the device hooks hookless_kernels:Device raised OSError: no driver"
    assert [(v.status, v.problems) for v in found.verdicts] == [(FAILED, (problem,))] * 2


def test_a_case_that_leaves_the_device_unusable_is_its_processs_last(tmp_path: Path) -> None:
    kernels = """
from kimi_hal.dispatch.device import HostDevice
from kimi_hal.reference.backend import build

broken = False


class Device(HostDevice):
    def synchronize(self):
        if broken:
            raise RuntimeError("illegal address")


def breaks(ctx):
    right = build(ctx)

    def run(outs, lses, *, out=None, lse_out=None):
        global broken
        broken = broken or outs.shape[1] == 7
        return right(outs, lses, out=out, lse_out=lse_out)

    return run
"""
    one = 'IMPLEMENTATIONS = (covering("merge_attn_states", "breaks"),)'
    write(tmp_path, "breaking", one, kernels, device="breaking_kernels:Device")
    cases = [f"merge_attn_states/parts1/heads12/dim512/bfloat16/rows{rows}" for rows in (7, 1)]
    with installed(tmp_path):
        found = suite.run(Request("breaking", only=cases))
    bad, good = found.verdicts
    assert (bad.status, bad.problems) == (FAILED, ("RuntimeError: illegal address",))
    assert bad.input == "the whole case: it left the device unusable, and the process ended"
    assert good.status == PASSED
