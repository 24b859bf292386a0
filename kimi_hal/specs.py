"""Every Spec, DCP and Limits: ``from kimi_hal import specs as sp``. Imports no torch."""

from __future__ import annotations

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits, Record, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec

__all__ = [
    "DCP",
    "DSASpec",
    "GatherSpec",
    "IndexQuerySpec",
    "IndexerSpec",
    "IndexerTopKSpec",
    "KDASpec",
    "Limits",
    "MergeSpec",
    "MoELayerSpec",
    "MoESpec",
    "Record",
    "RouteSpec",
    "SparseMLASpec",
    "Spec",
    "StoreIndexSpec",
    "StoreLatentSpec",
    "TopKMergeSpec",
    "TopKSpec",
]
