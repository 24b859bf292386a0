"""The package's logger. The choice of each plan is logged at INFO."""

from __future__ import annotations

import logging

log = logging.getLogger("kimi_hal")


def configure(level: str) -> None:
    """Set the level that ``KIMI_HAL_LOG`` asks for; ``""`` leaves the logger as the engine configured it.

    A process that configured no logging would drop what is below WARNING; it gets a handler to stderr.
    """
    if not level:
        return
    log.setLevel(level)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
