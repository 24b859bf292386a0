"""The capability table: what each kernel of this backend covers, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.triton.capabilities import implementations

ARCHITECTURES = ("gfx942", "gfx950")

IMPLEMENTATIONS: tuple[Implementation, ...] = implementations(ARCHITECTURES)
