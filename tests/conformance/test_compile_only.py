"""Compile-only mode: kernels are compiled by a plugin's own compiler, each judged by its code, and the run goes on.

The plugin's compiler is a fake, so that every outcome can be had: nothing here needs a toolchain.
"""

from __future__ import annotations

import io
import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plugin_package import installed, write
from rich.console import Console

from kimi_hal.errors import UnknownNameError
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.compiling import table
from kimi_hal_conformance.compiling.run import OF_PARTS, OWN_CODE, CompileRequest, run
from kimi_hal_conformance.report import print_report
from kimi_hal_conformance.schema import Report, read
from kimi_hal_conformance.verdict import CRASHED, FAILED, HUNG, NOT_RUN, PASSED, Verdict

IMPLEMENTATIONS = """
from dataclasses import replace
from kimi_hal.dispatch.contract import Target

PLAIN = (kimi_hal_backend,)


@hookimpl
def kimi_hal_backend():
    targets = (Target("a1x", "a1"), Target("b1", "a2", code="b1_code", stand_in="stands for a2: not its code"))
    return replace(PLAIN[0](), targets=targets)


def compiled(operator, name, function, arch=("a1", "a2")):
    capabilities = tuple(Capability(arch, covered) for covered in coverage(get(operator).spec_type))
    return covering(operator, name, capabilities=capabilities, compile=f"forge_kernels:{function}")


IMPLEMENTATIONS = (
    compiled("merge_attn_states", "fast", "merge"),
    compiled("kda_gate", "narrow", "right", arch=("a1",)),
    covering("kda_decode", "torch"),
    compiled("topk_select", "lists_nothing", "nothing"),
    compiled("topk_select", "raises", "raises"),
    compiled("topk_select", "misses_a_module", "misses_a_module"),
    compiled("topk_select", "misses_its_own", "misses_its_own"),
    compiled("topk_select", "twice", "twice"),
    compiled("topk_select", "exits", "exits"),
    compiled("store_latent", "old", "too_old"),
    compiled("topk_select", "half_seen", "half_seen"),
    compiled("topk_select", "lost", "lost"),
)
"""

KERNELS = """
import os, time
from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel
from kimi_hal.errors import ToolMissingError

MULTIPLY = Instruction(r"mul\\.wide", "products are exact")
DIVIDE = Instruction(r"div\\.approx", "an approximate quotient is wrong")


def kernel(name, target, opcodes=("mul.wide.f32", "add"), spilled=0, admitted=0, code="", **fields):
    def compile():
        print("compiling", name)
        return Compiled(code or target.named, 2048, opcodes, registers=64, spilled=spilled, shared=512, **fields)

    return Kernel(name, compile, (MULTIPLY,), (DIVIDE,), admitted)


def acting(name, act):
    return Kernel(name, act)


def fail():
    raise RuntimeError("PassManager::run failed")


def unprintable():
    raise RuntimeError("\\x1b[2J\\udc80")


def merge(target):
    return [
        kernel("good", target, further={"sgpr_count": 12}),
        kernel("no_product", target, ("add",)),
        kernel("divides", target, ("mul.wide.f32", "div.approx.f32")),
        kernel("spills", target, spilled=16),
        kernel("spills_a_little", target, spilled=16, admitted=16),
        kernel("other_code", target, code="c9"),
        acting("raises", fail),
        acting("unprintable", unprintable),
        acting("aborts", os.abort),
        acting("hangs", lambda: time.sleep(60)),
        kernel("last", target),
    ]


def right(target):
    assert os.environ.get("TRITON_INTERPRET") is None and os.environ["TRITON_CACHE_DIR"]
    return (kernel("only", target),)


def nothing(target):
    return ()


def raises(target):
    raise ValueError("no such mode")


def misses_a_module(target):
    import compiler_that_nobody_has


def misses_its_own(target):
    import forge_kernels.parts


def twice(target):
    return (kernel("same", target), kernel("same", target), kernel("Not ours", target))


def exits(target):
    raise SystemExit(0)


def too_old(target):
    def compile():
        raise ToolMissingError("forgec 1.2 is too old for a1: install forgec 2")

    return (acting("plain", compile),)


def half_seen(target):
    return (kernel("plain", target, unknown=("forgedump is missing: registers are not known",)),)


def lost(target):
    return [acting(f"aborts{n}", os.abort) for n in range(5)]
"""
TOO_OLD = "forgec 1.2 is too old for a1: install forgec 2"


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("forge")
    write(folder, "forge", IMPLEMENTATIONS, KERNELS)
    with installed(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def report(forge: None) -> Report:
    return run(CompileRequest("forge", targets=("a1x",), limit=5.0, lanes=2))


def found(report: Report, case: str, implementation: str = "") -> Verdict:
    mine = [v for v in report.verdicts if v.case == case and implementation in ("", v.implementation)]
    assert len(mine) == 1, [v.case for v in report.verdicts]
    return mine[0]


def merge(report: Report, kernel: str) -> Verdict:
    return found(report, f"compile/merge_attn_states/{kernel}/a1x")


def selection(report: Report, name: str, kernel: str = "*") -> Verdict:
    return found(report, f"compile/topk_select/{kernel}/a1x", f"forge.{name}")


def test_a_kernel_with_all_that_it_should_hold_passes_with_its_figures(report: Report) -> None:
    verdict = merge(report, "good")
    assert (verdict.status, verdict.problems) == (PASSED, ())
    code = verdict.code
    assert code is not None
    assert (code.target, code.size, code.registers, code.spilled, code.shared) == ("a1x", 2048, 64, 0, 512)
    assert code.further == {"sgpr_count": 12}
    assert [(s.pattern, s.expected, s.found) for s in code.searched] == [
        (r"mul\.wide", True, ("mul.wide.f32",)),
        (r"div\.approx", False, ()),
    ]


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("no_product", r"no instruction mul\.wide is in it: products are exact"),
        ("divides", "div.approx.f32 must not be in it: an approximate quotient is wrong"),
        ("spills", "16 bytes a thread stand in memory for want of registers, 0 are admitted"),
        ("other_code", "it became code of c9, a1x was asked for"),
        ("raises", "compiling raised RuntimeError: PassManager::run failed"),
        ("unprintable", r"compiling raised RuntimeError: \x1b[2J\udc80"),
    ],
)
def test_wrong_code_fails_with_a_sentence(report: Report, kernel: str, problem: str) -> None:
    verdict = merge(report, kernel)
    assert verdict.status == FAILED
    assert verdict.problems == (problem,)
    assert "compiling" in verdict.output or "raised" in problem


