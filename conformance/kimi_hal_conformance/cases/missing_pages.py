"""Entries of block tables that name no page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import dsa_operands, dsa_spec
from kimi_hal_conformance.cases.indexer import FP8, score_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands
from kimi_hal_conformance.draws import ints

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024)
LENGTHS = (300, 200, 129)
TABLES = {"block_table": "cache", "latent_table": "latent_cache", "index_table": "index_cache"}


def missing(make: Make) -> Make:
    """Return operands whose tables name in their second column the page behind the last, none, or 2^31 − 1."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name, cache in TABLES.items():
            if name in operands:
                pages, table = operands[cache].shape[0], operands[name].clone()
                table[:, 1] = ints([pages, -7, 2**31 - 1]).repeat(table.shape[0])[: table.shape[0]]
                operands[name] = table
        return operands

    return wrapped


def cases() -> Iterator[Case]:
    """Every operator that reads a table."""
    scored = IndexerSpec(index=FP8, num_heads=3)
    yield case("indexer_logits", scored, score_operands(scored, LENGTHS, 2))
    select = IndexerTopKSpec(index=FP8, num_heads=3, topk=200, return_selected=True)
    yield case("indexer_topk", select, score_operands(select, LENGTHS, 2))
    # more than the keys there are: none is left out by its score
    slots = replace(select, emit="slot", topk=300)
    yield case("indexer_topk", slots, score_operands(slots, LENGTHS, 2), "/slot")
    for space in ("local", "position"):
        attend = SparseMLASpec(num_heads=3, latent="latent.bf16", topk=64, index_space=space)
        yield case("sparse_mla", attend, attention_operands(attend, 6, 64, 300), f"/{space}")
    whole = dsa_spec(1)  # of requests with fewer keys than are selected, so that nothing is decided by scores
    yield case("dsa_decode", whole, dsa_operands(whole, (48, 40, 33), False))


def case(operator: str, spec: Spec, make: Make, label: str = "") -> Case:
    """Return a case of pages that are not there."""
    name = f"{operator}/edges/no-such-page{label}"
    return Case(name, operator, spec, LIMITS, missing(make), since=INTERP, fault=3)


WHY = {
    f"{operator}/edges/no-such-page": "Entries of a table behind the last page, and negative ones, name none."
    for operator in ("indexer_logits", "indexer_topk", "sparse_mla", "dsa_decode")
}

add(cases(), WHY)
