"""How selections are judged: exactly for given scores, by the score budget where scores are computed inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import selection
from kimi_hal.reference.topk_merge import topk_select
from kimi_hal_conformance.budget import (
    ACCUMULATION_MAX,
    INNER_MAX,
    NO_CLASSES,
    ROUNDING_MAX,
    Classes,
    compare,
    compare_exact,
    wrong,
)
from kimi_hal_conformance.classes import derived
from kimi_hal_conformance.oracle import Question, answer
from kimi_hal_conformance.trial import Trial
from kimi_hal_conformance.verdict import Measure


def local_lengths(trial: Trial, width: int) -> Tensor:
    """Return how many local keys each row of a trial may see, clamped to the block table and to ``width``."""
    return keys_of(trial.question, width)


def keys_of(question: Question, width: int) -> Tensor:
    """Return how many local keys each row may see, clamped to the block table and to ``width``."""
    operands = question.operands
    spec: Any = question.spec
    reach = operands["block_table"].shape[1] * spec.page if "block_table" in operands else width
    lengths: Tensor = ownership.local_length(operands["row_len"].long(), ownership.of_keys(spec.dcp))
    return lengths.clamp(0, min(width, reach))


def front_compacted(name: str, indices: Tensor) -> Measure:
    """Say whether every −1 of a row stands behind all its winners, and no other negative number is there."""
    empty = indices < 0
    if bool((empty[:, :-1] & ~empty[:, 1:]).any()):
        return wrong(name, "a −1 stands before a selected position", exact=True)
    if bool((indices[empty] != -1).any()):
        return wrong(name, "an unused entry is not −1", exact=True)
    return Measure(tensor=name, exact=True)


def by_selected_set(trial: Trial) -> Iterator[Measure]:
    """Compare selections exactly, as sets unless their order is asked for; scores follow their index."""
    got, exact = trial.got.outputs, trial.exact.outputs
    yield from same_selection(got["out"], exact["out"].int(), trial.spec.ordered)
    if trial.spec.return_selected:
        mine, theirs = got["scores_out"], exact["scores_out"].to(got["scores_out"].dtype)
        order = (o["out"].argsort(dim=1, stable=True) for o in (got, exact))
        yield compare_exact(
            "scores_out", *(s.gather(1, o) for s, o in zip((mine, theirs), order, strict=True))
        )


def same_selection(got: Tensor, expected: Tensor, ordered: bool, name: str = "out") -> Iterator[Measure]:
    """Compare two selections: front-compacted, equal as sets, and in order where it is asked for."""
    yield front_compacted(name, got)
    if not ordered:
        got, expected = got.sort(dim=1).values, expected.sort(dim=1).values
    yield compare_exact(name, got, expected)


def by_given_scores(trial: Trial) -> Iterator[Measure]:
    """Compare a selection whose ties go anywhere: its scores are those of the right one, key by key distinct.

    No key that is left out then beats a selected one.
    """
    got, exact, operands = trial.got.outputs, trial.exact.outputs, trial.question.operands
    mine, theirs = got["out"], exact["out"]
    yield front_compacted("out", mine)
    start = operands["row_start"] if "row_start" in operands else torch.zeros_like(operands["row_len"])
    scores = operands["scores"].to(getattr(torch, trial.spec.score))
    first = start.long().clamp(0, scores.shape[1])
    yield compare_exact("out, how many", (mine >= 0).sum(1), (theirs >= 0).sum(1))
    lengths = ownership.local_length(operands["row_len"].long(), ownership.of_keys(trial.spec.dcp))
    count = torch.minimum(lengths, scores.shape[1] - first).clamp(min=0)
    inside = (mine < count[:, None]).where(mine >= 0, True)
    yield compare_exact("out, keys alone", inside, torch.ones_like(inside))
    ordered = mine.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    yield compare_exact("out, keys twice", twice, torch.zeros_like(twice))
    if trial.spec.ordered:
        apart = mine.diff(dim=1)[mine[:, 1:] >= 0]
        yield compare_exact("out, ascending", apart > 0, torch.ones_like(apart, dtype=torch.bool))
    chosen = [_ranked(scores, first, index) for index in (mine, theirs)]
    yield compare_exact("scores of out", *(c.sort(dim=1).values for c in chosen))
    if trial.spec.return_selected:
        at = mine >= 0
        yield compare_exact(
            "scores_out", got["scores_out"].where(at, 0), _picked(scores, first, mine).where(at, 0)
        )


def _picked(scores: Tensor, first: Tensor, index: Tensor) -> Tensor:
    """Return the scores of selected positions, of anything where there is none."""
    column = (first[:, None] + index.long().clamp(min=0)).clamp(max=max(scores.shape[1] - 1, 0))
    if not scores.shape[1]:
        return scores.new_zeros(index.shape)
    return scores.gather(1, column)


def _ranked(scores: Tensor, first: Tensor, index: Tensor) -> Tensor:
    """Return selected scores as numbers in the contract's order: NaN below −inf, nothing below NaN."""
    found = selection.ordinal(_picked(scores, first, index))
    return found.long().where(index >= 0, torch.iinfo(torch.int64).min)


