"""Each judge accepts a right answer in every form that the contract leaves free, and refuses a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimi_hal import ops
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.judges import judge
from kimi_hal_conformance.oracle import Answer, Question, answer
from kimi_hal_conformance.roundings import inner
from kimi_hal_conformance.selections import all_scores
from kimi_hal_conformance.trial import Trial

load()

Change = Callable[[dict[str, torch.Tensor]], None]


def right(case_id: str, seed: int = 0) -> Trial:
    """Return a trial whose answer is the oracle's, rounded to the contract's dtypes."""
    case = cases.get(case_id)
    question = Question(
        ops.get(case.operator), case.spec, case.limits, case.make(cases.generator(case, seed))
    )
    exact, reference = (answer(question, dtype) for dtype in (torch.float64, torch.float32))
    dtypes = {o.keyword: getattr(torch, o.dtype_name(case.spec)) for o in question.op.outs}
    outputs = {name: value.to(dtypes[name], copy=True) for name, value in exact.outputs.items()}
    given = question.operands
    mutated = {
        name: value.to(given[name].dtype if name in given else value.dtype, copy=True)
        for name, value in exact.mutated.items()
    }
    trial = Trial(question, Answer(outputs, mutated), exact, reference, inner(question))
    if case.operator == "indexer_topk":
        score = getattr(torch, case.spec.score)  # type: ignore[attr-defined]
        outputs["all_scores_out"] = all_scores(trial, torch.float64).float().to(score)
    return trial


def problems(trial: Trial, change: Change | None = None) -> list[str]:
    """Return what the judge says of an answer, after a change to its outputs."""
    outputs = {name: value.clone() for name, value in trial.got.outputs.items()}
    if change:
        change(outputs)
    changed = dataclasses.replace(trial, got=Answer(outputs, trial.got.mutated))
    found = judge(trial.question.op.name)(changed)
    return [f"{m.tensor}: {m.problem}" for m in found if m.problem]


def shuffled(outputs: dict[str, torch.Tensor], *names: str) -> None:
    """Reverse the winners of every row, the entries of all named outputs alike."""
    for row in range(outputs[names[0]].shape[0]):
        count = int((outputs[names[0]][row] >= 0).sum())
        for name in names:
            outputs[name][row, :count] = outputs[name][row, :count].flip(0)


RIGHT = [
    "topk_select/ties/ordered",
    "topk_select/special/any-order",
    "topk_select/windows",
    "indexer_topk/ordered-with-scores",
    "indexer_topk/slots",
    "indexer_topk/bf16-ties",
    "indexer_topk/dcp4-rank3",
    "indexer_logits/index.mxfp4.page64/ragged",
    "indexer_logits/bf16-scores",
    "moe_route/k3/rows17",
    "sparse_mla/rows7/keys2",
    "sparse_mla/position/index-len",
    "merge_attn_states/parts3/heads5/dim130/bfloat16/rows7",
    "store_latent/latent.nvfp4.352/page64/rows33",
    "store_index_keys/index.mxfp4.page64/rows100",
    "quantize_index_query/index.mxfp4.page64/rows5",
    "kda_decode/odd/rows6",
    "kda_commit/odd/partial",
    "moe_experts/small/rows9",
    "moe_layer/one-rank/rows9",
    "kda_layer_decode/tp32/rows6",
]


@pytest.mark.parametrize("case_id", RIGHT)
def test_the_rounded_oracle_is_right(case_id: str) -> None:
    assert problems(right(case_id)) == []


# --- selections -----------------------------------------------------------------------------------------


def test_the_order_of_a_selection_is_free() -> None:
    trial = right("topk_select/spread/any-order")
    assert problems(trial, lambda o: shuffled(o, "out", "scores_out")) == []


def test_the_order_of_a_selection_counts_where_it_is_asked_for() -> None:
    found = problems(right("topk_select/spread/ordered"), lambda o: shuffled(o, "out", "scores_out"))
    assert found[0].startswith("out: ")
    assert "entries differ; first at [2, 0]" in found[0]


def test_scores_must_follow_their_index() -> None:
    found = problems(right("topk_select/spread/any-order"), lambda o: shuffled(o, "out"))
    assert [text.partition(":")[0] for text in found] == ["scores_out"]


def test_a_selected_key_that_another_beats_is_wrong() -> None:
    trial = right("topk_select/spread/any-order")

    def worse(outputs: dict[str, torch.Tensor]) -> None:
        unused = set(range(700)) - set(outputs["out"][5].tolist())
        outputs["out"][5, 0] = unused.pop()

    assert any(text.startswith("out: ") for text in problems(trial, worse))


def test_a_hole_in_a_selection_is_wrong() -> None:
    def hole(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][5] = outputs["out"][5].roll(1)
        outputs["out"][5, 0] = -1

    assert "out: a −1 stands before a selected position" in problems(
        right("topk_select/ties/any-order"), hole
    )


def test_an_unused_entry_is_minus_one() -> None:
    def other(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0] = -2

    assert "out: an unused entry is not −1" in problems(right("topk_select/ties/any-order"), other)


def at_the_cut(trial: Trial, row: int, length: int) -> tuple[int, int, float]:
    """Return the last selected key of a row, the best that is left out, and how far their scores are apart."""
    scores = all_scores(trial, torch.float64)[row, :length]
    last, best = scores.argsort(descending=True)[trial.spec.topk - 1 : trial.spec.topk + 1].tolist()
    return last, best, float(scores[last] - scores[best])


def test_a_fused_selection_may_not_leave_out_a_key_that_beats_another() -> None:
    trial = right("indexer_topk/k64/length65")
    last, best, gap = at_the_cut(trial, 0, 65)

    def swap(outputs: dict[str, torch.Tensor]) -> None:
        row = outputs["out"][0]
        row[row == last] = best

    found = problems(trial, swap)[0]
    assert found.startswith(f"out: row 0: a key that is left out beats a selected one by {gap:.3g}, budget ")
    assert float(found.rpartition(" ")[2]) < gap


def test_keys_at_the_cut_may_change_places_if_their_scores_are_within_the_budget() -> None:
    """A kernel whose sums round otherwise selects by its own scores, and is right to."""
    trial = right("indexer_topk/bf16-ties", seed=35)
    last, best, gap = at_the_cut(trial, 0, 400)
    assert 0 < gap < 0.1, "a bfloat16 score of this size is rounded by up to 0.25"

    def otherwise(outputs: dict[str, torch.Tensor]) -> None:
        own = outputs["all_scores_out"][0]
        own[best] = torch.nextafter(own[last], own[last] + 1)
        at = outputs["out"][0] == last
        outputs["out"][0][at] = best
        outputs["scores_out"][0][at] = own[best]

    assert problems(trial, otherwise) == []


def test_a_fused_selection_is_exact_on_its_own_scores() -> None:
    trial = right("indexer_topk/k64/length65")

    def raised(outputs: dict[str, torch.Tensor]) -> None:
        left_out = (set(range(65)) - set(outputs["out"][0].tolist())).pop()
        outputs["all_scores_out"][0, left_out] = 1e3

    names = {text.partition(": ")[0] for text in problems(trial, raised)}
    assert names == {"all_scores_out", "out, on its own scores"}


def test_a_fused_selection_with_a_key_twice_is_wrong() -> None:
    def twice(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0, 1] = outputs["out"][0, 0]

    found = problems(right("indexer_topk/k64/length65"), twice)
    assert "out: row 0: 63 distinct keys of 64, expected 64 of 65" in found


def test_a_fused_selection_that_lacks_a_key_is_wrong() -> None:
    def lacking(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0, 62] = -1

    found = problems(right("indexer_topk/k64/length63"), lacking)
    assert "out: row 0: 62 distinct keys of 62, expected 63 of 63" in found


PAGELESS = "indexer_topk/edges/slots-without-page"


def test_a_selected_key_without_a_page_drops_out_of_slots() -> None:
    trial = right(PAGELESS)
    assert problems(trial, lambda outputs: None) == []
    assert (trial.got.outputs["out"] >= 0).sum(dim=1).tolist() == [128, 72, 128, 64]


def test_a_slot_of_a_page_behind_the_cache_is_wrong() -> None:
    def behind(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0, 128] = 4 * 64

    assert any("entries differ" in text for text in problems(right(PAGELESS), behind))


def test_slots_are_judged_by_the_positions_that_they_hold() -> None:
    trial = right("indexer_topk/slots")
    assert problems(trial, lambda o: shuffled(o, "out")) == []

    def position(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0, :32] = torch.arange(32)

    assert problems(trial, position)


# --- scores ---------------------------------------------------------------------------------------------


def test_columns_behind_a_rows_keys_may_hold_anything() -> None:
    def poison(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][0, 65:] = torch.nan
        outputs["out"][1, 1:] = 7.0

    assert problems(right("indexer_logits/index.mxfp4.page64/ragged"), poison) == []


def test_scores_of_a_neighbour_are_wrong() -> None:
    def shifted(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"] = outputs["out"].roll(1, dims=1)

    assert problems(right("indexer_logits/heads8"), shifted)


# --- routes ---------------------------------------------------------------------------------------------


def test_the_order_of_routes_is_free() -> None:
    def turned(outputs: dict[str, torch.Tensor]) -> None:
        for name in ("ids_out", "weights_out"):
            outputs[name] = outputs[name].flip(1)

    assert problems(right("moe_route/k3/rows17"), turned) == []
    assert problems(right("moe_route/k3-ordered/rows17"), turned)


def test_weights_must_follow_their_expert() -> None:
    def turned(outputs: dict[str, torch.Tensor]) -> None:
        outputs["weights_out"] = outputs["weights_out"].flip(1)

    found = problems(right("moe_route/k3/rows17"), turned)
    assert [text.partition(":")[0] for text in found] == ["weights_out"]


def test_another_expert_is_wrong() -> None:
    def other(outputs: dict[str, torch.Tensor]) -> None:
        outputs["ids_out"][9, 3] = (set(range(896)) - set(outputs["ids_out"][9].tolist())).pop()

    assert problems(right("moe_route/k3/rows17"), other)[0].startswith("ids_out: ")


# --- values ---------------------------------------------------------------------------------------------


def scaled(name: str, factor: float) -> Change:
    def change(outputs: dict[str, torch.Tensor]) -> None:
        outputs[name] = (outputs[name].double() * factor).to(outputs[name].dtype)

    return change


WRONG: dict[str, tuple[str, Change]] = {
    "a gain of one percent": ("sparse_mla/rows1/keys65", scaled("out", 1.01)),
    "all zeros": ("sparse_mla/rows1/keys65", scaled("out", 0.0)),
    "LSE in base 2": ("sparse_mla/rows1/keys65", scaled("lse_out", 1.4426950408889634)),
    "experts off by one percent": ("moe_experts/small/rows9", scaled("out", 1.01)),
    "a layer off by two percent": ("moe_layer/one-rank/rows9", scaled("out", 1.02)),
    "a state's output off": ("kda_layer_decode/tp32/rows6", scaled("out", 0.99)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_is_refused(what: str) -> None:
    case_id, change = WRONG[what]
    assert any("times its budget" in text for text in problems(right(case_id), change))


def test_swapped_heads_are_refused() -> None:
    def swap(outputs: dict[str, torch.Tensor]) -> None:
        outputs["out"][:, [0, 1]] = outputs["out"][:, [1, 0]]

    assert problems(right("sparse_mla/rows1/keys65"), swap)


def test_packed_bytes_are_exact() -> None:
    trial = right("store_latent/latent.nvfp4.352/page64/rows33")
    slot = int(trial.question.operands["slots"][0])
    page, offset = slot // 64, slot % 64 * 352
    trial.got.mutated["cache"][page, offset] ^= 1  # type: ignore[index]
    assert problems(trial)[0].startswith(
        f"cache: 1 of 90112 entries differ; first at [{page}, {offset}]: got "
    )


def test_a_state_that_another_slot_should_have_kept_is_refused() -> None:
    trial = right("kda_decode/odd/rows6")
    states: Any = trial.got.mutated["state"]
    states[1] = states[0]
    assert problems(trial)[0].startswith("state: error ")


def test_records_are_nobodys_to_compare() -> None:
    case = cases.get("kda_verify/odd/drafts")
    question = Question(ops.get("kda_verify"), case.spec, case.limits, case.make(cases.generator(case, 0)))
    exact, reference = (answer(question, dtype) for dtype in (torch.float64, torch.float32))
    got = Answer({"out": exact.outputs["out"].bfloat16()}, {"records": torch.zeros(3, dtype=torch.uint8)})
    measures = list(judge("kda_verify")(Trial(question, got, exact, reference)))
    assert [(m.tensor, m.problem) for m in measures] == [("out", "")]


@pytest.mark.parametrize(
    ("was", "becomes", "problem"),
    [
        ("-0.0", "0.0", ["conv_state: 1 of 2592 entries differ; first at [1, 0, 0]: got 0, expected -32768"]),
        ("-0.0", "-0.0", []),
    ],
)
def test_a_stored_input_keeps_the_sign_of_its_zero(was: str, becomes: str, problem: list[str]) -> None:
    trial = right("kda_conv/edges/signed-zeros")
    stored = trial.got.mutated["conv_state"]
    assert str(stored[1, 0, 0].item()) == was
    stored[1, 0, 0] = float(becomes)
    assert problems(trial) == problem
