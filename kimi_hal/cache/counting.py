"""How much a packed cache holds: bytes a token, blocks a request, tokens and full contexts of a memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kimi_hal.cache.integers import whole
from kimi_hal.cache.layout import Layout
from kimi_hal.errors import CacheError


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What one device holds, as one of its DCP group: tokens are the group's, bytes the device's.

    Args:
        memory: bytes given to the cache.
        reserve: of them, bytes that are not for blocks (exchange buffers, gathered context).
        block_bytes: bytes of a block row.
        num_blocks: rows that fit.
        bytes_per_token: bytes of entries that one token of the context takes of this device; rows' padding
            and states are not in it.
        padding: the row's padding as a part of what it holds.
        tokens: tokens that fit if every block holds tokens.
        context: tokens of the requests counted below.
        states: states kept of each, the live one included.
        blocks_per_context: blocks of one such request.
        state_blocks: of them, those of states and windows.
        state_bytes: bytes of one request's live states.
        contexts: requests that fit, as a fraction.
    """

    memory: int
    reserve: int
    block_bytes: int
    num_blocks: int
    bytes_per_token: float
    padding: float
    tokens: int
    context: int
    states: int
    blocks_per_context: int
    state_blocks: int
    state_bytes: int
    contexts: float

    @property
    def full_contexts(self) -> int:
        """Return the whole requests that fit at once."""
        return int(self.contexts)

    @property
    def context_tokens(self) -> int:
        """Return the tokens of ``contexts`` requests: what is left for tokens beside their states."""
        return int(self.contexts * self.context)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, derived ones included."""
        derived = {"full_contexts": self.full_contexts, "context_tokens": self.context_tokens}
        return dataclasses.asdict(self) | derived


def capacity(
    layout: Layout, memory: int, *, context: int | None = None, states: int = 1, reserve: int = 0
) -> Capacity:
    """Count what a memory holds.

    Args:
        layout: the packed cache; its own ``num_blocks`` does not matter.
        memory: bytes of one device for the cache.
        context: tokens of a request; the layout's ``max_context``.
        states: states kept of a request: the live one, and one for each checkpoint of prefix caching.
        reserve: bytes of ``memory`` that are not for blocks.

    Raises:
        CacheError: not one block fits, or a count below 1.
    """
    tokens = layout.max_context if context is None else whole("context", context)
    memory, states, reserve = whole("memory", memory), whole("states", states), whole("reserve", reserve)
    if tokens < 1 or states < 1 or reserve < 0:
        raise CacheError(
            f"context={tokens} and states={states} must be at least 1, reserve={reserve} at least 0"
        )
    left = memory - reserve
    if reserve and left < layout.block_bytes:
        raise CacheError(
            f"memory={memory:,} less reserve={reserve:,} is {left:,} bytes, and one block takes "
            f"{layout.block_bytes:,}: give more memory, a smaller reserve or a smaller block_size"
        )
    sized = layout.sized(memory=left)
    needed = [group.blocks(tokens, states) for group in layout.groups]
    return Capacity(
        memory=memory,
        reserve=reserve,
        block_bytes=layout.block_bytes,
        num_blocks=sized.num_blocks,
        bytes_per_token=float(bytes_per_token(layout)),
        padding=layout.padding,
        tokens=sized.num_blocks * layout.block_size * layout.world,
        context=tokens,
        states=states,
        blocks_per_context=sum(needed),
        state_blocks=sum(needed) - layout.groups[0].blocks(tokens, states),
        state_bytes=sum(len(s.layers) * s.state_bytes(layout.tp) for s in layout.states),
        contexts=sized.num_blocks / sum(needed),
    )


def bytes_per_token(layout: Layout) -> Fraction:
    """Return the bytes of entries that one token of a context takes of one device.

    24 · 576 = 13,824 for K3 in FP8, 24 · (576 + 132) = 16,992 for K3.1 Pro, divided by the ranks of a DCP group.
    """
    return sum(
        (
            Fraction(len(c.layers) * c.entry_bytes, c.ratio * (1 if c.replicated else layout.world))
            for c in layout.caches
            if c.window is None
        ),
        Fraction(0),
    )
