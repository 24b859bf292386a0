"""``kimi-hal conformance prove``: what it runs, what it prints, when it fails."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest
import torch
from rich.console import Console

from kimi_hal.dispatch import policy
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import prove
from kimi_hal_conformance.cases import load, real_text
from kimi_hal_conformance.mutants import catalogue, command, worker
from kimi_hal_conformance.mutants.messages import Job, Kill, Outcome
from kimi_hal_conformance.mutants.mutant import MUTANTS, Mutant
from kimi_hal_conformance.shrink import described, pieces, smallest

load()
catalogue.load()
HARMLESS = Mutant(
    id="harmless",
    file="parallel/ownership.py",
    old="return position // dcp.interleave % dcp.world",
    new="return (position // dcp.interleave) % dcp.world",
    breaks="Nothing is wrong.",
    imitates="https://github.com/nobody/nothing/issues/1",
    passes="same",
    areas=("ownership",),
)


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Undo what a worker does to its own process: it freezes the settings."""
    yield
    policy.thaw()


@pytest.fixture
def harmless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mutant]:
    monkeypatch.setitem(MUTANTS, HARMLESS.id, HARMLESS)
    yield HARMLESS
    signal.alarm(0)


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command.prove, arguments)


def killed(mutant: str = "m", kills: int = 1, of: int = 4, **fields: object) -> prove.Killed:
    kill = Kill(test="op/case", smallest="op/case, row 1 of 3", input="q float32[1, 4]", problem="wrong")
    defaults = {
        "name": mutant,
        "operator": "op",
        "killed": bool(kills),
        "killed_by": kill.test if kills else "",
        "input": kill.input if kills else "",
        "file": "settings.py",
        "breaks": "It is wrong.",
        "imitates": "https://github.com/a/b/issues/1",
        "kills": (kill,) * kills,
        "tried": of,
        "of": of,
        "refused": (),
        "untried": {},
        "seconds": 1.0,
    }
    return prove.Killed(**(defaults | fields))


def proof(*mutants: prove.Killed, every: bool = False) -> prove.Proof:
    return prove.Proof(
        schema=1,
        suite_version="0",
        profile="quick",
        every=every,
        seed=0,
        seconds=2.0,
        mutants=mutants,
    )


# ---- the verdict ------------------------------------------------------------------------------------------


def test_all_killed_is_a_proof() -> None:
    found = proof(killed("a"), killed("b"))
    assert found.ok
    assert command.summary(found) == "2 of 2 mutants killed (quick) in 2 s"


def test_one_survivor_is_none() -> None:
    found = proof(killed("a"), killed("b", kills=0))
    assert not found.ok
    assert command.summary(found) == "1 of 2 mutants killed (quick) in 2 s; survivors: b"


def test_no_mutant_is_none() -> None:
    assert not proof().ok


def test_a_mutant_that_refuses_a_case_is_none() -> None:
    assert not proof(killed("a", refused=("op/case",))).ok


def test_no_more_than_one_in_ten_may_be_killed_by_every_test() -> None:
    subtle = [killed(str(i)) for i in range(9)]
    coarse = killed("coarse", kills=4)
    assert coarse.by_all
    assert proof(*subtle, coarse, every=True).ok
    assert not proof(*subtle[:8], coarse, coarse, every=True).ok


def test_a_single_test_that_kills_is_not_every_test() -> None:
    assert not killed(kills=1, of=1).by_all


# ---- what is run ------------------------------------------------------------------------------------------


def test_a_mutant_is_tried_by_its_operators_cases_and_its_areas_properties() -> None:
    found = prove.tests(MUTANTS["merge_interleave_1_in_positions"], quick=False)
    kinds = {test.partition("/")[0] for test in found}
    assert kinds == {"topk_merge", "ownership"}
    assert found[0].startswith("ownership/")


def test_the_quick_profile_leaves_long_cases_out() -> None:
    mutant = MUTANTS["attn_lse_base_2"]
    long = set(prove.tests(mutant, quick=False)) - set(prove.tests(mutant, quick=True))
    assert long
    assert not any(cases.get(test).runs_in("quick") for test in long)


def test_a_harmless_mutant_survives(harmless: Mutant) -> None:
    job = Job(mutant="harmless", tests=prove.tests(harmless, quick=True), every=False, seed=0, limit=60)
    said: list[str] = []
    outcome = worker.tried(job, said.append)
    assert outcome.kills == ()
    assert outcome.tried == len(job.tests) == len(said)


