"""The capability table: what each kernel of this backend covers, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Implementation
from kimi_hal_tpu.pallas_claims import PALLAS
from kimi_hal_tpu.xla_claims import XLA

IMPLEMENTATIONS: tuple[Implementation, ...] = (*PALLAS, *XLA)
