"""The planned cache: where every page and every state stands in a block row. Plain data, the same on all ranks.

One block is one contiguous row of ``block_bytes``; a pool is ``num_blocks`` rows. A block holds the pages of
``block_size`` tokens in all layers, or the states of one group of layers, or the pages of one window: groups
start at byte 0 of the row and share the block ids, so that one allocator serves them all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_hal.cache.integers import whole
from kimi_hal.cache.kinds import StateCache, StatePart, TokenCache
from kimi_hal.errors import CacheError, unknown
from kimi_hal.ops.spec import DCP

if TYPE_CHECKING:
    from torch import Tensor

#: The group of the caches that keep the whole history.
TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One layer's part of a block: ``bytes`` from byte ``offset`` of the row."""

    cache: str
    layer: int
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """Return the first byte after it."""
        return self.offset + self.bytes


@dataclass(frozen=True, kw_only=True)
class Group:
    """What one block holds: a request has a block table a group.

    Args:
        name: "tokens", "kda.0", …
        places: what stands in the row, from byte 0.
        tokens: tokens of a request that one block covers, over all ranks of a DCP group; ``None``: a live
            state, of which a request has one block whatever its length.
        window: tokens of history that a request keeps; ``None``: all.
    """

    name: str
    places: tuple[Place, ...]
    tokens: int | None
    window: int | None = None

    @property
    def used(self) -> int:
        """Return the bytes of a block that hold something."""
        return sum(place.bytes for place in self.places)

    def blocks(self, tokens: int, states: int = 1) -> int:
        """Return the blocks that a request of so many tokens has in this group, at most.

        Args:
            tokens: its length.
            states: states kept of it, the live one included; other groups have no use for it.
        """
        if self.name != TOKENS and self.window is None:
            return states
        assert self.tokens is not None
        whole = -(-tokens // self.tokens)
        return whole if self.window is None else min(whole, -(-(self.window - 1) // self.tokens) + 1)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A packed cache of one instance. Made by ``plan``; equal on every rank of it.

    Args:
        model: whose caches.
        block_size: tokens of a block on one rank.
        block_bytes: bytes of a block row, padding included; also the stride of every view.
        num_blocks: rows of a pool.
        tp: tensor-parallel ranks, which divide the heads of states.
        world: ranks of a DCP group, which divide the tokens of entries.
        interleave: consecutive positions that one of those ranks holds.
        max_context: tokens of a request, at most.
        caches: entries of tokens.
        states: states of requests.
        groups: what a block holds; the tokens' group first.
    """

    model: str
    block_size: int
    block_bytes: int
    num_blocks: int
    tp: int
    world: int
    interleave: int
    max_context: int
    caches: tuple[TokenCache, ...]
    states: tuple[StateCache, ...]
    groups: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of a pool."""
        return self.num_blocks * self.block_bytes

    @property
    def latent_offsets(self) -> tuple[int, ...]:
        """Return the byte in a row at which each layer's latents start."""
        return self.offsets("latent")

    @property
    def index_offsets(self) -> tuple[int, ...]:
        """Return the byte in a row at which each layer's index keys start."""
        return self.offsets("index")

    @property
    def table_width(self) -> int:
        """Return the columns of an engine's block table, for a request of ``max_context`` tokens."""
        return -(-self.max_context // (self.block_size * self.world))

    @property
    def used_bytes(self) -> int:
        """Return the bytes of a block of tokens without the row's padding."""
        return self.groups[0].used

    @property
    def padding(self) -> float:
        """Return the row's padding as a part of what it holds: 0.0021 is 0.21 %."""
        return self.block_bytes / self.used_bytes - 1

    def cache(self, name: str) -> TokenCache:
        """Return the description of one kind of entries; raises UnknownNameError with the nearest name."""
        for cache in self.caches:
            if cache.name == name:
                return cache
        raise unknown("token cache", name, [c.name for c in self.caches])

    def state(self, name: str) -> StateCache:
        """Return the description of one kind of states; raises UnknownNameError with the nearest name."""
        for state in self.states:
            if state.name == name:
                return state
        raise unknown("state cache", name, [s.name for s in self.states])

    def group(self, name: str) -> Group:
        """Return a group; raises UnknownNameError with the nearest name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise unknown("group", name, [g.name for g in self.groups])

    def places(self, name: str) -> list[tuple[Group, Place]]:
        """Return where each layer of a cache stands, in the order in which the cache names its layers."""
        layers = {c.name: c.layers for c in self.caches} | {s.name: s.layers for s in self.states}
        if name not in layers:
            raise unknown("cache", name, layers)
        found = {p.layer: (g, p) for g in self.groups for p in g.places if p.cache == name}
        return [found[layer] for layer in layers[name]]

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return the byte in a row at which each layer of a cache starts."""
        return tuple(place.offset for _, place in self.places(name))

    def group_of(self, name: str) -> Group:
        """Return the first group that holds a cache."""
        return self.places(name)[0][0]

    def entries(self, name: str) -> int:
        """Return the entries of a token cache in one block on one rank."""
        cache = self.cache(name)
        tokens = cache.block_size or self.block_size * (self.world if cache.replicated else 1)
        return tokens // cache.ratio

    def pages(self, name: str) -> int:
        """Return the kernel pages that one block holds of a layer of a token cache."""
        page = self.cache(name).page
        return 1 if page is None else self.entries(name) // page

    def page_step(self, name: str) -> int:
        """Return by how much a kernel's page number grows from one block to the next."""
        cache = self.cache(name)
        return 1 if cache.page is None else self.block_bytes // cache.page_bytes(cache.page)

    def columns(self, name: str) -> int:
        """Return the columns of a kernel's block table of this token cache, for ``max_context`` tokens.

        A window's table is as long as the request: blocks that it has left are −1.
        """
        pages, tokens = self.pages(name), self.group_of(name).tokens
        assert tokens is not None
        return -(-self.max_context // tokens) * pages

    def column(self, name: str, tokens: int) -> int:
        """Return which column of its group's block table holds the last of a request's ``tokens``.

        Each group counts in its own blocks: for states that is the interval at which they are kept, not
        the size of a block of tokens. 0 for a request without tokens, and for a state that is only live.
        """
        cache = next((s for s in self.states if s.name == name), None)
        size = cache.interval if cache else self.group_of(name).tokens
        return max(tokens - 1, 0) // size if size else 0

    def dcp(self, rank: int = 0, name: str = "latent") -> DCP:
        """Return which positions a rank of the DCP group holds of a token cache."""
        if self.cache(name).replicated:
            return DCP()
        return DCP(world=self.world, rank=rank, interleave=self.interleave)

    def sized(self, *, memory: int | None = None, num_blocks: int | None = None) -> Layout:
        """Return this layout for so many bytes, or so many blocks.

        Raises:
            CacheError: not exactly one is given, or not one block fits.
        """
        if (memory is None) == (num_blocks is None):
            raise CacheError("give either memory= in bytes or num_blocks=, got both or neither")
        many = whole("num_blocks", num_blocks) if memory is None else whole("memory", memory)
        blocks = many if memory is None else many // self.block_bytes
        if blocks < 1:
            raise CacheError(
                f"not one block of {self.block_bytes:,} bytes fits: memory={memory}, num_blocks={num_blocks}; "
                f"give at least {self.block_bytes:,} bytes or a smaller block_size"
            )
        self._check_numbers(blocks)
        return dataclasses.replace(self, num_blocks=blocks)

    def _check_numbers(self, blocks: int) -> None:
        """Refuse a pool whose page numbers leave the int32 of block tables."""
        for cache in self.caches:
            pages = blocks * self.page_step(cache.name)
            if pages >= 1 << 31:
                raise CacheError(
                    f"{blocks:,} blocks are {pages:,} pages of {cache.name}, beyond the int32 of block tables; "
                    "use fewer blocks or a larger page"
                )

    def views(self, pool: Tensor) -> dict[str, dict[int, Tensor]]:
        """Return every layer's views of a pool, without a copy; see ``kimi_hal.cache.views``."""
        from kimi_hal.cache.views import views

        return views(self, pool)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def key(self) -> str:
        """Return canonical JSON: the same text for equal layouts, in every process."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Rebuild from ``to_dict()``.

        Raises:
            CacheError: it is no layout's.
        """
        try:
            return cls._from_dict(data)
        except (TypeError, KeyError, AttributeError) as error:
            raise CacheError(f"this is not what Layout.to_dict() returns: {error!r}") from error

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Layout:
        fields = dict(data)
        fields["caches"] = tuple(_record(TokenCache, c) for c in data["caches"])
        fields["states"] = tuple(
            _record(StateCache, s | {"parts": tuple(_record(StatePart, p) for p in s["parts"])})
            for s in data["states"]
        )
        fields["groups"] = tuple(
            _record(Group, g | {"places": tuple(Place(**p) for p in g["places"])}) for g in data["groups"]
        )
        for name in ("block_size", "block_bytes", "num_blocks", "tp", "world", "interleave", "max_context"):
            fields[name] = whole(name, data[name], 0 if name == "num_blocks" else 1)
        return cls(**fields)


def _record(cls: type[Any], data: Mapping[str, Any]) -> Any:
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})