def test_the_first_kill_ends_a_mutants_tests_unless_every_one_is_asked_for() -> None:
    mutant = MUTANTS["owner_interleave_ignored"]
    own = tuple(test for test in prove.tests(mutant, quick=True) if test.startswith("ownership/"))
    for every, tried in ((False, 1), (True, len(own))):
        ordered = tuple(sorted(own, key=lambda test: test != "ownership/positions-come-back"))
        job = Job(mutant=mutant.id, tests=ordered, every=every, seed=0, limit=60)
        outcome = worker.tried(job, lambda test: None)
        assert outcome.kills[0].test == "ownership/positions-come-back"
        assert outcome.tried == tried
    signal.alarm(0)


def test_a_case_that_this_machine_cannot_make_is_told_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harmless: Mutant
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no workload there
    real_text.text.cache_clear()
    held, real = prove.tests(harmless, quick=True)[0], "merge_attn_states/real-text"
    assert worker.size.__wrapped__(real, 0) == 0
    job = Job(mutant="harmless", tests=(real, held), every=True, seed=0, limit=60)
    outcome = worker.tried(job, lambda test: None)
    assert (outcome.tried, outcome.kills, list(outcome.untried)) == (1, (), [real])
    found = prove.concluded(harmless, job, outcome)
    assert (found.tried, found.of) == (1, 1)
    console = Console(width=400)
    with console.capture() as said:
        command.print_proof(proof(found), console)
    assert "not tried, 1: no workload file at" in said.get()
    assert "python -m kimi_hal_conformance.workload build" in said.get()


def test_tests_are_ordered_by_the_size_of_their_operands() -> None:
    small, large = "merge_attn_states/parts3/heads5/dim130/bfloat16/rows1", "sparse_mla/tp8/top2048"
    assert worker.size("ownership/lengths", 0) == 0
    assert 0 < worker.size(small, 0) < worker.size(large, 0)
    assert cases.nbytes({"a": [torch.zeros(2), torch.zeros(3)], "b": None}) == 20


# ---- processes --------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, msgspec
from kimi_hal_conformance.mutants.messages import Died, Job, Trying
from kimi_hal_conformance.mutants.worker import send
for line in sys.stdin.buffer:
    job = msgspec.json.decode(line, type=Job)
    send(int(sys.argv[1]), Trying(test=job.tests[0]))
    send(int(sys.argv[1]), Trying(test=job.tests[1]))
    if job.limit == 1:
        os._exit(3)
    send(int(sys.argv[1]), Died(code=-job.limit))
