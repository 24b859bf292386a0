"""The cases, one file an operator family and one for its edges. Importing a file registers its cases."""

from __future__ import annotations

import importlib

FAMILIES = ("indexer", "topk_merge", "sparse_mla", "kda", "moe", "all_gather", "composites")


def load() -> None:
    """Import every family's cases."""
    for family in FAMILIES:
        for file in (family, f"{family}_edges"):
            importlib.import_module(f"kimi_hal_conformance.cases.{file}")
