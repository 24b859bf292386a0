"""The package's logger. The choice of each plan is logged at INFO."""

from __future__ import annotations

import logging

log = logging.getLogger("kimi_hal")
