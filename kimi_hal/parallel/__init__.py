"""Ranks: groups that they meet in, and which positions each of them owns. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {name: "groups" for name in ("Faults", "Group", "LoopbackGroup", "TorchGroup", "agree")}

__all__ = ["Faults", "Group", "LoopbackGroup", "TorchGroup", "agree"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kimi_hal.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kimi_hal.parallel.{_LAZY[name]}"), name)
