"""The command line answers without torch where it can, and every error is a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_plugins import Plugins, capability, implementation

from kimi_hal.cli.doctor import describe
from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.loader import load
from kimi_hal.settings import Settings


def kimi_hal(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KIMI_HAL_")}
    command = [sys.executable, "-m", "kimi_hal.cli.main", *args]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args", [("--help",), ("list",), ("list", "--json"), ("doctor", "--no-probe"), ("--version",)]
)
def test_what_needs_no_torch_imports_none(args: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom kimi_hal.cli.main import main\n"
        f"try:\n    main({list(args)!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command() -> None:
    out = kimi_hal("--help").stdout
    for name in ("conformance", "doctor", "explain", "list", "step"):
        assert name in out


def test_an_unknown_command_names_the_nearest() -> None:
    done = kimi_hal("explian")
    assert done.returncode == 2
    assert "no command 'explian'; did you mean 'explain'?" in done.stderr


def test_doctor_says_what_is_here_and_that_nothing_is_wrong() -> None:
    done = kimi_hal("doctor")
    assert done.returncode == 0, done.stderr
    assert "backend reference" in done.stdout
    assert done.stdout.endswith("\nnothing is wrong; kernels' modules were not imported, which a plan does\n")


def test_doctor_finds_a_misspelt_variable() -> None:
    done = kimi_hal("doctor", KIMI_HAL_BACKND="reference")
    assert done.returncode == 1
    assert "KIMI_HAL_BACKND" in done.stdout
    assert "KIMI_HAL_BACKEND" in done.stdout
    assert "1 to mend" in done.stdout


def test_doctor_finds_what_a_plugin_does_not_know() -> None:
    done = kimi_hal("doctor", KIMI_HAL_REFERENCE_X="1", KIMI_HAL_OPS="sparse_mla=reference.trch")
    assert done.returncode == 1
    assert "problem: unknown variable KIMI_HAL_REFERENCE_X. Declared by reference: none" in done.stdout
    assert "KIMI_HAL_OPS: unknown implementation of sparse_mla 'reference.trch'; did you mean" in done.stdout
    assert "2 to mend" in done.stdout


def test_doctor_says_which_library_keeps_how_many_implementations_from_running(plugins: Plugins) -> None:
    needs = tuple(capability(requires={name: ">=2"}) for name in ("no-such-library", "driver"))
    plugins.add(
        "acme",
        implementation("fast", capabilities=needs[:1]),
        implementation("slow", capabilities=needs[:1]),
        implementation("either", capabilities=(*needs[:1], capability())),
        implementation("driven", capabilities=needs[1:]),
        probe=Probe(present=True, arch="acme2", devices=("one",), facts={"driver": "3"}),
    )
    line = describe(load(Settings(), strict=False), "acme", probe=True)
    assert line == (
        "backend acme 1.0: 4 implementations; 2 cannot run: no-such-library>=2 not found; one (acme2), driver 3"
    )


def test_list_shows_every_operator_and_backend() -> None:
    from kimi_hal.ops import OPERATORS

    matrix = json.loads(kimi_hal("list", "--json").stdout)["operators"]
    assert set(matrix) == set(OPERATORS)
    for backends in matrix.values():
        assert backends["reference"], "the reference computes every operator"


def test_the_matrix_cuts_and_breaks_no_name_however_narrow_the_terminal() -> None:
    out = kimi_hal("list", COLUMNS="110").stdout
    assert kimi_hal("list", COLUMNS="40").stdout == out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 110
    assert not any("…" in line for line in lines)
    assert lines[1].split()[:2] == ["operator", "reference"]
    (line,) = [line.split() for line in lines if line.lstrip().startswith("moe_route")]
    assert line == ["moe_route", "torch", "●◐○", "–", "–", "–", "xla", "●○"]
    assert any("cuda_blackwell ·" in line for line in lines)


def test_a_composition_runs_no_further_than_its_parts() -> None:
    from kimi_hal.ops.operator import get

    operators = json.loads(kimi_hal("list", "--json").stdout)["operators"]
    for backend, found in operators["dsa_decode"].items():
        for composed in (i for i in found if i["name"] == "composed"):
            for part in (p for p in get("dsa_decode").parts if not get(p).grouped):
                ways = {way for i in operators[part][backend] for way in i["execution"]}
                assert set(composed["execution"]) <= ways, (backend, part)


def test_list_of_one_operator_shows_what_is_covered() -> None:
    out = kimi_hal("list", "merge_attn_states").stdout
    assert "reference.torch" in out
    assert "parts: 1 to 64" in out


def test_list_says_what_was_never_run() -> None:
    found = json.loads(kimi_hal("list", "sparse_mla", "--json").stdout)["operators"]["sparse_mla"]["nvidia"]
    why = {each["name"]: each["not_run"] for each in found}
    assert (why["xqa"], why["flashmla"]) == ("no such device was here", "")
    out = kimi_hal("list", "sparse_mla").stdout.splitlines()
    assert "nvidia.xqa: native, not run: no such device was here" in out
    assert "nvidia.flashmla: native" in out


def test_list_says_what_can_be_compiled_without_its_device() -> None:
    (found,) = json.loads(kimi_hal("list", "merge_attn_states", "--json").stdout)["operators"][
        "merge_attn_states"
    ]["amd"]
    assert found["targets"] == ["gfx942", "gfx950"]
    out = kimi_hal("list", "merge_attn_states").stdout
    assert "  compiled for gfx942, gfx950 by `kimi-hal conformance run --compile-only`" in out
    assert "triton ●○·" in kimi_hal("list").stdout


def test_list_names_what_a_capability_requires() -> None:
    out = kimi_hal("list", "kda_prefill").stdout.splitlines()
    blocks = [line for line in out if line.startswith("  on ") and "v6e" in line]
    assert len(blocks) == len(set(blocks)) == 3, blocks
    assert sum(" with " in line for line in blocks) == 3, blocks


def test_a_backend_is_no_operator_to_list() -> None:
    done = kimi_hal("list", "amd")
    assert done.returncode == 2
    assert done.stderr == (
        "kimi-hal: 'amd' is a backend: `kimi-hal list` has a column for it, "
        "`kimi-hal list OPERATOR` what it covers\n"
    )


def test_list_of_an_unknown_operator_names_the_nearest() -> None:
    done = kimi_hal("list", "sparse_mlp")
    assert done.returncode == 2
    assert done.stderr.startswith("kimi-hal: unknown operator 'sparse_mlp'; did you mean 'sparse_mla'?")


def test_explain_names_every_candidate_with_its_reasons() -> None:
    done = kimi_hal("explain", "kda_decode", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["chosen"]) == (0, "reference.torch")
    named = {c["full_name"]: c["refusals"] for c in answer["candidates"]}
    assert {"reference.torch", "nvidia.triton", "amd.triton", "ppu.triton"} <= set(named)
    assert all(reasons for name, reasons in named.items() if name != "reference.torch")


def test_explain_sparse_mla_as_an_engine_would_ask() -> None:
    done = kimi_hal("explain", "sparse_mla", "--json", "--tp", "8")
    answer = json.loads(done.stdout)
    assert answer["spec"]["num_heads"] == 12
    assert answer["chosen"] == "reference.torch"


def test_explain_takes_changed_fields_and_refuses_unknown_ones() -> None:
    changed = json.loads(kimi_hal("explain", "sparse_mla", "--json", "--spec", '{"num_heads": 64}').stdout)
    assert changed["spec"]["num_heads"] == 64
    done = kimi_hal("explain", "sparse_mla", "--spec", '{"num_head": 64}')
    assert done.returncode == 2
    assert done.stderr == "kimi-hal: SparseMLASpec has no field 'num_head'; did you mean 'num_heads'?\n"


def test_explain_ranks_for_the_rows_of_a_request_and_admits_a_numerics_class() -> None:
    asked = ("indexer_logits", "--json", "--rows", "2048", "--spec", '{"numerics": ["logits=fp8_sum"]}')
    ranks = []
    for sizes in ((), ("--rows-per-req", "2048")):
        answer = json.loads(kimi_hal("explain", *asked, *sizes).stdout)
        (summed,) = (c for c in answer["candidates"] if c["full_name"] == "nvidia.cuda_fp8_sum")
        assert not any("Spec.numerics" in reason for reason in summed["refusals"])
        ranks.append(summed["rank"])
    assert ranks == [-20, 1]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--rows-per-req", "0"), "0 is not in the range x>=1"),
        (("--spec", "{"), "--spec is not JSON"),
        (("--spec", "[1]"), "--spec must be a JSON object, got [1]"),
        (("--tp", "7"), "tp=7 does not divide 96 heads; possible: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]"),
    ],
)
def test_explain_refuses_bad_options_with_a_sentence(args: tuple[str, ...], text: str) -> None:
    done = kimi_hal("explain", "sparse_mla", *args)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_backend_whose_device_is_absent_ends_with_what_to_type() -> None:
    done = kimi_hal("explain", "kda_decode", KIMI_HAL_BACKEND="nvidia")
    out = done.stdout
    assert done.returncode == 1
    assert "nothing fits" in out
    assert "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU" in out


def test_an_interpreted_backend_is_chosen_on_the_cpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be interpreted")
    env = {"KIMI_HAL_BACKEND": "nvidia", "KIMI_HAL_EXECUTION": "interpreted"}
    answer = json.loads(kimi_hal("explain", "kda_decode", "--json", **env).stdout)
    assert answer["chosen"] == "nvidia.triton"
    assert answer["execution"] == "interpreted"


def test_conformance_without_the_suite_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from click.testing import CliRunner

    from kimi_hal.cli.conformance import command

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(command, ["run"])
    assert result.exit_code == 1
    assert "install it with: pip install kimi-hal-conformance" in result.output
