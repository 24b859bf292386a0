"""Bytes of workspace that the CUDA kernels need, known without a device. Imports neither torch nor the driver."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.composites import DSASpec, part_specs
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, logits_width
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.triton.sizes import SCORES, SELECT_ROWS
from kimi_hal_nvidia import attention_plan

#: Launches of a plan that may overlap and have words of their own, by what they compute: see ``tickets.py``.
SCORES_LAUNCHES, ATTENTION_LAUNCHES = 8192, 1024
#: Bytes by which the blocks of one launch of scores share the last pages, and those of all launches.
TICKET = 8
TICKETS = SCORES_LAUNCHES * TICKET


def indexer_logits(spec: IndexerSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``indexer_logits``."""
    return Sizes(persistent=TICKETS)


def indexer_topk(spec: IndexerTopKSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``indexer_topk``: the scores of some rows, in whole pages."""
    itemsize = 4 if spec.score == "float32" else 2
    width = -(-logits_width(spec, limits, 0) // spec.page) * spec.page
    held = min(max(SCORES, width * itemsize), width * itemsize * min(limits.max_rows, SELECT_ROWS))
    return Sizes(workspace=-(-held // 256) * 256, persistent=TICKETS)


def sparse_mla(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``sparse_mla``: nothing, unless parts of rows meet in memory."""
    way = attention_plan.cut(spec, limits, {})
    counts = ATTENTION_LAUNCHES * attention_plan.counter_bytes(spec, limits, way) if way.in_memory else 0
    return Sizes(workspace=attention_plan.workspace_bytes(spec, limits, way), persistent=counts)


class Held(NamedTuple):
    """Where in the workspace of ``dsa_decode`` stands what its kernels give to each other, in whole 256 bytes.

    Attributes:
        q, q_scale, weights: of the quantised query.
        indices, selected: of the selection.
        partials: what parts of a row of attention leave for each other.
        scores: of as many rows as are scored at once, last.
    """

    q: int
    q_scale: int
    weights: int
    indices: int
    selected: int
    partials: int
    scores: int

    @classmethod
    def of(cls, spec: DSASpec, limits: Limits) -> Held:
        """Lay them out for a plan."""
        dims, heads = spec.query.dims(), spec.query.num_heads
        item = {"float32": 4, "bfloat16": 2}
        kept = item[spec.indexer.score] * spec.indexer.topk if spec.indexer.return_selected else 0
        row = (
            heads * dims["Q"],
            heads * dims["S"],
            heads * item[spec.query.weights_dtype],
            4 * spec.indexer.topk,
            kept,
        )
        way = attention_plan.cut(spec.attn, limits, {})
        partials = attention_plan.workspace_bytes(spec.attn, limits, way)
        ends = accumulate(
            -(-size // 256) * 256 for size in (*(size * limits.max_rows for size in row), partials)
        )
        return cls(0, *ends)


def dsa_decode(spec: DSASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``dsa_decode``."""
    of_scores = part_specs("dsa_decode", spec, limits)["indexer_topk"].limits or limits
    scores = indexer_topk(spec.indexer, of_scores, arch).workspace
    persistent = TICKETS + sparse_mla(spec.attn, limits, arch).persistent
    return Sizes(workspace=Held.of(spec, limits).scores + scores, persistent=persistent)
