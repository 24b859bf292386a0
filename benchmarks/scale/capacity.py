"""How many tokens W ranks hold, by the packed cache's own planner."""

from __future__ import annotations

from functools import cache as kept
from typing import Any

from kimi_hal import cache
from kimi_hal.model import K3_1_PRO

LATENTS = {"fp8": "latent.fp8.e4m3fn.tensor", "nvfp4": "latent.nvfp4.352"}
INDEX = "index.fp8.e4m3fn.pow2.page64"
BLOCK, MEMORY = 1024, 52 * 10**9
#: The live state of a request and two that a prefix cache keeps.
STATES = 3
#: What a prefill over a shared cache takes: the gathered context of a layer, and buffers of its exchange.
RESERVED = int(708 * 2**20 + 0.8 * 2**30)


@kept
def capacity(world: int, latent: str = "fp8", context: int = 1 << 20) -> dict[str, Any]:
    """Return tokens and full contexts of a DCP group of ``world`` ranks, the group being the TP group from 8 on."""
    layout = cache.plan(
        K3_1_PRO, block_size=BLOCK, tp=max(8, world), dcp=world, latent=LATENTS[latent], index=INDEX
    )
    reserve = RESERVED if world > 1 else 0
    held = cache.capacity(layout, MEMORY, context=context, states=STATES, reserve=reserve)
    return {
        "world": world,
        "latent": latent,
        "tokens": held.context_tokens,
        "contexts": round(held.contexts, 2),
        "bytes_a_token": held.bytes_per_token,
        "state_share": round(held.state_blocks / held.blocks_per_context, 4),
    }