"""


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[prove.Lane]:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    found = prove.Lane(dict(os.environ), [sys.executable, str(script)])
    yield found
    found.stop()


@pytest.mark.parametrize(
    ("number", "problem"),
    [(signal.SIGALRM, "gave no answer within 120 s"), (signal.SIGSEGV, "ended by SIGSEGV")],
)
def test_a_process_that_hangs_or_dies_is_killed_by_the_test_it_was_at(
    lane: prove.Lane, number: int, problem: str
) -> None:
    job = Job(mutant="harmless", tests=("a", "b", "c"), every=False, seed=0, limit=number)
    found = lane.run(job, HARMLESS)
    assert [(kill.test, kill.problem) for kill in found.kills] == [("b", problem)]
    assert (found.tried, found.of) == (2, 3)


def test_a_worker_that_is_gone_is_an_error(lane: prove.Lane) -> None:
    job = Job(mutant="harmless", tests=("a", "b"), every=False, seed=0, limit=1)
    with pytest.raises(RuntimeError, match="the process that runs mutants ended with status 3"):
        lane.run(job, HARMLESS)


# ---- the smallest input -----------------------------------------------------------------------------------


def test_a_case_is_cut_down_to_the_row_that_fails() -> None:
    case = cases.get("sparse_mla/rows7/keys2")
    found = smallest(case, 0, lambda piece: ", row 3 of 7" in piece.id)
    assert found.id == "sparse_mla/rows7/keys2, row 3 of 7"
    whole, part = (c.make(cases.generator(c, 0)) for c in (case, found))
    assert torch.equal(part["indices"], whole["indices"][3:4])
    assert torch.equal(part["q"], whole["q"][3:4])
    assert part["cache"].shape == whole["cache"].shape


def test_a_case_of_sequences_is_cut_down_to_one_of_them() -> None:
    case = cases.get("kda_prefill/unbounded/ragged")
    parts = list(pieces(case, 0))
    whole, part = (c.make(cases.generator(c, 0)) for c in (case, parts[2]))
    assert [len(p.id) > len(case.id) for p in parts] == [True] * 4
    assert part["cu_seqlens"].tolist() == [0, 17]
    assert torch.equal(part["q"], whole["q"][3:20])
    assert torch.equal(part["state_ids"], whole["state_ids"][2:3])


def test_a_case_whose_pieces_all_pass_stays_whole() -> None:
    case = cases.get("sparse_mla/rows7/keys2")
    assert smallest(case, 0, lambda piece: False) is case


def test_rows_that_are_counted_from_the_first_are_not_cut() -> None:
    assert list(pieces(cases.get("moe_route/plain/padded"), 0)) == []


def test_an_input_is_described_by_shapes_and_few_integers() -> None:
    assert described(cases.get("merge_attn_states/parts3/heads5/dim130/bfloat16/rows1"), 0) == (
        "outs bfloat16[3, 1, 5, 130], lses float32[3, 1, 5]"
    )
    assert "indices [[64]]" in described(cases.get("sparse_mla/rows1/keys1"), 0)


# ---- the command ------------------------------------------------------------------------------------------


def test_the_command_proves_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    names = ("attn_lse_base_2", "e8m0_nan_is_inf", "results_in_one_buffer")
    result = run(*(x for n in names for x in ("--only", n)), "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "attn_lse_base_2: The LSE is in base 2 where the contract says natural logarithm." in result.output
    assert (
        "killed by formats/e8m0-times-e2m1: AssertionError: NaN under scale code 255: got 4" in result.output
    )
    assert "smallest input: row 0 of 3: outs bfloat16[3, 1, 1, 1], lses float32[3, 1, 1]" in result.output
    assert "in the memory of out of call 1, which its caller still holds" in result.output  # a relation
    assert "3 of 3 mutants killed (quick)" in result.output
    found = msgspec.json.decode(path.read_bytes(), type=prove.Proof)
    assert [m.name for m in found.mutants] == list(names)
    assert json.loads(path.read_text())["mutants"][0]["imitates"] == (
        "https://github.com/sgl-project/sglang/pull/33926"
    )


def test_a_survivor_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "run", lambda wanted, told: proof(killed("a", kills=0)))
    result = run()
    assert result.exit_code == 1
    assert "a: It is wrong.\n    SURVIVED 4 tests" in result.output


def test_an_unknown_mutant_is_exit_status_2() -> None:
    result = run("--only", "attn_lse_base2")
    assert result.exit_code == 2
    assert "did you mean 'attn_lse_base_2'?" in result.output


def test_a_folder_that_is_not_there_is_told_before_anything_runs() -> None:
    result = run("--json", "/nowhere/proof.json")
    assert result.exit_code == 2
    assert "cannot write /nowhere/proof.json: there is no folder /nowhere" in result.output


def test_the_list_names_every_mutant() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert [line.partition(":")[0] for line in result.output.splitlines()] == list(MUTANTS)


def test_the_mutants_of_one_operator_are_listed_and_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [i for i, m in MUTANTS.items() if "kda_gate" in m.operators]
    listed = run("--list", "--operator", "kda_gate").output.splitlines()
    assert [line.partition(":")[0] for line in listed] == mine != []
    asked: list[Any] = []
    monkeypatch.setattr(prove, "run", lambda wanted, told: asked.append(wanted) or proof(killed("a")))
    assert run("--operator", "kda_gate", "--only", "attn_lse_base_2").exit_code == 0
    assert list(asked[0].only) == ["attn_lse_base_2", *mine]
    unknown = run("--operator", "kda_gat")
    assert unknown.exit_code == 2
    assert unknown.output.startswith("Error: unknown operator 'kda_gat'; did you mean 'kda_gate'?")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_mutant_is_killed_and_few_by_every_test() -> None:
    found = prove.run(prove.Wanted(every=True))
    assert found.survivors == ()
    assert found.refusing == ()
    assert found.ok


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_quick_profile_kills_nine_in_ten() -> None:
    found = prove.run(prove.Wanted(quick=True))
    assert len(found.survivors) <= 0.1 * len(found.mutants)


def test_an_outcome_survives_its_way_as_json() -> None:
    outcome = Outcome(mutant="m", kills=(), tried=3)
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Outcome) == outcome
