"""The capability table: what each kernel of this backend covers, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.triton.capabilities import implementations
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.decode_claims import DECODE
from kimi_hal_nvidia.indexer_claims import INDEXER
from kimi_hal_nvidia.sparse_mla_claims import MERGE, SPARSE_MLA
from kimi_hal_nvidia.tensor_memory_claims import TENSOR_MEMORY

ARCHITECTURES = ("sm_90", "sm_100", "sm_103")

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *implementations(ARCHITECTURES),
    *INDEXER,
    *SPARSE_MLA,
    *MERGE,
    *DECODE,
    *TENSOR_MEMORY,
    *ADAPTERS,
)
