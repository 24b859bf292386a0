"""Rows of scores of other widths: what Limits set."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, add
from kimi_hal_conformance.cases.indexer import FP8, score_operands


def cases() -> Iterator[Case]:
    """A context that is no multiple of either alignment."""
    spec = IndexerSpec(index=FP8, num_heads=3)
    for align in (16, 96):
        limits = Limits(max_rows=64, max_reqs=16, max_context=300, logits_align=align)
        make = score_operands(spec, (300, 200, 129), 1)
        yield Case(f"indexer_logits/limits/align{align}", "indexer_logits", spec, limits, make, since=INTERP)


WHY = {
    "indexer_logits/limits/": "A row of scores is as wide as Limits say: their context and their alignment.",
}

add(cases(), WHY)
