"""Planning with hostile arguments, plans that are copied or sent, and texts that are no plans."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import kimi_hal as hal
from kimi_hal.errors import ContractError, GroupError, PlanError, UnknownNameError
from kimi_hal.parallel import LoopbackGroup
from kimi_hal.specs import DCP, KDASpec, Limits, TopKMergeSpec, TopKSpec

SPEC = TopKSpec(topk=4)
LIMITS = Limits(max_rows=8, max_reqs=8)


def plan(**other: object) -> hal.Plan:
    return hal.plan(**{"op": "topk_select", "spec": SPEC, "limits": LIMITS, "device": "cpu", **other})


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"op": 5}, "op must be an operator's name, got int 5"),
        ({"limits": 64}, "limits must be Limits(max_rows=…, max_reqs=…) or None, got int 64"),
        ({"limits": 0}, "limits must be Limits(max_rows=…, max_reqs=…) or None, got int 0"),
        ({"implementation": 5}, "implementation must be text, backend.implementation, got int"),
        ({"group": 5}, "group must be hal.parallel.TorchGroup(process_group) or another Group, got int"),
        ({"pair": "x"}, "pair must be a plan, got str 'x'"),
        ({"limits": 1, "pair": 2}, "limits must be Limits(max_rows=…, max_reqs=…) or None, got int 1; "),
    ],
)
def test_an_argument_of_another_kind_is_a_sentence(argument, sentence):
    with pytest.raises(PlanError) as error:
        plan(**argument)
    assert str(error.value).startswith(f"hal.plan: {sentence}")


@pytest.mark.parametrize("device", ["banana", "", None, "CPU", "cpu:x"])
def test_a_device_that_torch_does_not_know_is_refused(device):
    with pytest.raises(PlanError, match="is none that this torch knows"):
        plan(device=device, implementation="reference.torch")


def test_bind_says_which_operand_is_missing():
    with pytest.raises(ContractError, match="missing a required argument: 'row_len'; its operands are"):
        plan().bind(torch.zeros(1, 8))


def test_a_plan_is_not_pickled_but_says_what_to_send():
    made = plan()
    with pytest.raises(PlanError, match=r"cannot be pickled: send hal\.dump_plans\(\)"):
        pickle.dumps(made)


def test_a_module_that_holds_a_plan_can_be_copied():
    made = plan()
    assert copy.deepcopy({"plan": made})["plan"] is made
    assert copy.copy(made) is made


def entry(**changes: object) -> str:
    made = plan()
    (own,) = [e for e in json.loads(hal.dump_plans()) if e["key"] == made.key]
    return json.dumps([{n: v for n, v in {**own, **changes}.items() if v != "gone"}])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[", "load_plans: not the text of dump_plans: Expecting value: line 1 column 2 (char 1)"),
        ("[1]", "load_plans: entry 0 is not one of dump_plans: an object of fields, got int"),
        ("", "load_plans: '' is neither the text of dump_plans nor its file: Is a directory"),
        ("{}", "load_plans: '{}' is neither the text of dump_plans nor its file: No such file or directory"),
        (
            "x" * 5000,
            f"load_plans: {repr('x' * 5000)[:96]}… is neither the text of dump_plans nor its file: ",
        ),
    ],
)
def test_a_text_that_dump_plans_did_not_write_is_a_sentence(text, sentence):
    with pytest.raises(PlanError) as error:
        hal.load_plans(text)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "field", ["operator", "spec", "limits", "device", "implementation", "grouped", "pair", "key"]
)
def test_each_field_of_a_dumped_plan_is_required_and_has_its_kind(field):
    with pytest.raises(PlanError, match=f"entry 0 is not one of dump_plans: {field} is missing"):
        hal.load_plans(entry(**{field: "gone"}))
    with pytest.raises(PlanError, match=f"entry 0 is not one of dump_plans: {field} is 5"):
        hal.load_plans(entry(**{field: 5}))


def test_a_file_of_bytes_is_a_sentence(tmp_path):
    path = tmp_path / "plans.json"
    path.write_bytes(b"\xff\xfe[")
    with pytest.raises(PlanError, match="is neither the text of dump_plans nor its file"):
        hal.load_plans(path)


def test_an_intact_entry_still_loads():
    (made,) = hal.load_plans(entry())
    assert made.key == plan().key


@pytest.mark.parametrize("wrong", [{"op": "topk_merg"}, {"limits": 64}, {"device": "banana"}])
def test_a_rank_that_cannot_even_ask_tells_the_others(wrong):
    def rank(group):
        spec = TopKMergeSpec(topk=4, dcp=DCP(world=2, rank=group.rank()))
        asked = {"op": "topk_merge", "spec": spec, "limits": LIMITS, "device": "cpu", "group": group}
        try:
            hal.plan(**{**asked, **(wrong if group.rank() else {})})
        except (PlanError, UnknownNameError, GroupError) as error:
            return error
        return None

    first, second = LoopbackGroup.run(2, rank, timeout=5)
    assert isinstance(first, GroupError)
    assert "no plan for" in str(first)  # it did not wait for the timeout
    assert isinstance(second, PlanError | UnknownNameError)


def test_a_failure_is_told_to_the_ranks_once():
    from kimi_hal.dispatch import ranks

    meetings = []

    def rank(group):
        meet = group.all_gather

        def counted(x):
            meetings.append(group.rank())
            return meet(x)

        group.all_gather = counted
        error = ValueError("a part of a composite cannot be planned")
        ranks.fail(group, "topk_merge", error)
        told = len(meetings)
        ranks.fail(group, "dsa_decode", error)  # as the composite does, when its part has failed
        return len(meetings) == told

    assert LoopbackGroup.run(1, rank, timeout=5) == [True]
    assert meetings


def test_commit_and_verify_pair_however_a_bound_is_written():
    verify = hal.plan("kda_verify", KDASpec(num_heads=1, lower_bound=-5), LIMITS, device="cpu")
    commit = hal.plan("kda_commit", KDASpec(num_heads=1, lower_bound=-5.0), LIMITS, device="cpu", pair=verify)
    assert commit.pair is verify
