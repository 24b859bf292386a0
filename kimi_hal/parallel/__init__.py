"""Ranks: groups that they meet in, and which positions each of them owns. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Faults", "Group", "LoopbackGroup", "TorchGroup", "agree"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kimi_hal.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module("kimi_hal.parallel.groups"), name)
