"""Shard invariance of a fused selection: cut over 2, 4 and 8 ranks, page by page, it selects what one rank selects.

Each rank is asked for its own winners with their scores; the best of all are then found here, by rule 2. Keys keep
their pages: with an interleave of one page a rank's block table is every so many columns of the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kimi_hal.errors import SelectionError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.relations.ground import Ground, UntriedError, invariant
from kimi_hal_conformance.scripts import call

WORLDS = (2, 4, 8)


def applies(ground: Ground) -> bool:
    """Tell whether a selection of one rank is on trial, whose scores do not depend on where a key stands."""
    spec: Any = ground.case.spec
    if ground.case.operator != "indexer_topk" or not invariant(ground):
        return False
    return bool(spec.dcp.world == 1 and spec.emit == "local" and ground.operands["q"].shape[0])


def problems(ground: Ground) -> Iterator[str]:
    """Yield the rows that another number of ranks selects otherwise.

    Raises:
        UntriedError: it does not claim any of these numbers of ranks.
    """
    one = ground.first.answer
    if one is None:
        yield from ground.first.problems
        return
    wanted = [sorted(p for p in row if p >= 0) for row in one.outputs["out"].tolist()]
    tried = False
    for world in WORLDS:
        try:
            found = _over(ground, world)
        except SelectionError:
            continue
        tried = True
        rows = [t for t, (mine, theirs) in enumerate(zip(found, wanted, strict=True)) if mine != theirs]
        if rows:
            yield f"over {world} ranks {len(rows)} of {len(wanted)} rows select otherwise, the first: {rows[0]}"
    if not tried:
        raise UntriedError("it claims no number of ranks above one")


def _over(ground: Ground, world: int) -> list[list[int]]:
    """Return the positions that all ranks together select, ascending, by row."""
    found: list[list[tuple[bool, float, int]]] = [[] for _ in range(ground.operands["q"].shape[0])]
    for rank in range(world):
        question = at_rank(ground.question, world, rank)
        spec: Any = question.spec
        answer = call(question, ground.subject, given=True).answer
        assert answer is not None, "a rank's results are not of the contract's form"
        local, scores = answer.outputs["out"], answer.outputs["scores_out"]
        positions = ownership.position(local.long(), spec.dcp)
        for row, mine in enumerate(found):
            mine += _candidates(local[row], scores[row], positions[row])
    return [sorted(position for _, _, position in sorted(row)[: spec.topk]) for row in found]


def _candidates(local: Tensor, scores: Tensor, positions: Tensor) -> Iterator[tuple[bool, float, int]]:
    """Yield what rule 2 orders by, the best first: NaN last, score descending, smaller position."""
    for index, score, position in zip(local.tolist(), scores.tolist(), positions.tolist(), strict=True):
        if index >= 0:
            yield math.isnan(score), 0.0 if math.isnan(score) else -score, position


def at_rank(question: Question, world: int, rank: int) -> Question:
    """Return a rank's call: every ``world``-th page of each request is its own."""
    spec: Any = question.spec
    dcp = DCP(world=world, rank=rank, interleave=spec.page)
    table = question.operands["block_table"]
    own = table[:, rank::world].contiguous()
    return dataclasses.replace(
        question,
        spec=dataclasses.replace(spec, dcp=dcp, return_selected=True),
        operands={**question.operands, "block_table": own},
    )