def by_winners(trial: Trial) -> Iterator[Measure]:
    """Compare merged winners exactly: local ones and global ones ascend, −1 behind them."""
    for name, tensor in trial.got.outputs.items():
        yield compare_exact(name, tensor, trial.exact.outputs[name].int())


def by_scores(trial: Trial) -> Iterator[Measure]:
    """Judge a fused selection.

    Against the oracle, no key that is left out may beat a selected one by more than the score budget. Against
    the scores that the implementation itself computes (its test entry), the selection is exact.
    """
    got, spec = trial.got.outputs, trial.spec
    exact, reference = (all_scores(trial, dtype) for dtype in (torch.float64, torch.float32))
    lengths = local_lengths(trial, exact.shape[1])
    positions = as_positions(trial, got["out"])
    yield front_compacted("out", got["out"])
    classes = score_classes(trial)
    slack = score_slack(getattr(torch, spec.score), exact, reference, lengths, classes)
    paged = with_page(trial, exact.shape[1])
    for problem in unfair(spec, positions, exact, lengths, slack, paged):
        yield wrong("out", problem, exact=True)
    if spec.return_selected:
        at = positions.clamp(0, exact.shape[1] - 1).long()
        x, theirs, *ways = (
            t.gather(1, at).where(positions >= 0, -torch.inf) for t in (exact, reference, *every(classes))
        )
        yield compare("scores_out", got["scores_out"], x, theirs, classes=_regrouped(classes, ways))
    yield from _by_own_scores(trial, positions, exact, reference, lengths, paged, classes)


def _by_own_scores(
    trial: Trial,
    positions: Tensor,
    exact: Tensor,
    reference: Tensor,
    lengths: Tensor,
    paged: Tensor,
    classes: Classes,
) -> Iterator[Measure]:
    """Hold all scores to their budget, and the selection to what it must be on them."""
    own, spec = trial.got.outputs["all_scores_out"], trial.spec
    keys = torch.arange(exact.shape[1]) < lengths[:, None]
    mine, x, theirs, *ways = (t.where(keys, 0.0) for t in (own, exact, reference, *every(classes)))
    yield compare("all_scores_out", mine, x, theirs, classes=_regrouped(classes, ways))
    select = TopKSpec(topk=spec.topk, score=spec.score, scores_dtype=spec.score, ordered=spec.ordered)
    expected = emitted(topk_select(select, own, lengths.int())[0], paged)
    if trial.declared.tie_rule == "contract":
        yield from same_selection(positions, expected.int(), spec.ordered, "out, on its own scores")
        return
    chosen = [_ranked(own, torch.zeros_like(lengths), index) for index in (positions, expected)]
    yield compare_exact("scores of out", *(c.sort(dim=1).values for c in chosen))


def score_classes(trial: Trial) -> Classes:
    """Return all scores with the roundings of each declared class made, in each way that there is."""
    found = derived(scores_of(trial.question), trial.declared.numerics)
    return {name: [way.outputs["out"] for way in ways] for name, ways in found.items()}


def every(classes: Classes) -> list[Tensor]:
    """Return the scores of all classes, one way after another."""
    return [way for ways in classes.values() for way in ways]


def _regrouped(classes: Classes, ways: Sequence[Tensor]) -> Classes:
    """Return what was made of ``every`` way, class by class again."""
    left = iter(ways)
    return {name: [next(left) for _ in own] for name, own in classes.items()}


def scores_of(question: Question) -> Question:
    """Return the call of ``indexer_logits`` that computes the scores inside a fused selection."""
    fields = {f.name: getattr(question.spec, f.name) for f in dataclasses.fields(IndexerSpec)}
    return dataclasses.replace(question, op=ops.get("indexer_logits"), spec=IndexerSpec(**fields))