def test_spilled_registers_that_are_admitted_pass(report: Report) -> None:
    assert merge(report, "spills_a_little").status == PASSED


def test_a_compiler_that_aborts_is_a_verdict_and_the_run_goes_on(report: Report) -> None:
    verdict = merge(report, "aborts")
    assert (verdict.status, verdict.problems) == (CRASHED, ("the process ended by SIGABRT",))
    assert "in merge" in verdict.output or "Fatal Python error" in verdict.output
    assert merge(report, "last").status == PASSED


def test_a_compiler_that_never_ends_is_a_verdict_and_the_run_goes_on(report: Report) -> None:
    verdict = merge(report, "hangs")
    assert (verdict.status, verdict.problems) == (HUNG, ("no answer within 5 s",))
    assert merge(report, "last").status == PASSED


def test_after_three_lost_kernels_the_rest_is_not_tried(report: Report) -> None:
    mine = [v for v in report.verdicts if v.implementation == "forge.lost"]
    assert [(v.case.split("/")[2], v.status) for v in mine] == [
        ("aborts0", CRASHED),
        ("aborts1", CRASHED),
        ("aborts2", CRASHED),
        ("*", NOT_RUN),
    ]
    assert mine[-1].problems == ("the rest is not tried: the 3 kernels before it were lost",)


@pytest.mark.parametrize(
    ("name", "status", "problems"),
    [
        (
            "lists_nothing",
            FAILED,
            (
                "forge_kernels:nothing: it returned no kernel: an implementation that has none names no function",
            ),
        ),
        ("raises", FAILED, ("forge_kernels:raises raised ValueError: no such mode",)),
        (
            "misses_its_own",
            FAILED,
            (
                "forge_kernels:misses_its_own raised ModuleNotFoundError: No module named 'forge_kernels.parts'; "
                "'forge_kernels' is not a package",
            ),
        ),
        (
            "twice",
            FAILED,
            (
                "forge_kernels:twice: two kernels are named 'same'",
                "forge_kernels:twice: the name 'Not ours' must be lower-case letters, digits, '.', '_' and '-', "
                "a letter or digit first",
            ),
        ),
        ("exits", CRASHED, ("the process ended with status 0",)),
    ],
)
def test_a_description_that_is_none_is_a_verdict_on_all_kernels(
    report: Report, name: str, status: str, problems: tuple[str, ...]
) -> None:
    verdict = selection(report, name)
    assert (verdict.status, verdict.problems) == (status, problems)


