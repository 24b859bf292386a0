"""Bytes that the adapters' plans need, known without a device and without the libraries. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.indexer import IndexerSpec, logits_width
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec

#: Rows of a request that share its keys in one product; from more on a plan is a prefill.
TOGETHER = 2
#: What vLLM's selections keep between their blocks; zero before the first call, and after each.
TOPK_STATE = 1 << 20
#: Bytes of a page's elements, and of its scales.
ELEMENTS, SCALES = 64 * 128, 64 * 4
#: Multiprocessors that a schedule is made for at most.
PROCESSORS = 256


def prefill(limits: Limits) -> bool:
    """Tell whether a plan gathers its keys first."""
    return limits.rows_per_req > TOGETHER


def indexer_logits(spec: IndexerSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of DeepGEMM's scores: gathered keys, or a step's schedule."""
    if prefill(limits):
        pages = limits.max_reqs * -(-logits_width(spec, limits, 0) // spec.page)
        return Sizes(workspace=-(-pages * (ELEMENTS + SCALES) // 256) * 256)
    return Sizes(step=-(-4 * (2 * limits.max_rows + 2 * (PROCESSORS + 1)) // 256) * 256)


def vllm_topk(spec: TopKSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of vLLM's selections."""
    return Sizes(persistent=TOPK_STATE)
