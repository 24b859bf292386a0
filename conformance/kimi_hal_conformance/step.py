"""What an engine knows of a step, for ``plan.prepare``: operands, and for attention what stands behind its indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.operator import Operator
from kimi_hal_conformance.oracle import Question

#: What ``prepare`` takes: of paged operators, of a composite of them, and of operators over sequences.
PAGED = ("row_req", "row_len", "block_table")
OF_COMPOSITES = ("row_req", "row_len", "latent_table", "index_table")
OF_SEQUENCES = ("cu_seqlens", "state_ids")


def names(op: Operator) -> tuple[str, ...]:
    """Return the names of what an operator's ``prepare`` takes."""
    if op.family == "kda":
        return OF_SEQUENCES
    return OF_COMPOSITES if op.composite else PAGED


def metadata(question: Question) -> dict[str, Tensor]:
    """Return what a call's ``prepare`` takes, as far as there is such."""
    behind = _behind_indices(question) if question.op.name == "sparse_mla" else {}
    known: Mapping[str, Any] = {**behind, **question.operands}
    return {name: known[name] for name in names(question.op) if known.get(name) is not None}


def _behind_indices(question: Question) -> dict[str, Tensor]:
    """Return the rows' bounds that selected these indices; for slots one request that owns the whole cache.

    A bound is beyond every index that can be a key, and no less than the number of the row's indices.
    """
    spec: Any = question.spec
    indices, cache = question.operands["indices"], question.operands["cache"]
    rows, count = indices.shape
    table = question.operands.get("block_table")
    if table is None:
        table = torch.arange(cache.shape[0], dtype=torch.int32)[None]
    tokens = table.shape[1] * spec.page * spec.dcp.world
    keys = indices.long() * (spec.dcp.world if spec.index_space == "local" else 1)
    keys = torch.where((keys >= 0) & (keys < tokens), keys + spec.dcp.world, 0)
    bound = keys.amax(dim=1) if count else keys.new_zeros(rows)
    return {
        "row_req": torch.zeros(rows, dtype=torch.int32),
        "row_len": bound.clamp(min=count).int(),
        "block_table": table,
    }
