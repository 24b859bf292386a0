"""Small operands for any Spec of any operator: what a walk over claims tries them with."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_hal_conformance.operands import (
    all_gather,
    composites,
    indexer,
    kda,
    moe,
    sparse_mla,
    topk_merge,
)
from kimi_hal_conformance.operands.recipe import Recipe

RECIPES: Mapping[str, Recipe] = {
    name: recipe
    for family in (indexer, topk_merge, sparse_mla, kda, moe, all_gather, composites)
    for name, recipe in family.RECIPES.items()
}
