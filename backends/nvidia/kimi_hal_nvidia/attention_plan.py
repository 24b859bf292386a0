"""How ``sparse_mla`` is cut for a plan, from Spec and Limits alone: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Keys of a tile, as in ``sparse_mla.cu``.
KEYS = 64
PROCESSORS = 132
#: Clusters that an H200 runs at once, by their blocks, which are the parts of a row: its multiprocessors stand in
#: groups of 16 and 18, and one of fewer.
CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 31, 6: 20, 8: 15, 12: 7, 16: 7}


@dataclass(frozen=True)
class Times:
    """Microseconds on an H200.

    Args:
        tile: of a tile of a block's heads.
        whole: of everything else of a row that is not cut.
        cut: of one that is.
    """

    tile: float
    whole: float
    cut: float

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

    def takes(self, tiles: int, parts: int) -> bool:
        """Return whether it can cut so many tiles into so many parts, none of which is without one."""
        cuts = parts == 1 or parts <= min(self.parts, tiles)
        return cuts and -(-tiles // parts) <= self.most and not (self.doubled and parts & (parts - 1))

    def blocks(self, spec: SparseMLASpec) -> int:
        """Return the blocks of a row's heads."""
        return -(-spec.num_heads // self.heads)


def _one(name: str, number: int, heads: int, times: Times, threads: int = 384, parts: int = 16) -> Form:
    return Form(name, number, heads, threads, there=1, parts=parts, times=times, last=times, alone=times)


#: Of ``pair``, two blocks of one warpgroup share a multiprocessor; in ``48`` three warpgroups have one, in the others
#: two; ``few`` has a part's keys at once, or in two turns.
FORMS = (
    _one("16", 1, 16, Times(tile=1.3, whole=1.5, cut=7.0)),
    _one("32", 2, 32, Times(tile=1.6, whole=3.0, cut=10.6)),
    _one("48", 3, 48, Times(tile=1.75, whole=3.0, cut=19.0), threads=512, parts=8),
    Form("pair", 4, 16, 256, 2, 16, Times(2.35, 3.0, 5.0), Times(2.8, 2.0, 7.6), Times(1.9, 2.0, 7.6)),
    replace(_one("few", 5, 16, Times(tile=0.6, whole=4.0, cut=6.0), threads=512), most=4, doubled=True),
)
#: Tiles of latents whose nibbles are decoded take longer.
NIBBLES = {"16": 1.12, "pair": 1.45}
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


def cost(spec: SparseMLASpec, limits: Limits, form: Form, parts: int) -> float:
    """Return about how long a plan's rows take, in microseconds: rounds of as many clusters as there is room for."""
    items, room = limits.max_rows * form.blocks(spec), CLUSTERS[parts] * form.there
    full, rest = divmod(items, room)
    last = form.alone if rest <= CLUSTERS[parts] else form.last
    took = full * form.times.of(tiles(spec), parts) + (last.of(tiles(spec), parts) if rest else 0.0)
    return START + took


def ways(spec: SparseMLASpec, limits: Limits) -> list[tuple[Form, int]]:
    """Return the forms and parts that are possible, what is expected to take the least time first."""
    found = [(form, parts) for form in forms(spec) for parts in CLUSTERS if form.takes(tiles(spec), parts)]
    return sorted(found, key=lambda way: cost(spec, limits, *way))


def cut(spec: SparseMLASpec, limits: Limits, chosen: Mapping[str, int]) -> tuple[Form, int]:
    """Return the form of the kernel, and into how many parts a row's tiles are cut.

    Args:
        spec: of the operator.
        limits: of the plan.
        chosen: a configuration, ``form`` and ``parts``; empty: what is expected to take the least time.
    """
    return next(
        (form, parts)
        for form, parts in ways(spec, limits)
        if chosen.get("form", form.number) == form.number and chosen.get("parts", parts) == parts
    )


def configurations(spec: SparseMLASpec, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return the ways of cutting that ``kimi-hal bench --tune`` tries beside the choice of ``cut``."""
    found = ways(spec, limits)
    most = TRIED * cost(spec, limits, *found[0])
    return tuple(
        {"form": form.number, "parts": parts}
        for form, parts in found
        if cost(spec, limits, form, parts) <= most
    )
