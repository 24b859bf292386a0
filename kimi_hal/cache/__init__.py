"""The packed block cache: one block is one contiguous row of pages of different widths and of states.

``plan`` lays it out, ``Layout.views`` shows a kernel its plain pages, ``translate`` turns an engine's block
table and slots into kernel-page addresses once a step, ``pair`` and ``descriptors`` say which bytes a transfer
moves, ``transfer`` moves them over NIXL, ``HostTier`` to host memory, ``capacity`` counts. Description:
``docs/cache.md``. Importing this package imports no torch.
"""

from __future__ import annotations

from kimi_hal.cache import models, transfer
from kimi_hal.cache.addresses import slots, translate
from kimi_hal.cache.counting import Capacity, capacity
from kimi_hal.cache.host import HostTier, copy
from kimi_hal.cache.kinds import StateCache, StatePart, TokenCache
from kimi_hal.cache.layout import Group, Layout, Place
from kimi_hal.cache.pairing import Pair, pair
from kimi_hal.cache.planner import plan
from kimi_hal.cache.ranges import Descriptor, Move, descriptors, whole_blocks

__all__ = [
    "Capacity",
    "Descriptor",
    "Group",
    "HostTier",
    "Layout",
    "Move",
    "Pair",
    "Place",
    "StateCache",
    "StatePart",
    "TokenCache",
    "capacity",
    "copy",
    "descriptors",
    "models",
    "pair",
    "plan",
    "slots",
    "transfer",
    "translate",
    "whole_blocks",
]
