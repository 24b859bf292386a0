"""Which bytes a transfer moves: ranges of one pool, and moves from one pool to another. Plain integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kimi_hal.cache.integers import whole
from kimi_hal.cache.kinds import StatePart
from kimi_hal.cache.layout import Layout
from kimi_hal.errors import CacheError, unknown

#: What ``descriptors`` calls a whole row.
BLOCK = "block"


@dataclass(frozen=True)
class Descriptor:
    """A range of memory: ``length`` bytes from ``address``; ``what`` it holds, in words."""

    address: int
    length: int
    what: str


@dataclass(frozen=True)
class Move:
    """``length`` bytes from byte ``source`` of one pool to byte ``target`` of another."""

    source: int
    target: int
    length: int
    what: str


def descriptors(
    layout: Layout, block_ids: Sequence[int], *, base: int = 0, what: str = BLOCK
) -> tuple[Descriptor, ...]:
    """Return the ranges of some blocks, in the order of ``block_ids``.

    Args:
        layout: the packed cache.
        block_ids: blocks; −1 is padding and must be left out.
        base: address of the pool (``pool.data_ptr()``); 0 gives offsets.
        what: "block": each block is one range. A token cache ("latent", "index") or a part of a state
            ("recurrent", "conv"): one range a layer. The conv state is its three reads q, k and v, each of
            one range in channel-major order, of one range a token in token-major order.

    Raises:
        CacheError: a block id outside the layout.
        UnknownNameError: no such part.
    """
    blocks, base = known_blocks(layout, block_ids), whole("base", base)
    ranges = [(0, layout.block_bytes, "")] if what == BLOCK else list(_parts(layout, what))
    return tuple(
        Descriptor(base + block * layout.block_bytes + offset, length, f"block {block}{label}")
        for block in blocks
        for offset, length, label in ranges
    )


def known_blocks(layout: Layout, block_ids: Iterable[int], whose: str = "") -> list[int]:
    """Return block ids as Python ints, whatever integers they are; refuse those that are not in the layout."""
    blocks = [whole(f"a {whose}block id", block) for block in block_ids]
    bad = [block for block in blocks if not 0 <= block < layout.num_blocks]
    if bad:
        raise CacheError(
            f"{whose}block ids {bad} are outside the layout's {layout.num_blocks} blocks; "
            "leave out padding (−1) and size the layout first"
        )
    return blocks


def whole_blocks(layout: Layout, source: Sequence[int], target: Sequence[int]) -> tuple[Move, ...]:
    """Return the moves of whole blocks between two pools of one layout, one a block, neighbours joined."""
    if len(source) != len(target):
        raise CacheError(f"{len(source)} blocks cannot be moved to {len(target)}: give as many of each")
    row = layout.block_bytes
    ids = ([whole("a block id", block) for block in some] for some in (source, target))
    pairs = zip(*ids, strict=True)
    return joined(Move(s * row, t * row, row, f"block {s} to {t}") for s, t in pairs)


def joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Join moves that continue each other on both sides, in their order."""
    found: list[Move] = []
    for move in moves:
        last = found[-1] if found else None
        if last and (last.source + last.length, last.target + last.length) == (move.source, move.target):
            first = last.what.partition(" … ")[0]
            length = last.length + move.length
            found[-1] = Move(last.source, last.target, length, f"{first} … {move.what}")
        else:
            found.append(move)
    return tuple(found)


def _parts(layout: Layout, what: str) -> Iterator[tuple[int, int, str]]:
    """Yield offset, length and label of one cache or part of a state, layer by layer."""
    for cache in layout.caches:
        if cache.name == what:
            for _, place in layout.places(what):
                yield place.offset, place.bytes, f" {what} layer {place.layer}"
            return
    for state in layout.states:
        for part in state.parts:
            if part.name == what:
                start = state.offsets(layout.tp)[what]
                for _, place in layout.places(state.name):
                    for offset, length, segment in _reads(part, state.ranks(layout.tp), state.heads):
                        label = f" {what} layer {place.layer} {segment}".rstrip()
                        yield place.offset + start + offset, length, label
                return
    parts = [part.name for state in layout.states for part in state.parts]
    raise unknown("part of a block", what, [BLOCK, *(c.name for c in layout.caches), *parts])


def _reads(part: StatePart, ranks: int, heads: int | None) -> list[tuple[int, int, str]]:
    """Return the runs of all heads that a rank holds."""
    local = (heads or 1) // ranks
    return part.runs(ranks, range(local), local)
