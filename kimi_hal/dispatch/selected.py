"""Compare selections in a shadow check: as sets, and where the scores are computed, up to near ties.

Two right kernels that add in another order may differ in the last bit of a score, and so in which of two
nearly equal keys they select. A selection from given scores has no such freedom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import budget
from kimi_hal.ops.operator import Operator, get

#: Scores closer than this share of the row's largest count as a tie; a bfloat16 score has a unit of 2^-8.
CLOSE = {"float32": 2.0**-12, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Selection:
    """How an operator's outputs hold a selection.

    Args:
        ids: the outputs that are sets of ids in each row; the order in a row is free.
        valued: output aligned with the first of them -> compared in the order of the ids.
        scores: (spec, operands, rows) -> the reference's float32 scores ``[rows, ids]`` of those rows and the
            dtype name they are rounded to; ``None`` where the scores are operands: then no tie is near.
    """

    ids: tuple[str, ...]
    valued: tuple[str, ...] = ()
    scores: Callable[[Any, Mapping[str, Any], Any], tuple[Any, str]] | None = None


def _index_scores(spec: Any, given: Mapping[str, Any], rows: Any) -> tuple[Any, str]:
    from kimi_hal.reference.indexer import indexer_logits

    names = list(get("indexer_logits").args)
    by_row = {"q", "q_scale", "weights", "row_req", "row_len"}
    given = {n: _rows(given[n], rows) if n in by_row else given[n] for n in names}
    return indexer_logits(spec, **given), spec.score


def _rows(tensor: Any, rows: Any) -> Any:
    """Return some rows; FP8, which torch cannot index on every device, as bytes."""
    import torch

    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def _route_scores(spec: Any, given: Mapping[str, Any], rows: Any) -> tuple[Any, str]:
    return given["logits"][rows].sigmoid() + given["bias"], "float32"


SELECTIONS = {
    "indexer_topk": Selection(("out",), ("scores_out",), _index_scores),
    "topk_select": Selection(("out",), ("scores_out",)),
    "topk_merge": Selection(("local_out", "global_out")),
    "moe_route": Selection(("ids_out",), ("weights_out",), _route_scores),
}


def differences(
    op: Operator,
    spec: Any,
    given: Mapping[str, Any],
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    numerics: tuple[str, ...],
) -> Iterator[str]:
    """Yield one sentence for each output of a selection that differs. Outputs are by keyword."""
    rule = SELECTIONS[op.name]
    first = rule.ids[0]
    same = (actual[first].sort(dim=1).values == expected[first].sort(dim=1).values).all(dim=1)
    for name in rule.ids:
        yield from _sets(rule, name, spec, given, actual[name], expected[name])
    for name in rule.valued:
        mine, theirs = (_by_id(out[first], out[name])[same] for out in (actual, expected))
        yield from budget.floats(name, mine, theirs, numerics)
    for out in op.outs:
        if out.keyword not in rule.ids + rule.valued:
            yield from budget.buffers(out.keyword, actual[out.keyword], expected[out.keyword], numerics)


def _sets(
    rule: Selection, name: str, spec: Any, given: Mapping[str, Any], actual: Any, expected: Any
) -> Iterator[str]:
    differ = (actual.sort(dim=1).values != expected.sort(dim=1).values).any(dim=1)
    rows = differ.nonzero()[:, 0]
    if rows.numel() and rule.scores is not None and getattr(spec, "emit", "") != "slot":
        scores, dtype = rule.scores(spec, given, rows)
        rows = rows[~_near(scores, actual[rows], expected[rows], CLOSE[dtype])]
    if rows.numel():
        row = int(rows[0])
        mine, theirs = set(actual[row].tolist()), set(expected[row].tolist())
        yield (
            f"{name} selects another set in {rows.numel()} of {actual.shape[0]} rows; row {row} has "
            f"{_some(mine - theirs)} where the reference has {_some(theirs - mine)}"
        )


def _near(scores: Any, actual: Any, expected: Any, close: float) -> Any:
    """Tell for each row whether what was selected wrongly scores within a near tie of what was left out."""
    import torch

    near = []
    for line, mine, theirs in zip(scores.float(), actual.tolist(), expected.tolist(), strict=True):
        extra, missing = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
        legal = len(set(mine)) == len(mine) and all(0 <= i < line.numel() for i in extra + missing)
        top = line[torch.isfinite(line)].abs().amax() if legal and torch.isfinite(line).any() else None
        near.append(
            top is not None and bool(line[missing].max() - line[extra].min() <= close * top) and bool(extra)
        )
    return torch.tensor(near, dtype=torch.bool, device=scores.device)


def _by_id(ids: Any, values: Any) -> Any:
    """Return values in ascending order of their ids; without values (``[T, 0]``) they stay as they are."""
    return values.gather(1, ids.long().argsort(dim=1, stable=True)) if values.shape[1] else values


def _some(ids: set[int]) -> str:
    listed = sorted(ids)
    return f"{listed[:4]}" + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
