"""Small operands for any Spec of the topk_merge family."""

from __future__ import annotations

from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal_conformance.case import Make
from kimi_hal_conformance.cases.topk_merge import merge_operands, select_operands, ties
from kimi_hal_conformance.operands.recipe import Fields, Recipe

#: Keys of the rows, and scores of a row; ties at most cuts.
LENGTHS, WIDTH = (150, 1, 64, 0), 160


def select(spec: TopKSpec, rows: int) -> Make:
    """Return rows with a hundred winners among equal scores; columns that are no keys would win."""
    return select_operands(spec, ties, LENGTHS[:rows], WIDTH)


def select_bytes(spec: TopKSpec, rows: int) -> int:
    """Return the bytes of the selections that are compared."""
    return rows * spec.topk * 64


def merge(spec: TopKMergeSpec, rows: int) -> Make:
    """Return what each rank selected from its own share of tied scores."""
    return merge_operands(spec, ties, LENGTHS[:rows])


def merge_bytes(spec: TopKMergeSpec, rows: int) -> int:
    """Return the bytes of all ranks' candidates, on each rank, compared twice."""
    return rows * spec.topk * spec.dcp.world * (64 + 8 * spec.dcp.world) + spec.dcp.world * (2 << 20)


def bind_merge(fields: Fields) -> None:
    """A rank is each of its group in turn; a protocol admits one score type, or no global positions."""
    fields["dcp.rank"] = 0
    if fields["protocol"] == "compact":
        fields["score"] = "bfloat16"
    else:
        fields["quota"] = None
    if fields["protocol"] == "scores_only":
        fields["return_global"] = False


RANK = frozenset({"dcp.rank"})
RECIPES = {
    "topk_select": Recipe(select, select_bytes, leading=("dcp.world",), small={"topk": 65}, rows=4),
    "topk_merge": Recipe(
        merge,
        merge_bytes,
        ranks=lambda spec: spec.dcp.world,
        bind=bind_merge,
        tied=RANK,
        leading=("protocol", "score"),
        small={"topk": 33},
        rows=4,
    ),
}
