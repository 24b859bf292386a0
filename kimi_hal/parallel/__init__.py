"""Ranks: groups that they meet in, which positions and rows each has, and layers that several compute together.

Importing this imports no torch; each name is resolved at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

#: public name -> the module of this package that has it
_LAZY = {
    "Capacity": "captured",
    "CapturedDecode": "decode",
    "CapturedMerge": "captured",
    "ContextCache": "context",
    "ContextKDA": "kda",
    "Faults": "groups",
    "GatheredPrefill": "gathered",
    "Group": "groups",
    "LoopbackGroup": "groups",
    "RowDividedPrefill": "divided",
    "Shards": "shards",
    "TokenShardedPrefill": "prefill",
    "TorchGroup": "groups",
    "agree": "agreement",
    "agree_dcp": "agreement",
    "agree_on": "agreement",
    "gather_states": "states",
    "last_stop": "chunks",
    "microbatches": "chunks",
    "one_rank": "prefill",
    "padded_rows": "shards",
    "part_states": "states",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kimi_hal.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kimi_hal.parallel.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
