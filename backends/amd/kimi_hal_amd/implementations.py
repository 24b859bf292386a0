"""The capability table: what each kernel of this backend covers, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ()
