"""Pools on their way from the host to a machine that interprets: only pages and slots that a call names are moved.

A pool may be far larger than what one call reads. Names are renumbered to what was moved; one that names nothing
becomes −1, which means the same. So an address that a kernel computes is small when it is interpreted: that it holds
beyond 2^31 bytes shows on the device alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal_tpu import buckets

#: Pools of an operator and the operands that name places in them.
CACHES = {
    "store_index_keys": (("cache",), ("slots",)),
    "store_latent": (("cache",), ("slots",)),
    "indexer_logits": (("cache",), ("block_table",)),
    "indexer_topk": (("cache",), ("block_table",)),
    "sparse_mla": (("cache",), ("indices", "block_table")),
    "kda_conv": (("conv_state",), ("state_ids", "checkpoint_ids")),
    "kda_prefill": (("state",), ("state_ids", "checkpoint_ids")),
    "kda_decode": (("state",), ("state_ids",)),
    "kda_verify": (("conv_state", "state"), ("state_ids",)),
    "kda_commit": (("conv_states", "states"), ("state_ids", "out_ids", "checkpoint_ids")),
}


@dataclass(frozen=True)
class Moved:
    """The pages or slots that are moved, int64 ascending, and operands that name them by their new numbers."""

    kept: Tensor
    pools: tuple[str, ...]
    operands: dict[str, Any]

    def original(self, slots: Tensor, tokens: int) -> Tensor:
        """Return slots of the pool for slots of what was moved, −1 as it is."""
        page = self.kept[(slots.long().clamp(min=0) // tokens).clamp(max=max(0, len(self.kept) - 1))]
        return torch.where(slots < 0, -1, page * tokens + slots.long() % tokens)

    def give_back(self, name: str, pool: Any, result: Any) -> None:
        """Write what was moved back into a pool of the caller's."""
        if isinstance(pool, (list, tuple)):
            for own, one in zip(pool, result, strict=True):
                self.give_back(name, own, one)
            return
        if len(self.kept):
            pool[self.kept] = result[: len(self.kept)]


def move(operator: str, spec: Any, operands: Mapping[str, Any]) -> Moved | None:
    """Return a call's operands with its pools cut to what it names; ``None`` where it has no pool."""
    if operator not in CACHES:
        return None
    pools, names = CACHES[operator]
    names = tuple(n for n in names if operands.get(n) is not None and _names(spec, operands, n))
    one = first(operands[pools[0]])
    tokens = {n: _tokens(spec, n) for n in names}
    used = [_places(operands[n], tokens[n], one.shape[0]) for n in names]
    kept = torch.unique(torch.cat(used)) if used else torch.zeros(0, dtype=torch.int64, device="cpu")
    changed: dict[str, Any] = {n: renumbered(operands[n], kept, tokens[n], one.shape[0]) for n in names}
    for pool in pools:
        changed[pool] = _cut(operands[pool], kept)
    return Moved(kept, pools, {**operands, **changed})


def _names(spec: Any, operands: Mapping[str, Any], name: str) -> bool:
    """Tell whether an operand holds places of the pool: indices may be positions, which a table translates."""
    return name != "indices" or operands.get("block_table") is None


def _tokens(spec: Any, name: str) -> int:
    """Return how many places a page of the pool has, by which an operand counts."""
    if name not in ("slots", "indices"):
        return 1
    return spec.page if hasattr(spec, "page") else formats.index(spec.index).page


def first(pool: Any) -> Tensor:
    """Return a pool, or the first of a list of them."""
    return pool[0] if isinstance(pool, (list, tuple)) else pool  # type: ignore[no-any-return]


def _places(ids: Tensor, tokens: int, size: int) -> Tensor:
    wide = ids.long().flatten()
    return wide[(wide >= 0) & (wide < size * tokens)] // tokens


def renumbered(ids: Tensor, kept: Tensor, tokens: int, size: int) -> Tensor:
    """Return ids that count in the pages that were moved, −1 for those that name nothing."""
    wide = ids.long()
    there = (wide >= 0) & (wide < size * tokens)
    page = torch.searchsorted(kept, torch.where(there, wide // tokens, 0))
    return torch.where(there, page * tokens + wide % tokens, -1).to(ids.dtype)


def _cut(pool: Any, kept: Tensor) -> Any:
    """Return the pages that are kept, and zeros up to the next power of two: a static size."""
    if isinstance(pool, (list, tuple)):
        return [_cut(one, kept) for one in pool]
    cut = pool.new_zeros((buckets.power(len(kept)), *pool.shape[1:]))
    cut[: len(kept)] = pool[kept]
    return cut