def test_an_absent_tool_is_not_run_with_its_reason(report: Report) -> None:
    old = found(report, "compile/store_latent/plain/a1x")
    assert (old.status, old.problems, old.code) == (NOT_RUN, (TOO_OLD,), None)
    module = selection(report, "misses_a_module")
    reason = "No module named 'compiler_that_nobody_has': forge.misses_a_module is compiled with it"
    assert (module.status, module.problems) == (NOT_RUN, (reason,))


def test_a_check_whose_tool_is_absent_is_not_run_and_the_others_are_made(report: Report) -> None:
    verdict = selection(report, "half_seen", "plain")
    assert (verdict.status, verdict.problems) == (
        NOT_RUN,
        ("forgedump is missing: registers are not known",),
    )
    assert verdict.code is not None
    assert verdict.code.searched[0].found == ("mul.wide.f32",)


def test_what_has_no_kernel_stands_there_with_the_reason(report: Report) -> None:
    plain = found(report, "compile/kda_decode/*/a1x")
    assert (plain.status, plain.problems) == (NOT_RUN, (OWN_CODE,))
    composite = found(report, "compile/dsa_decode/*/a1x")
    assert (composite.status, composite.problems) == (NOT_RUN, (OF_PARTS,))
    assert {"moe_route", "all_gather", "topk_merge"} <= set(report.not_implemented)


def test_of_operators_that_were_not_asked_for_nothing_is_said(forge: None) -> None:
    report = run(CompileRequest("forge", targets=("b1",), operators=("kda_gate",)))
    assert report.not_implemented == ()
    assert run(CompileRequest("forge", targets=("b1",), operators=("moe_route",))).not_implemented == (
        "moe_route",
    )


def test_the_table_breaks_no_name_where_lines_are_short(report: Report) -> None:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=40, color_system=None))
    lines = stream.getvalue().splitlines()
    shown = [cells for row in table.rows(report) if (cells := [c for c in row.cells[1:] if c])]
    assert len(shown) > 20
    for cells in shown:
        assert any(" ".join(cells) in " ".join(line.split()) for line in lines), cells


def test_a_target_that_is_not_claimed_has_no_kernel(forge: None) -> None:
    report = run(CompileRequest("forge", targets=("b1",), implementation="forge.narrow"))
    assert [(v.case, v.status, v.problems) for v in report.verdicts] == [
        ("compile/kda_gate/*/b1", NOT_RUN, ("no kernel for a2: it claims a1",))
    ]
    assert not report.ok


def test_a_stand_in_says_so_beside_its_figures(forge: None) -> None:
    report = run(CompileRequest("forge", only=("compile/merge_attn_states/good/b1",)))
    (verdict,) = report.verdicts
    assert (verdict.status, verdict.case) == (PASSED, "compile/merge_attn_states/good/b1")
    assert verdict.code is not None
    assert (verdict.code.target, verdict.code.stand_in) == ("b1_code", "stands for a2: not its code")
    assert report.ok


def test_the_replay_compiles_that_kernel_alone(report: Report) -> None:
    assert merge(report, "no_product").replay == (
        "kimi-hal conformance run --backend forge --compile-only --target a1x --implementation forge.fast "
        "--case compile/merge_attn_states/no_product/a1x"
    )
    again = compile_only(*merge(report, "no_product").replay.split()[5:], "--backend", "forge")
    assert again.exit_code == 1
    assert "1 failed" in again.output
    assert "products are exact" in again.output


def compile_only(*words: str, ci: str = "") -> Result:
    words = tuple(word for word in words if word != "--compile-only")
    return CliRunner().invoke(
        cli, ["run", "--compile-only", *words], env={"CI": ci, "COLUMNS": "200"}, catch_exceptions=False
    )


OLD = ("--backend", "forge", "--target", "a1x", "--implementation", "forge.old")


def test_an_absent_tool_passes_nothing_and_fails_under_ci(forge: None, tmp_path: Path) -> None:
    def status(*words: str, ci: str = "") -> tuple[int, str]:
        path = tmp_path / "report.json"
        done = compile_only(*OLD, *words, "--json", str(path), ci=ci)
        (case,) = json.loads(path.read_bytes())["cases"]
        return done.exit_code, case["status"]

    assert status() == (1, NOT_RUN)  # nothing passed
    assert status(ci="true") == (1, FAILED)
    assert status("--strict") == (1, FAILED)


