"""The mutants, one file an operator family. Importing a file registers its mutants."""

from __future__ import annotations

import importlib

from kimi_hal_conformance.mutants.mutant import MUTANTS, Mutant

FAMILIES = (
    "indexer",
    "topk_merge",
    "sparse_mla",
    "kda",
    "moe",
    "all_gather",
    "composites",
    "formats",
    "core",
    "offsets",
    "operands",
    "results",
)


def load() -> dict[str, Mutant]:
    """Import every family's mutants and return them all, by id."""
    for family in FAMILIES:
        importlib.import_module(f"kimi_hal_conformance.mutants.catalogue.{family}")
    return MUTANTS
