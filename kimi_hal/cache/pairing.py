"""A prefill and a decode instance whose blocks pair: which ranges of whose pool a decode rank reads.

Entries of tokens are the same on every tensor-parallel rank, so a decode rank reads them from one prefill
rank. Heads of states are divided, so it reads the states of its heads from the ranks that hold them. Block
sizes are powers of two: one large block is a whole number of small ones, layer by layer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kimi_hal.cache.integers import whole
from kimi_hal.cache.kinds import StateCache, TokenCache
from kimi_hal.cache.layout import TOKENS, Layout, Place
from kimi_hal.cache.ranges import Move, joined, known_blocks, whole_blocks
from kimi_hal.errors import CacheError

#: Blocks of one request by group: in token groups in the order of positions, in state groups one.
Blocks = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Pair:
    """Two layouts that pair. Offsets of its moves count from the start of each rank's pool."""

    prefill: Layout
    decode: Layout

    @property
    def same(self) -> bool:
        """Tell whether a block of one is byte for byte a block of the other."""
        names = ("block_size", "block_bytes", "tp", "groups")
        return all(getattr(self.prefill, name) == getattr(self.decode, name) for name in names)

    def state_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the prefill ranks that hold the heads of a decode rank."""
        self._check_rank(rank)
        many, few = self.prefill.tp, self.decode.tp
        if many >= few:
            return tuple(range(rank * (many // few), (rank + 1) * (many // few)))
        return (rank // (few // many),)

    def token_rank(self, rank: int) -> int:
        """Return the prefill rank from which a decode rank reads entries of tokens.

        Both hold the same share of the context (rank mod world, DCP groups being consecutive ranks); where
        there are several, one that the decode rank reads states from is taken, else they take turns.
        """
        world = self.prefill.world
        holders = range(rank % world, self.prefill.tp, world)
        both = [r for r in self.state_ranks(rank) if r in holders]
        return both[0] if both else holders[rank // world % len(holders)]

    def moves(self, rank: int, source: Blocks, target: Blocks) -> dict[int, tuple[Move, ...]]:
        """Return what a decode rank reads for one request, by prefill rank.

        Args:
            rank: tensor-parallel rank of the decode instance.
            source: the request's blocks in the prefill instance, by group ("tokens", "kda.0", …).
            target: its blocks in the decode instance. Where token blocks are of two sizes, the last of the
                larger ones may be matched in part.

        Returns:
            Moves from each prefill rank's pool into this rank's. Of two instances of one layout a block is
            one move; neighbouring blocks are joined.

        Raises:
            CacheError: blocks outside a layout or that do not match, one written twice, an unknown rank.
            UnknownNameError: an unknown group.
        """
        self._check_rank(rank)
        source, target = self._request(source, target)
        if self.same:
            return {rank: self._whole(source, target)}
        found = {self.token_rank(rank): list(self._tokens(source, target))}
        for peer in sorted({self.token_rank(rank), *self.state_ranks(rank)}):
            found.setdefault(peer, []).extend(self._states(rank, peer, source, target))
        return {p: joined(sorted(some, key=lambda m: m.source)) for p, some in found.items() if some}

    def _whole(self, source: Blocks, target: Blocks) -> tuple[Move, ...]:
        """Return the moves of a request between instances of one layout."""
        return tuple(
            m for name in source for m in whole_blocks(self.prefill, source[name], target.get(name, ()))
        )

    def _tokens(self, source: Blocks, target: Blocks) -> Iterator[Move]:
        """Yield the pages of every layer: block for block, or small blocks inside large ones."""
        equal = self.prefill.groups[0] == self.decode.groups[0]
        if equal:  # blocks of one size: one range each
            for a, b in zip(source.get(TOKENS, ()), target.get(TOKENS, ()), strict=True):
                start, end = a * self.prefill.block_bytes, b * self.decode.block_bytes
                yield Move(start, end, self.prefill.used_bytes, f"block {a} to {b}")
        for cache in self.prefill.caches:
            if equal and cache.window is None:
                continue
            pairs = zip(self.prefill.places(cache.name), self.decode.places(cache.name), strict=True)
            for (group, p), (other, d) in pairs:
                ours, theirs = source.get(group.name, ()), target.get(other.name, ())
                size = min(p.bytes, d.bytes)
                for i in range(min(len(ours) * (p.bytes // size), len(theirs) * (d.bytes // size))):
                    start = _byte(self.prefill, ours, p, i * size)
                    end = _byte(self.decode, theirs, d, i * size)
                    yield Move(start, end, size, f"{cache.name} layer {p.layer}")

    def _states(self, rank: int, peer: int, source: Blocks, target: Blocks) -> Iterator[Move]:
        """Yield the states of the heads that a prefill rank and a decode rank both hold.

        A state that every rank holds whole is read where tokens are.
        """
        whole, parts = peer == self.token_rank(rank), peer in self.state_ranks(rank)
        for state in self.prefill.states:
            if not (whole if state.heads is None else parts):
                continue
            pairs = zip(self.prefill.places(state.name), self.decode.places(state.name), strict=True)
            for (group, p), (other, d) in pairs:
                both = zip(source.get(group.name, ()), target.get(other.name, ()), strict=True)
                for ours, theirs in both:
                    start = ours * self.prefill.block_bytes + p.offset
                    end = theirs * self.decode.block_bytes + d.offset
                    for move in _heads(state, self.prefill.tp, peer, self.decode.tp, rank):
                        what = f"{move.what} layer {p.layer}"
                        yield Move(start + move.source, end + move.target, move.length, what)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= whole("rank", rank) < self.decode.tp:
            raise CacheError(f"rank={rank} is outside the decode instance's tp={self.decode.tp}")

    def _request(self, source: Blocks, target: Blocks) -> tuple[Blocks, Blocks]:
        """Return both sides' blocks as ints, or say why they cannot be moved."""
        source = _named(self.prefill, source, "prefill ")
        target = _named(self.decode, target, "decode ")
        reasons = []
        written = Counter(block for ids in target.values() for block in ids)
        twice = [block for block, times in written.items() if times > 1]
        if twice:
            reasons.append(f"decode blocks {twice} are named twice: one would overwrite the other")
        counts = [len(blocks.get(TOKENS, ())) for blocks in (source, target)]
        sizes = [self.prefill.block_size, self.decode.block_size]
        if len({-(-n * size // max(sizes)) for n, size in zip(counts, sizes, strict=True)}) > 1:
            reasons.append(f"{counts[0]} token blocks of {sizes[0]} do not match {counts[1]} of {sizes[1]}")
        reasons += _counts(self.prefill, source, self.decode, target)
        if reasons:
            raise CacheError("; ".join(reasons))
        return source, target


def _named(layout: Layout, blocks: Blocks, whose: str) -> Blocks:
    """Return the blocks of groups that the layout has."""
    return {layout.group(name).name: known_blocks(layout, ids, whose) for name, ids in blocks.items()}


def pair(prefill: Layout, decode: Layout) -> Pair:
    """Check that the blocks of two instances pair. Call it when they meet, before a request is taken.

    Raises:
        CacheError: what differs and must not, all reasons together: formats, layers, states, how positions
            are spread over ranks, tensor-parallel or block sizes of which neither divides the other.
    """
    reasons = list(_differences(prefill, decode))
    if reasons:
        raise CacheError("these instances cannot exchange blocks: " + "; ".join(reasons))
    return Pair(prefill, decode)


def _differences(prefill: Layout, decode: Layout) -> Iterator[str]:
    for what in ("caches", "states"):
        ours = {c.name: c for c in getattr(prefill, what)}
        theirs = {c.name: c for c in getattr(decode, what)}
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name):
                yield f"prefill holds {_said(ours.get(name))}, decode {_said(theirs.get(name))}"
    spread = [f"{x.world} rank(s) with interleave {x.interleave}" for x in (prefill, decode)]
    if spread[0] != spread[1]:
        yield f"prefill spreads positions over {spread[0]}, decode over {spread[1]}: give both the same"
    for cache in prefill.caches:
        if prefill.block_size != decode.block_size and cache.window is None and not cache.divisible:
            yield f"a page of {cache.name} is a whole block: give both the same block_size"
    for name, word in (("tp", "tensor-parallel sizes"), ("block_size", "block sizes")):
        a, b = getattr(prefill, name), getattr(decode, name)
        if max(a, b) % min(a, b):
            yield f"{word} {a} and {b} do not divide evenly: use powers of two"


def _said(cache: TokenCache | StateCache | None) -> str:
    """Describe a cache by its fields that are not defaults."""
    if cache is None:
        return "none"
    given = [(f.name, getattr(cache, f.name)) for f in dataclasses.fields(cache) if f.name != "layers"]
    defaults = {f.name: f.default for f in dataclasses.fields(cache)}
    said = ", ".join(f"{name}={value!r}" for name, value in given if value != defaults[name])
    return f"{said} on {len(cache.layers)} layers"


def _counts(prefill: Layout, source: Blocks, decode: Layout, target: Blocks) -> Iterator[str]:
    """Yield the groups of states and windows of which one side names another number of blocks."""
    windows = [cache.name for cache in prefill.caches if cache.window is not None]
    for name in (*windows, *(state.name for state in prefill.states)):
        for (ours, _), (theirs, _) in zip(prefill.places(name), decode.places(name), strict=True):
            a, b = len(source.get(ours.name, ())), len(target.get(theirs.name, ()))
            if a != b:
                yield f"prefill names {a} blocks of {ours.name}, decode {b} of {theirs.name}"
                break


def _byte(layout: Layout, blocks: Sequence[int], place: Place, offset: int) -> int:
    """Return the byte of a pool that is byte ``offset`` of a request's pages of one layer."""
    block, inside = divmod(offset, place.bytes)
    return blocks[block] * layout.block_bytes + place.offset + inside


def _heads(state: StateCache, prefill_tp: int, peer: int, decode_tp: int, rank: int) -> Iterator[Move]:
    """Yield the runs of the heads that two ranks share, from one state's start to the other's."""
    many, few = state.ranks(prefill_tp), state.ranks(decode_tp)
    total = state.heads or 1
    peer, rank = (peer, rank) if state.heads else (0, 0)
    first = max(total // many * peer, total // few * rank)
    last = min(total // many * (peer + 1), total // few * (rank + 1))
    for part in state.parts:
        ours = range(first - total // many * peer, last - total // many * peer)
        theirs = range(first - total // few * rank, last - total // few * rank)
        runs = zip(part.runs(many, ours, total // many), part.runs(few, theirs, total // few), strict=True)
        start, end = state.offsets(prefill_tp)[part.name], state.offsets(decode_tp)[part.name]
        for (source, length, segment), (target, _, _) in runs:
            yield Move(start + source, end + target, length, f"{part.name} {segment}".rstrip())