def all_scores(trial: Trial, dtype: torch.dtype) -> Tensor:
    """Return the reference's score of every key of every row, unrounded."""
    scores: Tensor = answer(scores_of(trial.question), dtype).outputs["out"]
    return scores


def score_slack(
    score: torch.dtype, exact: Tensor, reference: Tensor, lengths: Tensor, classes: Classes = NO_CLASSES
) -> float:
    """Return how much worse than one left out a selected score may be: the budget of a score, twice rounded.

    Declared classes add what they cost.
    """
    keys = (torch.arange(exact.shape[1]) < lengths[:, None]) & exact.isfinite()
    if not bool(keys.any()):
        return 0.0
    rounding, drift = (largest(t, exact, keys) for t in (exact.to(score), reference))
    costs = (max(largest(way, exact, keys) for way in ways) for ways in classes.values() if ways)
    return ROUNDING_MAX * rounding + ACCUMULATION_MAX * drift + INNER_MAX * sum(costs)


def largest(approximate: Tensor, exact: Tensor, keys: Tensor) -> float:
    """Return the largest error over some keys."""
    return float((approximate.double() - exact)[keys].abs().max())


def unfair(
    spec: IndexerTopKSpec, positions: Tensor, exact: Tensor, lengths: Tensor, slack: float, paged: Tensor
) -> Iterator[str]:
    """Yield what is wrong with a selection under the oracle's scores; ``paged`` are the keys that it may emit."""
    ranked = exact.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    kept = lengths.clamp(max=spec.topk).tolist()
    if spec.emit == "slot":
        selected, _ = topk_select(TopKSpec(topk=spec.topk), exact.float(), lengths.int())
        kept = (emitted(selected, paged) >= 0).sum(dim=1).tolist()
    for row, length in enumerate(lengths.tolist()):
        picked = positions[row][positions[row] >= 0].long()
        wanted, distinct = kept[row], len(set(picked.tolist()))
        if picked.numel() != wanted or distinct != wanted or bool((picked >= length).any()):
            yield f"row {row}: {distinct} distinct keys of {picked.numel()}, expected {wanted} of {length}"
            continue
        if spec.ordered and bool((picked.diff() <= 0).any()):
            yield f"row {row}: positions do not ascend"
        rest = paged[row, :length].clone()
        rest[picked] = False
        if not rest.any() or not picked.numel():
            continue
        gap = float(ranked[row, :length][rest].max() - ranked[row, picked].min())
        if gap > slack:
            yield f"row {row}: a key that is left out beats a selected one by {gap:.3g}, budget {slack:.3g}"


def with_page(trial: Trial, width: int) -> Tensor:
    """Tell which local positions of each row a selection may emit: all, or as slots those that have a page."""
    operands, spec = trial.question.operands, trial.spec
    rows = operands["row_len"].shape[0]
    if spec.emit == "local":
        return torch.ones(rows, width, dtype=torch.bool)
    table = operands["block_table"]
    there = (table >= 0) & (table < operands["cache"].shape[0])
    request = operands["row_req"].long()
    known = (request >= 0) & (request < table.shape[0])
    lines: Tensor = there[request.clamp(0, max(table.shape[0] - 1, 0))] & known[:, None]
    return lines.repeat_interleave(spec.page, dim=1)[:, :width]


def emitted(index: Tensor, paged: Tensor) -> Tensor:
    """Return what is emitted of selected positions ``[T, k]``: those without a page drop out, the others close up."""
    if not paged.shape[1]:
        return index
    there = (index >= 0) & paged.gather(1, index.long().clamp(0, paged.shape[1] - 1))
    return selection.ascending(index.where(there, -1))


def as_positions(trial: Trial, indices: Tensor) -> Tensor:
    """Return local positions where the Spec emits physical slots; a slot of no page of the row becomes −1."""
    if trial.spec.emit == "local":
        return indices
    operands, page = trial.question.operands, trial.spec.page
    found = torch.full_like(indices, -1)
    for row in range(indices.shape[0]):
        request = int(operands["row_req"][row])
        if 0 <= request < operands["block_table"].shape[0]:
            found[row] = _positions(indices[row], operands["block_table"][request], page)
    return found


def _positions(slots: Tensor, pages: Tensor, page: int) -> Tensor:
    column = {p: c for c, p in enumerate(pages.tolist()) if p >= 0}
    places = [column.get(slot // page, -1) * page + slot % page for slot in slots.tolist()]
    return torch.tensor([place if place >= 0 else -1 for place in places], dtype=slots.dtype)
