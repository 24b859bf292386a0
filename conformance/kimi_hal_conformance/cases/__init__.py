"""The cases: a file for an operator family, one for its edges, and one for what runs through all of them.

Importing a file registers its cases.
"""

from __future__ import annotations

import importlib

FAMILIES = ("indexer", "topk_merge", "sparse_mla", "kda", "moe", "all_gather", "composites")

#: What all operators have cases of.
THROUGHOUT = (
    "model_shapes",
    "real_text",
    "cache_bytes",
    "orders",
    "softmax",
    "recurrence",
    "mixture",
    "offsets",
    "lengths",
    "ties",
    "scale_steps",
    "amplified",
    "blocks",
    "state_slots",
    "expert_scales",
    "spec_fields",
    "composite_fields",
    "index_scales",
    "operand_dtypes",
    "many_rows",
    "prefill_sizes",
    "missing_pages",
    "score_widths",
)


def load() -> None:
    """Import every file of cases."""
    of_families = [name for family in FAMILIES for name in (family, f"{family}_edges")]
    for file in (*of_families, *THROUGHOUT):
        importlib.import_module(f"kimi_hal_conformance.cases.{file}")
