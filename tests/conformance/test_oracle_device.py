"""The oracle may run on a device: only on one that computes in float64, and held to the host's answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kimi_hal import ops
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import oracle, oracle_device
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.oracle import Answer, Question, answer, moved
from kimi_hal_conformance.oracle_device import disagreement, place

load()


def question(case_id: str, where: str = "cpu") -> Question:
    case = cases.get(case_id)
    operands = case.make(cases.generator(case, 0))
    return Question(ops.get(case.operator), case.spec, case.limits, operands, oracle=where)


def test_the_host_answers_for_itself() -> None:
    assert place("cpu") == "cpu"


def test_the_host_answers_for_a_device_that_does_not_compute_in_float64() -> None:
    assert place("meta") == "cpu"


def test_operands_move_inside_mappings_lists_and_checkpoints() -> None:
    given = {
        "x": torch.ones(2),
        "many": [torch.ones(1)],
        "n": 3,
        "weights": cases.Checkpoint(w=torch.ones(4)),
    }
    there = moved(given, "meta")
    assert (
        there["x"].device.type == there["many"][0].device.type == there["weights"]["w"].device.type == "meta"
    )
    assert there["n"] == 3
    assert isinstance(there["weights"], cases.Checkpoint)


def wrong_elsewhere(monkeypatch: pytest.MonkeyPatch, change: float) -> None:
    """Let every question that is answered elsewhere have an answer that is off by a share of itself."""

    def asked(told: Question, dtype: torch.dtype) -> Answer:
        found = answer(replace(told, oracle="cpu"), dtype)
        if told.oracle == "cpu":
            return found
        return Answer(
            {n: t * (1 + change) if t.is_floating_point() else t for n, t in found.outputs.items()}, {}
        )

    monkeypatch.setattr(oracle_device, "answer", asked)
    monkeypatch.setattr(oracle_device, "ONE_IN", 1)


def test_an_oracle_that_is_wrong_on_a_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_elsewhere(monkeypatch, 1e-7)
    assert disagreement(question("kda_gate/tp32/rows1", "cuda:0")) == [
        "g_out: the oracle on cuda:0 is not the host's",
        "beta_out: the oracle on cuda:0 is not the host's",
    ]


def test_another_order_of_summation_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_elsewhere(monkeypatch, 1e-13)
    assert disagreement(question("kda_gate/tp32/rows1", "cuda:0")) == []


def test_operators_whose_oracle_makes_tensors_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr(oracle, "moved", never)
    assert answer(question("kda_commit/edges/accepts-all", "cuda:0"), torch.float64).mutated


@pytest.mark.gpu
@pytest.mark.parametrize("operator", sorted(set(ops.OPERATORS) - set(oracle.ON_HOST)))
def test_the_oracle_on_a_device_is_the_hosts(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_device, "ONE_IN", 1)
    mine = [
        c for c in cases.CASES.values() if c.operator == operator and c.since == cases.INTERP and not c.ranks
    ]
    assert [c.id for c in mine if disagreement(question(c.id, place("cuda")))] == []