def test_an_absent_tool_beside_what_passes_is_green_here_and_red_under_ci(forge: None) -> None:
    both = ("--case", "compile/store_latent/plain/a1x", "--case", "compile/merge_attn_states/good/a1x")
    words = ("--backend", "forge", "--target", "a1x", *both)
    here, there = compile_only(*words), compile_only(*words, ci="1")
    assert (here.exit_code, there.exit_code) == (0, 1)
    assert f"not run, 1: {TOO_OLD}" in here.output
    assert TOO_OLD in there.output


def test_the_table_has_every_family(forge: None) -> None:
    done = compile_only("--backend", "forge", "--target", "a1x", "--implementation", "forge.narrow")
    assert done.exit_code == 0
    for word in ("kda_gate", "only", "2.0", "64", "passed", "all_gather", "moe_route", "not implemented"):
        assert word in done.output
    assert "forge (compile_only, profile compile_only, " in done.output
    assert "s), a1x, forge.narrow alone, compiles, and nothing was run: 1 passed" in done.output


def test_a_narrow_terminal_cuts_no_name_and_no_number(forge: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = compile_only("--backend", "forge", "--target", "a1x", "--implementation", "forge.narrow")
    assert "…" not in done.output
    assert re.search(r" only .* a1x .* 2\.0 .* 64 .* passed", done.output)


def test_one_operator_s_kernels_alone_are_compiled(forge: None, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ("--operator", "kda_gate", "--json", str(file))
    done = compile_only("--backend", "forge", "--target", "a1x", "--implementation", "forge.narrow", *words)
    assert done.exit_code == 0, done.output
    found = read(file.read_bytes())
    assert {v.operator for v in found.verdicts} == {"kda_gate"}
    assert found.environment.limited_to == ("a1x", "kda_gate", "forge.narrow")


def test_junit_has_a_testcase_a_kernel_with_its_figures(forge: None, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    compile_only(*OLD[:4], "--case", "compile/merge_attn_states/good/a1x", "--junitxml", str(path))
    case = ET.parse(path).getroot().find(".//testcase")
    assert case is not None
    assert case.get("name") == "compile/merge_attn_states/good/a1x"
    values = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert values == {
        "target": "a1x",
        "size": "2048",
        "registers": "64",
        "spilled": "0",
        "shared": "512",
        "sgpr_count": "12",
    }


def test_the_page_shows_the_figures(forge: None, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    compile_only(
        "--backend",
        "forge",
        "--target",
        "b1",
        "--case",
        "compile/merge_attn_states/good/b1",
        "--html",
        str(path),
    )
    text = path.read_text()
    assert "Compiled, not run" in text
    assert "stands for a2: not its code" in text
    assert ">64<" in text


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            CompileRequest("forge", targets=("a1",)),
            "unknown target of forge 'a1'; did you mean 'a1x'? Known: a1x, b1",
        ),
        (
            CompileRequest("reference"),
            "reference gives no targets, so nothing of it can be compiled without its device "
            "(Backend.targets, docs/vendor.md)",
        ),
        (
            CompileRequest("forge", only=("merge_attn_states/good",)),
            "'merge_attn_states/good' is not of the form compile/<operator>/<kernel>/<target>",
        ),
    ],
)
def test_what_does_not_exist_is_said(forge: None, request_: CompileRequest, message: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        run(request_)
    assert str(error.value) == message


def test_a_kernel_that_does_not_exist_proves_nothing_and_names_those_that_do(forge: None) -> None:
    report = run(CompileRequest("forge", targets=("a1x",), only=("compile/kda_gate/onyl/a1x",)))
    assert [v.problems for v in report.verdicts] == [("it has no kernel onyl for a1x; it has only",)]
    assert not report.ok


def test_options_that_mean_nothing_without_running_are_refused(forge: None) -> None:
    done = compile_only("--backend", "forge", "--profile", "quick", "--seed", "3")
    assert done.exit_code == 2
    assert "--compile-only runs no case: leave out --profile, --seed" in done.output


@pytest.mark.parametrize("option", [("--target", "a1x"), ("--strict",)])
def test_options_of_compiling_need_it(option: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["run", "--backend", "reference", *option])
    assert done.exit_code == 2
    assert f"{option[0]} goes with --compile-only" in done.output


def test_nothing_of_the_interpreter_reaches_the_compiler(report: Report) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert found(report, "compile/kda_gate/only/a1x").status == PASSED
