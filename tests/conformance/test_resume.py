"""Going on from an earlier run: what is kept, what is tried again, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal.dispatch import composed
from kimi_hal.dispatch.loader import candidates
from kimi_hal.errors import KimiHalError
from kimi_hal_conformance import plugins, resume, schedule, suite
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.report import write_json
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED

CASES = ("kda_gate/tp8/rows0", "kda_gate/tp8/rows1")
KERNELS = """
from kimi_hal.reference.backend import build as right


def wrong(ctx):
    reference = right(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        return reference(raw_g, raw_beta, A_log, dt_bias * 0, g_out=g_out, beta_out=beta_out)

    return run
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("again")
    both = 'IMPLEMENTATIONS = (covering("kda_gate", "right"), covering("kda_gate", "wrong"))'
    write(folder, "again", both, KERNELS)
    with installed(folder):
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, plugin: None) -> Report:
    return once(tmp_path_factory, "again", lambda: suite.run(Request("again", only=CASES)))


def again(earlier: Report, only: tuple[str, ...] = CASES, seed: int = 0) -> tuple[Report, list[str]]:
    """Return the report of a run that goes on, and what it tried."""
    tried: list[str] = []
    request = Request("again", only=only, resume=earlier, seed=seed)
    found = suite.run(request, lambda v: tried.append(f"{v.implementation} {v.case}"))
    return found, tried


def elsewhere(earlier: Report, **fields: Any) -> Report:
    """Return the report as if it had been made in another environment."""
    return msgspec.structs.replace(
        earlier, environment=msgspec.structs.replace(earlier.environment, **fields)
    )


def test_what_passed_is_kept_and_what_failed_is_tried_again(first: Report) -> None:
    found, tried = again(first)
    assert tried == ["again.wrong kda_gate/tp8/rows1"]  # without rows nothing can be wrong
    assert [(v.case, v.status, v.kept) for v in found.verdicts] == [
        (CASES[0], PASSED, True),
        (CASES[1], PASSED, True),
        (CASES[0], PASSED, True),
        (CASES[1], FAILED, False),
    ]
    assert found.environment.resumed == first.environment.started
    assert found.environment.versions == first.environment.versions


def test_a_case_that_the_earlier_run_lacks_is_tried(first: Report) -> None:
    _, tried = again(first, only=(*CASES, "kda_gate/tp8/rows9"))
    assert sorted(tried) == [
        "again.right kda_gate/tp8/rows9",
        "again.wrong kda_gate/tp8/rows1",
        "again.wrong kda_gate/tp8/rows9",
    ]


def test_an_implementation_whose_sources_changed_is_tried_again(first: Report) -> None:
    changed = msgspec.structs.replace(first.implementations[0], source_hash="0" * 64)
    _, tried = again(msgspec.structs.replace(first, implementations=(changed, first.implementations[1])))
    assert "again.right kda_gate/tp8/rows0" in tried


@pytest.mark.parametrize(("changed", "same"), [("merge_attn_states", False), ("kda_gate", True)])
def test_a_composition_is_another_one_where_the_sources_of_a_part_changed(
    changed: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = plugins.registry("reference").get("reference")
    whole = next(i for i in candidates(loaded, "dsa_decode") if i.name == composed.NAME)
    before, hashed = schedule.on_record(whole, loaded), schedule.source_hash
    monkeypatch.setattr(
        schedule, "source_hash", lambda of, i: hashed(of, i) + ("changed" if i.operator == changed else "")
    )
    assert (schedule.on_record(whole, loaded) == before) is same


def test_a_composition_is_the_same_where_another_that_was_never_run_could_be_named() -> None:
    loaded = plugins.registry("reference").get("reference")
    whole = next(i for i in candidates(loaded, "dsa_decode") if i.name == composed.NAME)
    part = next(i for i in loaded.implementations if i.operator == "sparse_mla")
    before, kept = schedule.on_record(whole, loaded), loaded.implementations
    for reason, same in (("no such device was here", True), ("", False)):
        more = dataclasses.replace(part, name="other", not_run=reason)
        with_more = dataclasses.replace(loaded, implementations=(*kept, more))
        assert (schedule.on_record(whole, with_more) == before) is same


def test_fewer_repeats_than_this_run_makes_prove_nothing_for_it(first: Report) -> None:
    _, tried = again(elsewhere(first, repeats=0))
    assert len(tried) == 4


def test_a_wheel_that_does_not_tell_its_build_is_the_same_version(first: Report) -> None:
    torch = first.environment.versions["torch"].partition("+")[0]
    _, tried = again(elsewhere(first, versions={**first.environment.versions, "torch": f"{torch}+cu999"}))
    assert tried == ["again.wrong kda_gate/tp8/rows1"]


def test_other_conditions_are_refused_and_all_named(first: Report) -> None:
    versions = {**first.environment.versions, "torch": "2.0.0"}
    other = elsewhere(first, versions=versions, profile="quick")
    with pytest.raises(KimiHalError) as error:
        again(other, seed=3)
    torch = first.environment.versions["torch"].partition("+")[0]
    assert str(error.value).startswith(
        f"cannot resume the run of {first.environment.started}: its profile is 'quick', this run's 'cases'; "
        f"its seed is 0, this run's 3; its torch is version 2.0.0, here it is {torch}"
    )
    assert str(error.value).endswith(". Run without --resume")


def test_other_values_of_the_backends_variables_are_refused(first: Report) -> None:
    assert first.environment.variables == {}
    known = {"KIMI_HAL_AGAIN_MODE": "fast", "KIMI_HAL_AGAIN_OLD": "1"}
    with pytest.raises(KimiHalError) as error:
        resume.check(
            elsewhere(first, variables=known), {}, first.environment.versions, {"KIMI_HAL_AGAIN_MODE": "slow"}
        )
    assert str(error.value) == (
        f"cannot resume the run of {first.environment.started}: "
        "its KIMI_HAL_AGAIN_MODE was 'fast', here it is 'slow'; "
        "its KIMI_HAL_AGAIN_OLD was '1', here it is not set. Run without --resume"
    )


def test_an_implementation_of_another_tie_rule_is_kept_too(first: Report) -> None:
    (free, *_) = (msgspec.structs.replace(i, conforming=False) for i in first.implementations)
    stored = msgspec.structs.replace(first, implementations=(free,))
    now = resume._on_trial(free)
    assert not now.conforming
    assert resume.kept(stored, now, CASES, 1).keys() == {*CASES}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read FILE: No such file or directory"),
        ("{}", "FILE: this is no report: it has no schema"),
        ('{"schema": 3}', "FILE: Object missing required field `suite_version`"),
    ],
)
def test_a_file_that_is_no_report_gets_a_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KimiHalError) as error:
        resume.read(path)
    assert str(error.value) == message.replace("FILE", str(path))


def test_the_command_line_goes_on_and_says_how_much_was_kept(first: Report, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(first, path)
    cases = [word for case in CASES for word in ("--case", case)]
    result = CliRunner().invoke(cli, ["run", "--backend", "again", *cases, "--resume", str(path)])
    assert result.exit_code == 1, result.output
    assert f"kept from the run of {first.environment.started}: 3 of 4 verdicts" in result.output
