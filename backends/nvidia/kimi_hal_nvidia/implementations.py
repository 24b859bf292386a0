"""The capability table: what each kernel of this backend covers, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.triton.capabilities import implementations
from kimi_hal_nvidia.indexer_claims import INDEXER

ARCHITECTURES = ("sm_90", "sm_100", "sm_103")

IMPLEMENTATIONS: tuple[Implementation, ...] = (*implementations(ARCHITECTURES), *INDEXER)
