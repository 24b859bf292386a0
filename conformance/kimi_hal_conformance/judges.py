"""How an answer is judged. Floating point goes by its budget, discrete results are exact.

An operator whose contract leaves an order free, or whose discrete result depends on scores that another
implementation computes with other rounding, has a judge of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.parallel import ownership
from kimi_hal_conformance.budget import ACCUMULATION_MAX, ROUNDING_MAX, compare, compare_exact
from kimi_hal_conformance.oracle import Answer, Question, answer
from kimi_hal_conformance.verdict import Measure


@dataclass(frozen=True)
class Trial:
    """One run to be judged: the call, what came out, the oracle's answer and the float32 reference's."""

    question: Question
    got: Answer
    exact: Answer
    reference: Answer

    @property
    def spec(self) -> Any:
        """Return the Spec."""
        return self.question.spec


Judge = Callable[[Trial], Iterator[Measure]]
OPAQUE = {"kda_verify": ("records",)}


def by_value(trial: Trial) -> Iterator[Measure]:
    """Compare every output and every mutated buffer, except bytes that only the implementation can read."""
    opaque = OPAQUE.get(trial.question.op.name, ())
    for kind in ("outputs", "mutated"):
        got, exact, reference = (getattr(a, kind) for a in (trial.got, trial.exact, trial.reference))
        for name, tensor in got.items():
            if name not in opaque:
                yield judge_tensor(name, tensor, exact[name], reference[name])


def judge_tensor(name: str, got: Tensor, exact: Tensor, reference: Tensor) -> Measure:
    """Compare one tensor by its kind; one-byte floating point is packed data and exact."""
    if got.element_size() == 1:
        return compare_exact(name, got.view(torch.uint8), exact.to(got.dtype).view(torch.uint8))
    if got.is_floating_point():
        return compare(name, got, exact, reference)
    return compare_exact(name, got, exact.to(got.dtype))


def by_bytes(trial: Trial) -> Iterator[Measure]:
    """Compare moved data byte for byte."""
    for name, tensor in trial.got.outputs.items():
        exact = trial.exact.outputs[name].contiguous()
        same_shape = tensor.shape == exact.shape and tensor.numel()
        yield (
            compare_exact(name, tensor.contiguous().view(torch.uint8), exact.view(torch.uint8))
            if same_shape
            else (compare_exact(name, tensor, exact))
        )


def by_local_columns(trial: Trial) -> Iterator[Measure]:
    """Compare scores in the columns that are keys; what stands beyond is unspecified."""
    got, exact = trial.got.outputs["out"], trial.exact.outputs["out"]
    lengths = local_lengths(trial, got.shape[1])
    keys = torch.arange(got.shape[1]) < lengths[:, None]
    pad = exact.shape[1] - got.shape[1]
    if pad < 0:
        yield Measure(tensor="out", exact=False, problem=f"{got.shape[1]} columns, expected {exact.shape[1]}")
        return
    reference = trial.reference.outputs["out"]
    parts = (t[:, : got.shape[1]].where(keys, 0.0) for t in (got, exact, reference))
    yield compare("out", *parts)


def local_lengths(trial: Trial, width: int) -> Tensor:
    """Return how many local keys each row may see, clamped to the block table."""
    operands, spec = trial.question.operands, trial.spec
    reach = operands["block_table"].shape[1] * spec.page if "block_table" in operands else width
    lengths = ownership.local_length(operands["row_len"].long(), ownership.of_keys(spec.dcp))
    return lengths.clamp(0, min(width, reach))


def by_selected_set(trial: Trial) -> Iterator[Measure]:
    """Compare selections exactly, as sets unless their order is asked for; scores follow their index."""
    got, exact = trial.got.outputs, trial.exact.outputs
    mine, theirs = got["out"], exact["out"].int()
    yield front_compacted("out", mine)
    if not trial.spec.ordered:
        mine, theirs = mine.sort(dim=1).values, theirs.sort(dim=1).values
    yield compare_exact("out", mine, theirs)
    if trial.spec.return_selected:
        order_got, order_exact = (
            got["out"].argsort(dim=1, stable=True),
            exact["out"].argsort(dim=1, stable=True),
        )
        chosen = exact["scores_out"].to(got["scores_out"].dtype)
        yield compare_exact(
            "scores_out", got["scores_out"].gather(1, order_got), chosen.gather(1, order_exact)
        )


def front_compacted(name: str, indices: Tensor) -> Measure:
    """Say whether every −1 of a row stands behind all its winners, and no other negative number is there."""
    empty = indices < 0
    if bool((empty[:, :-1] & ~empty[:, 1:]).any()):
        return Measure(tensor=name, exact=True, problem="a −1 stands before a selected position")
    if bool((indices[empty] != -1).any()):
        return Measure(tensor=name, exact=True, problem="an unused entry is not −1")
    return Measure(tensor=name, exact=True)


def by_scores(trial: Trial) -> Iterator[Measure]:
    """Judge a fused selection: the right number of distinct keys, none beaten by more than the score budget."""
    spec, got = trial.spec, trial.got.outputs["out"]
    exact, reference = (all_scores(trial, dtype) for dtype in (torch.float64, torch.float32))
    score = torch.bfloat16 if spec.score == "bfloat16" else torch.float32
    lengths = local_lengths(trial, exact.shape[1])
    keys = torch.arange(exact.shape[1]) < lengths[:, None]
    rounding = (exact.to(score).double() - exact).abs().where(keys, 0.0).amax() if exact.numel() else 0.0
    drift = (reference.double() - exact).abs().where(keys, 0.0).amax() if exact.numel() else 0.0
    slack = float(ROUNDING_MAX * rounding + ACCUMULATION_MAX * drift)
    yield front_compacted("out", got)
    yield from _fair(as_positions(trial, got), exact, lengths, slack, spec)
    if spec.return_selected:
        at = as_positions(trial, got).clamp(min=0).long()
        chosen = [t.gather(1, at).where(got >= 0, -torch.inf) for t in (exact, reference)]
        yield compare("scores_out", trial.got.outputs["scores_out"], *chosen)


def all_scores(trial: Trial, dtype: torch.dtype) -> Tensor:
    """Return the reference's score of every key of every row."""
    from kimi_hal.ops.indexer import IndexerSpec

    fields = {f: v for f, v in trial.spec.to_dict().items() if f in IndexerSpec.__dataclass_fields__}
    spec = IndexerSpec.from_dict(fields)
    return answer(replace(trial.question, op=ops.get("indexer_logits"), spec=spec), dtype).outputs["out"]


