"""How ``sparse_mla`` is cut for a plan, from Spec and Limits alone: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kimi_hal.errors import TableError
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia.h200 import CLUSTERS, PROCESSORS

#: Keys of a tile, as in ``sparse_mla.cu``.
KEYS = 64
#: Parts of a row that may meet in memory, up to ``MOST_PARTIALS`` of ``sparse_mla.cu``: three, six and seven never took
#: the least time.
MEETING_PARTS = (2, 4, 5, 8)
#: Bytes of workspace that a head of such a part takes, as in ``meeting.cuh``, and all of a plan's at most, which the
#: second-level cache is to hold.
PARTIAL_BYTES, MOST_WORKSPACE = 2112, 24 << 20


@dataclass(frozen=True)
class Times:
    """Microseconds on an H200.

    Args:
        tile: of a tile of a block's heads.
        whole: of everything else of a row that is not cut.
        cut: of one that is.
        meeting: of a block whose parts meet in memory.
        added: of each part that it leaves there.
        held: of each part a multiprocessor that all blocks leave there, one at least, before the last one is added.
        sums: of each part of a row that is added to the others.
    """

    tile: float
    whole: float
    cut: float
    meeting: float = 0.0
    added: float = 0.0
    held: float = 0.0
    sums: float = 0.0

    def of(self, tiles: int, parts: int) -> float:
        """Return how long a part of a row takes."""
        return -(-tiles // parts) * self.tile + (self.whole if parts == 1 else self.cut)


@dataclass(frozen=True)
class Form:
    """A layout of the kernel.

    Args:
        name: of the form.
        number: in a configuration.
        heads: of a block.
        threads: of a block.
        there: blocks that a multiprocessor has room for.
        parts: that it cuts a row into, at most.
        times: of a block, in a round of as many as there is room for, which others follow.
        last: in a last round that fills more than one block a multiprocessor.
        alone: in one that does not.
        most: tiles of a part that it has room for.
        doubled: it only cuts a row into a power of two.
        relayed: its warpgroups share a tile; of parts that meet in memory a block has one.
    """

    name: str
    number: int
    heads: int
    threads: int
    there: int
    parts: int
    times: Times
    last: Times
    alone: Times
    most: int = 1 << 30
    doubled: bool = False
    relayed: bool = False

    def takes(self, tiles: int, parts: int) -> bool:
        """Return whether it can cut so many tiles into so many parts, none of which is without one."""
        cuts = parts == 1 or parts <= min(self.parts, tiles)
        return cuts and -(-tiles // parts) <= self.most and not (self.doubled and parts & (parts - 1))

    def meets(self, tiles: int, parts: int) -> bool:
        """Return whether it can have so many parts of a row meet in memory."""
        return self.times.meeting > 0.0 and parts in MEETING_PARTS and self.takes(tiles, parts)

    def blocks(self, spec: SparseMLASpec) -> int:
        """Return the blocks of a row's heads."""
        return -(-spec.num_heads // self.heads)


def _one(name: str, number: int, heads: int, times: Times, threads: int = 384) -> Form:
    return Form(name, number, heads, threads, there=1, parts=16, times=times, last=times, alone=times)


#: Of ``pair``, two blocks of one warpgroup share a multiprocessor; in ``48`` three warpgroups have one, in the others
#: two; ``few`` has a part's keys at once.
FORMS = (
    _one("16", 1, 16, Times(1.3, 0.2, 5.0, meeting=1.5, added=1.0, held=1.45, sums=0.5)),
    _one("32", 2, 32, Times(1.6, 11.2, 10.3, meeting=4.1, added=0.8, held=3.7, sums=0.7)),
    replace(
        _one("48", 3, 48, Times(1.75, 15.3, 22.3, meeting=14.2, added=3.1, held=0.8), threads=512),
        parts=8,
        relayed=True,
    ),
    Form("pair", 4, 16, 256, 2, 16, Times(2.37, 1.0, 9.0), Times(2.6, 0.0, 10.3), Times(1.92, 1.0, 7.6)),
    replace(_one("few", 5, 16, Times(tile=1.9, whole=2.5, cut=3.2), threads=512), most=2, doubled=True),
)
#: Tiles of latents whose nibbles are decoded take longer.
NIBBLES = {"16": 1.05, "32": 1.3, "pair": 1.45}
#: Microseconds before the first round is at work.
START = 5.0
#: How much longer than the best, by these figures, a way may be expected to take that ``kimi-hal bench --tune`` tries.
TRIED = 1.4


def tiles(spec: SparseMLASpec) -> int:
    """Return the tiles of a row's keys."""
    return -(-spec.topk // KEYS)


def forms(spec: SparseMLASpec) -> tuple[Form, ...]:
    """Return the forms of a latent format."""
    if spec.latent != "latent.nvfp4.352":
        return FORMS

    def slower(form: Form) -> Form:
        by = NIBBLES.get(form.name, 1.0)
        last, alone = (replace(t, tile=t.tile * by) for t in (form.last, form.alone))
        return replace(form, times=replace(form.times, tile=form.times.tile * by), last=last, alone=alone)

    return tuple(map(slower, FORMS))


class Way(NamedTuple):
    """A form, the parts that it cuts a row's tiles into, and whether they meet in memory and not in a cluster."""

    form: Form
    parts: int
    in_memory: bool = False

    @property
    def configuration(self) -> dict[str, int]:
        """What a table of measurements says to have it so."""
        return {"form": self.form.number, "parts": self.parts} | ({"in_memory": 1} if self.in_memory else {})


def workspace_bytes(spec: SparseMLASpec, limits: Limits, way: Way) -> int:
    """Return the bytes of workspace in which the parts of a plan's rows meet."""
    each = way.form.heads * PARTIAL_BYTES
    return limits.max_rows * way.form.blocks(spec) * way.parts * each if way.in_memory else 0


def counter_bytes(spec: SparseMLASpec, limits: Limits, way: Way) -> int:
    """Return the bytes by which a launch counts parts that meet in memory: eight a row and block of heads."""
    return -(-limits.max_rows * way.form.blocks(spec) // 2) * 16


def cost(spec: SparseMLASpec, limits: Limits, way: Way) -> float:
    """Return about how long a plan's rows take, in microseconds: rounds of as many clusters as there is room for.

    Parts that meet in memory are dealt to as many blocks as there is room for.
    """
    form, parts, _ = way
    items = limits.max_rows * form.blocks(spec)
    if way.in_memory:
        every, times = items * parts, form.times
        dealt = -(-every // PROCESSORS)
        took = dealt * (-(-tiles(spec) // parts) * times.tile + times.added)
        return START + times.meeting + took + max(1.0, every / PROCESSORS) * times.held + parts * times.sums
    room = CLUSTERS[parts] * form.there
    full, rest = divmod(items, room)
    last = form.alone if rest <= CLUSTERS[parts] else form.last
    took = full * form.times.of(tiles(spec), parts) + (last.of(tiles(spec), parts) if rest else 0.0)
    return START + took


def possible(spec: SparseMLASpec) -> list[Way]:
    """Return the ways that there are for a row's keys."""
    clusters = [Way(f, parts) for f in forms(spec) for parts in CLUSTERS if f.takes(tiles(spec), parts)]
    met = [
        Way(f, parts, in_memory=True)
        for f in forms(spec)
        for parts in MEETING_PARTS
        if f.meets(tiles(spec), parts)
    ]
    return clusters + met


def ways(spec: SparseMLASpec, limits: Limits) -> list[Way]:
    """Return those that leave no more than they may, what is expected to take the least time first."""
    found = [way for way in possible(spec) if workspace_bytes(spec, limits, way) <= MOST_WORKSPACE]
    return sorted(found, key=lambda way: cost(spec, limits, way))


def cut(spec: SparseMLASpec, limits: Limits, chosen: Mapping[str, int]) -> Way:
    """Return the form of the kernel, into how many parts a row's tiles are cut, and where they meet.

    Args:
        spec: of the operator.
        limits: of the plan.
        chosen: a configuration, ``Way.configuration``; empty: what is expected to take the least time.

    Raises:
        TableError: there is no such way.
    """
    if not chosen:
        return ways(spec, limits)[0]
    way = next((way for way in possible(spec) if way.configuration == chosen), None)
    if way is None:
        said = ", ".join(f"{name} {value}" for name, value in chosen.items())
        raise TableError(
            f"sparse_mla cannot cut {tiles(spec)} tiles of keys by {said}: "
            "take that line out of the table of measurements, or measure again by kimi-hal bench --tune."
        )
    return way


def covers(spec: SparseMLASpec, limits: Limits, own: Way, way: Way) -> bool:
    """Return whether a plan whose own choice is ``own`` asks for as much memory as another way needs.

    Where it does not, parts that would meet in memory meet in clusters.
    """
    if not way.in_memory:
        return True
    kinds = (workspace_bytes, counter_bytes)
    return own.in_memory and all(size(spec, limits, way) <= size(spec, limits, own) for size in kinds)


def configurations(spec: SparseMLASpec, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return the ways of cutting that ``kimi-hal bench --tune`` tries beside the choice of ``cut``.

    Those that meet in memory are among them as far as the plan asks for as much.
    """
    own, *others = ways(spec, limits)
    most = TRIED * cost(spec, limits, own)
    tried = (way for way in others if cost(spec, limits, way) <= most and covers(spec, limits, own, way))
    return tuple(way.configuration for way in (own, *tried))


def decode_configurations(spec: DSASpec, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return those of the attention in ``dsa_decode``."""
    return configurations(spec.attn, limits, arch)
