"""Which layers share a block: the tokens' pages, and buckets of states and of windows that fit its row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kimi_hal.cache.kinds import StateCache, TokenCache
from kimi_hal.cache.layout import TOKENS, Group, Place
from kimi_hal.errors import CacheError


@dataclass(frozen=True)
class Piece:
    """One layer's bytes, before they have a place."""

    cache: str
    layer: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Layers whose blocks a request has at the same times; split into groups where one row is too small."""

    name: str
    pieces: tuple[Piece, ...]
    tokens: int | None
    window: int | None = None

    def split(self, room: int) -> tuple[Group, ...]:
        """Return the fewest groups that each fit ``room`` bytes; layers are dealt in turn, so groups are even.

        Dealing in turn, as vLLM's planner does, also keeps groups even on each stage of a pipeline.

        Raises:
            CacheError: one layer's piece alone is larger than ``room``.
        """
        largest = max(self.pieces, key=lambda piece: piece.bytes)
        if largest.bytes > room:
            raise CacheError(
                f"one layer's {largest.cache}, {largest.bytes:,} bytes, does not fit a block row of {room:,} bytes"
            )
        count = next(
            n for n in range(1, len(self.pieces) + 1) if all(_total(part) <= room for part in self._deal(n))
        )
        if count == 1:
            return (self._group(self.name, self.pieces),)
        return tuple(self._group(f"{self.name}.{i}", part) for i, part in enumerate(self._deal(count)))

    def _deal(self, count: int) -> list[tuple[Piece, ...]]:
        return [self.pieces[i::count] for i in range(count)]

    def _group(self, name: str, pieces: Sequence[Piece]) -> Group:
        return Group(name=name, places=tuple(_placed(pieces)), tokens=self.tokens, window=self.window)


def token_bucket(caches: Sequence[TokenCache], block_size: int, world: int) -> Bucket | None:
    """Return the bucket of what keeps the whole history, or None without such a cache."""
    whole = [cache for cache in caches if cache.window is None]
    pieces = tuple(
        Piece(cache.name, layer, _page_bytes(cache, block_size * (world if cache.replicated else 1)))
        for cache in whole
        for layer in cache.layers
    )
    return Bucket(TOKENS, pieces, block_size * world) if pieces else None


def window_buckets(caches: Sequence[TokenCache], block_size: int) -> Iterator[Bucket]:
    """Yield a bucket for each window and block size. Windows are short: every rank of a DCP group holds all."""
    shapes = dict.fromkeys((c.window, c.block_size or block_size) for c in caches if c.window is not None)
    for window, tokens in shapes:
        pieces = tuple(
            Piece(cache.name, layer, _page_bytes(cache, tokens))
            for cache in caches
            if (cache.window, cache.block_size or block_size) == (window, tokens)
            for layer in cache.layers
        )
        yield Bucket(f"window{window}x{tokens}", pieces, tokens, window)


def state_buckets(states: Sequence[StateCache], tp: int) -> Iterator[Bucket]:
    """Yield a bucket for each interval at which states are kept; states of one interval share blocks."""
    for interval in dict.fromkeys(state.interval for state in states):
        some = [state for state in states if state.interval == interval]
        pieces = tuple(
            Piece(state.name, layer, state.state_bytes(tp)) for state in some for layer in state.layers
        )
        yield Bucket("+".join(state.name for state in some), pieces, interval)


def _page_bytes(cache: TokenCache, tokens: int) -> int:
    """Return the bytes of one layer's pages in a block of ``tokens``, which must be whole entries and pages."""
    entries, rest = divmod(tokens, cache.ratio)
    if rest or not entries:
        raise CacheError(
            f"a block of {tokens} tokens is not whole entries of {cache.ratio} tokens of {cache.name}; "
            f"use a multiple of {cache.ratio}"
        )
    if cache.page is None:
        return cache.page_bytes(entries)
    if entries % cache.page:
        raise CacheError(
            f"a block of {tokens} tokens is not whole pages of {cache.page} entries of {cache.name}; "
            f"use block_size={cache.page * cache.ratio} or a larger power of two"
        )
    return entries // cache.page * cache.page_bytes(cache.page)


def _total(pieces: Sequence[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)


def _placed(pieces: Sequence[Piece]) -> Iterator[Place]:
    offset = 0
    for piece in pieces:
        yield Place(cache=piece.cache, layer=piece.layer, offset=offset, bytes=piece.bytes)
        offset += piece.bytes