def as_positions(trial: Trial, indices: Tensor) -> Tensor:
    """Return local positions where the Spec emits physical slots."""
    if trial.spec.emit == "local":
        return indices
    operands, page = trial.question.operands, trial.spec.page
    found = torch.full_like(indices, -1)
    for row in range(indices.shape[0]):
        request = int(operands["row_req"][row])
        if not 0 <= request < operands["block_table"].shape[0]:
            continue
        column = {int(p): c for c, p in enumerate(operands["block_table"][request].tolist()) if p >= 0}
        for j, slot in enumerate(indices[row].tolist()):
            if slot >= 0 and slot // page in column:
                found[row, j] = column[slot // page] * page + slot % page
    return found


def _fair(positions: Tensor, exact: Tensor, lengths: Tensor, slack: float, spec: Any) -> Iterator[Measure]:
    for row, length in enumerate(lengths.tolist()):
        picked = positions[row][positions[row] >= 0].long()
        wanted = min(spec.topk, length)
        if picked.numel() != wanted or picked.unique().numel() != wanted or bool((picked >= length).any()):
            problem = (
                f"row {row}: {picked.unique().numel()} distinct keys in range, expected {wanted} of {length}"
            )
            yield Measure(tensor="out", exact=True, problem=problem)
            continue
        if spec.ordered and bool((picked.diff() <= 0).any()):
            yield Measure(tensor="out", exact=True, problem=f"row {row}: positions do not ascend")
        rest = torch.ones(length, dtype=torch.bool)
        rest[picked] = False
        if not rest.any() or not picked.numel():
            continue
        gap = float(exact[row, :length][rest].max() - exact[row, picked].min())
        problem = f"row {row}: an unselected key beats a selected one by {gap:.3g}, budget {slack:.3g}"
        yield Measure(tensor="out", exact=True, problem=problem if gap > slack else "")


def by_routes(trial: Trial) -> Iterator[Measure]:
    """Compare routes as maps from expert to weight; the order counts only where it is asked for."""
    got, exact, reference = (a.outputs for a in (trial.got, trial.exact, trial.reference))
    mine, theirs = got["ids_out"], exact["ids_out"].int()
    if trial.spec.ordered:
        yield compare_exact("ids_out", mine, theirs)
    order = [ids.argsort(dim=1, stable=True) for ids in (mine, theirs, reference["ids_out"])]
    yield compare_exact("ids_out", mine.gather(1, order[0]), theirs.gather(1, order[1]))
    weights = [a["weights_out"].gather(1, o) for a, o in zip((got, exact, reference), order, strict=True)]
    yield compare("weights_out", *weights)


def by_winners(trial: Trial) -> Iterator[Measure]:
    """Compare merged winners exactly; the local ones ascend, the global ones are a set unless ordered."""
    got, exact = trial.got.outputs, trial.exact.outputs
    yield compare_exact("local_out", got["local_out"], exact["local_out"].int())
    yield compare_exact("len_out", got["len_out"], exact["len_out"].int())
    mine, theirs = got["global_out"], exact["global_out"].int()
    if trial.spec.return_global and not trial.spec.ordered:
        yield front_compacted("global_out", mine)
        mine, theirs = mine.sort(dim=1).values, theirs.sort(dim=1).values
    yield compare_exact("global_out", mine, theirs)


def by_use(trial: Trial) -> Iterator[Measure]:
    """Judge prepared weights, which only their implementation can read, by what they are made of."""
    prepared = trial.got.outputs["weights"]
    ok = isinstance(prepared, list) and bool(prepared) and all(isinstance(t, Tensor) for t in prepared)
    yield Measure(tensor="weights", exact=True, problem="" if ok else "not a list of tensors")


JUDGES: dict[str, Judge] = {
    "all_gather": by_bytes,
    "indexer_logits": by_local_columns,
    "indexer_topk": by_scores,
    "moe_route": by_routes,
    "prepare_moe_weights": by_use,
    "topk_merge": by_winners,
    "topk_select": by_selected_set,
}


def judge(operator: str) -> Judge:
    """Return the operator's judge."""
    return JUDGES.get(operator, by_value)
