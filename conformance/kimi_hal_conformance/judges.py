"""How an answer is judged. Floating point goes by its budget, discrete results are exact.

An operator whose contract leaves an order free, or whose discrete result depends on scores that another
implementation computes with other rounding, has a judge of its own (``selections.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kimi_hal_conformance.budget import NO_CLASSES, Classes, compare, compare_exact
from kimi_hal_conformance.selections import (
    by_given_scores,
    by_scores,
    by_selected_set,
    by_winners,
    local_lengths,
)
from kimi_hal_conformance.trial import PLAIN, Declared, Trial
from kimi_hal_conformance.verdict import Measure
from kimi_hal_conformance.writers import WRITERS, by_query, by_tie

Judge = Callable[[Trial], Iterator[Measure]]
#: Buffers whose bytes only the implementation itself can read.
OPAQUE = {"kda_verify": ("records",)}


def by_value(trial: Trial) -> Iterator[Measure]:
    """Compare every output and every mutated buffer, except bytes that only the implementation can read."""
    opaque = OPAQUE.get(trial.question.op.name, ())
    for kind in ("outputs", "mutated"):
        got, exact, reference = (getattr(a, kind) for a in (trial.got, trial.exact, trial.reference))
        inner = getattr(trial.inner, kind) if trial.inner else {}
        for name, tensor in got.items():
            if name not in opaque:
                classes = trial.rounded(kind, name)
                others = [getattr(other, kind)[name] for other in trial.others]
                yield judge_tensor(
                    name, tensor, exact[name], reference[name], inner.get(name), classes, others
                )


def judge_tensor(
    name: str,
    got: Tensor,
    exact: Tensor,
    reference: Tensor,
    inner: Tensor | None = None,
    classes: Classes = NO_CLASSES,
    others: Sequence[Tensor] = (),
) -> Measure:
    """Compare one tensor by its kind; one-byte floating point is packed data and exact."""
    if got.element_size() == 1:
        return compare_exact(name, got.view(torch.uint8), exact.to(got.dtype).view(torch.uint8))
    if got.is_floating_point():
        return compare(name, got, exact, reference, inner, classes, others)
    return compare_exact(name, got, exact.to(got.dtype))


def by_stored_inputs(trial: Trial) -> Iterator[Measure]:
    """Compare by value, but the inputs that a convolution stored in their bits, in which −0 is not +0.

    Any NaN equals any NaN: one that passes through another type may come back with another payload.
    """
    got, exact = (answer.mutated["conv_state"] for answer in (trial.got, trial.exact))
    bits = [as_bits(stored.to(got.dtype)) for stored in (got, exact)]
    for measure in by_value(trial):
        if measure.tensor == "conv_state" and not measure.problem:
            yield compare_exact("conv_state", *bits)
        else:
            yield measure


def as_bits(tensor: Tensor) -> Tensor:
    """Return a bfloat16 tensor's bits as int16, those of every NaN the same."""
    return tensor.masked_fill(tensor.isnan(), torch.nan).contiguous().view(torch.int16)


def by_bytes(trial: Trial) -> Iterator[Measure]:
    """Compare moved data byte for byte."""
    for name, tensor in trial.got.outputs.items():
        exact = trial.exact.outputs[name].contiguous()
        if tensor.shape == exact.shape and tensor.numel():
            yield compare_exact(name, tensor.contiguous().view(torch.uint8), exact.view(torch.uint8))
        else:
            yield compare_exact(name, tensor, exact)


def by_local_columns(trial: Trial) -> Iterator[Measure]:
    """Compare scores in the columns that are keys; what stands beyond is unspecified."""
    scores = [answer.outputs["out"] for answer in (trial.got, trial.exact, trial.reference)]
    width = min(s.shape[1] for s in scores)
    keys = torch.arange(width) < local_lengths(trial, width)[:, None]
    rounded = {
        name: [s[:, :width].where(keys, 0.0) for s in ways]
        for name, ways in trial.rounded("outputs", "out").items()
    }
    mine, exact, reference = (s[:, :width].where(keys, 0.0) for s in scores)
    yield compare("out", mine, exact, reference, classes=rounded)


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


JUDGES: Mapping[str, Judge] = {
    "all_gather": by_bytes,
    "indexer_logits": by_local_columns,
    "indexer_topk": by_scores,
    "kda_conv": by_stored_inputs,
    "moe_route": by_routes,
    "quantize_index_query": by_query,
    "topk_merge": by_winners,
    "topk_select": by_selected_set,
}


#: Selections that may break ties as they like.
ANY_TIE: Mapping[str, Judge] = {"topk_select": by_given_scores, "indexer_topk": by_scores}


def judge(operator: str, declared: Declared = PLAIN) -> Judge:
    """Return the operator's judge for what an implementation declares."""
    if declared.writer_tie != "even" and operator in WRITERS:
        return by_tie
    if declared.tie_rule != "contract" and operator in ANY_TIE:
        return ANY_TIE[operator]
    return JUDGES.get(operator, by_value)
