"""How ``sparse_mla`` is cut for a plan, from Spec and Limits alone: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Keys of a tile, as in ``sparse_mla.cu``.
KEYS = 64
PROCESSORS = 132
#: Clusters that an H200 runs at once, by their blocks, which are the parts of a row: its multiprocessors stand in
#: groups of 16 and 18, and one of fewer.
CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 31, 6: 20, 8: 15, 12: 7, 16: 7}


@dataclass(frozen=True)
class Form:
    """A layout of the kernel.

    Args:
        name: of the form.
        number: in a configuration.
        heads: of a block.
        threads: of a block.
        there: blocks that a multiprocessor has room for.
        tile: microseconds of a tile, where all blocks that fit are at work: measured on an H200.
        whole: microseconds of everything else of a row that is not cut.
        cut: of one that is.
    """

    name: str
    number: int
    heads: int
    threads: int
    there: int
    tile: float
    whole: float
    cut: float

    def blocks(self, spec: SparseMLASpec) -> int:
        """Return the blocks of a row's heads."""
        return -(-spec.num_heads // self.heads)


#: Of ``pair``, two blocks of one warpgroup share a multiprocessor; in the others two warpgroups have one to themselves.
FORMS = (
    Form("16", 1, heads=16, threads=384, there=1, tile=1.3, whole=2.0, cut=12.0),
    Form("32", 2, heads=32, threads=384, there=1, tile=1.8, whole=3.0, cut=14.0),
    Form("48", 3, heads=48, threads=384, there=1, tile=2.1, whole=4.0, cut=20.0),
    Form("pair", 4, heads=16, threads=256, there=2, tile=2.5, whole=4.0, cut=16.0),
)
#: How much longer than the best, by these figures, a way may be expected to take that ``kimi-hal bench --tune`` tries.
TRIED = 1.4


def tiles(spec: SparseMLASpec) -> int:
    """Return the tiles of a row's keys."""
    return -(-spec.topk // KEYS)


def cost(spec: SparseMLASpec, limits: Limits, form: Form, parts: int) -> float:
    """Return about how long a plan's rows take, in microseconds."""
    rounds = -(-limits.max_rows * form.blocks(spec) // (CLUSTERS[parts] * form.there))
    return rounds * (-(-tiles(spec) // parts) * form.tile + (form.whole if parts == 1 else form.cut))


def ways(spec: SparseMLASpec, limits: Limits) -> list[tuple[Form, int]]:
    """Return the forms and parts that are possible, what is expected to take the least time first."""
    found = [(form, parts) for form in FORMS for parts in CLUSTERS if parts == 1 or parts <= tiles(spec)]
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
