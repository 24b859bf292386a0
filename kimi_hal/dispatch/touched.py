"""Copy only what a call may write: the pages and slots that its arguments name, packed together.

A cache is gigabytes, and a call writes a few of its rows. The packed copy is a small cache of its own; the
ids that name its rows are renumbered, so that the reference can run on it as on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal import formats
from kimi_hal.ops.operator import Operator


@dataclass(frozen=True)
class Named:
    """Which arguments name the rows (first dimension) of the buffers that a call writes.

    Args:
        buffers: the written arguments; a list counts as its tensors.
        ids: arguments of row numbers; a negative one names none.
        page: Spec -> how many ids share a row (slots of a page).
    """

    buffers: tuple[str, ...]
    ids: tuple[str, ...]
    page: Callable[[Any], int] = lambda spec: 1


#: Written arguments that are not here are copied whole: activations, and records.
NAMED = {
    "store_index_keys": Named(("cache",), ("slots",), lambda spec: formats.index(spec.index).page),
    "store_latent": Named(("cache",), ("slots",), lambda spec: int(spec.page)),
    "kda_conv": Named(("conv_state",), ("state_ids", "checkpoint_ids")),
    "kda_prefill": Named(("state",), ("state_ids", "checkpoint_ids")),
    "kda_decode": Named(("state",), ("state_ids",)),
    "kda_commit": Named(("conv_states", "states"), ("state_ids", "out_ids", "checkpoint_ids")),
    "kda_layer_decode": Named(("conv_state", "state"), ("state_ids",)),
}


@dataclass
class Snapshot:
    """The written rows as they were before a call, with what is needed to run on them alone.

    Attributes:
        arguments: replacements by argument: packed copies, and renumbered ids.
        rows: the rows of each named buffer that its packed copy holds; ``None`` = all.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)

    def written(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield label, the call's rows as they are now, and this copy's, for each written buffer."""
        for name, rows in self.rows.items():
            now, copy = given[name], self.arguments[name]
            many = isinstance(now, list | tuple)
            pairs = zip(now, copy, strict=True) if many else [(now, copy)]
            for i, (buffer, kept) in enumerate(pairs):
                label = f"{name}[{i}]" if many else name
                yield label, buffer if rows is None else buffer[rows[: kept.shape[0]]], kept


def snapshot(op: Operator, spec: Any, given: Mapping[str, Any]) -> Snapshot:
    """Copy what a call with these arguments may write."""
    taken = Snapshot()
    named = NAMED.get(op.name, Named((), ()))
    if named.buffers:
        _pack(taken, named, spec, given)
    for name in op.mutated:
        if name not in named.buffers:
            taken.arguments[name] = _each(given[name], lambda buffer: buffer.clone())
            taken.rows[name] = None
    return taken


def _pack(taken: Snapshot, named: Named, spec: Any, given: Mapping[str, Any]) -> None:
    import torch

    page = named.page(spec)
    ids = [given[name].long() for name in named.ids if given.get(name) is not None]
    pools = [t for name in named.buffers for t in (_list(given[name]))]
    capacity = max(pool.shape[0] for pool in pools)
    rows: Any = torch.cat([i.flatten() for i in ids]) // page
    rows = rows[(rows >= 0) & (rows < capacity)].unique()  # sorted: a smaller pool's are the first of them
    for name in named.buffers:
        taken.arguments[name] = _each(given[name], lambda pool: pool[rows[rows < pool.shape[0]]])
        taken.rows[name] = rows
    for name in named.ids:
        if given.get(name) is not None:
            taken.arguments[name] = _renumbered(given[name], rows, page, capacity)


def _renumbered(ids: Any, rows: Any, page: int, capacity: int) -> Any:
    """Return ids that name the packed rows; what named no row of a pool still names none."""
    import torch

    wide = ids.long()
    live = (wide >= 0) & (wide // page < capacity)
    place = torch.searchsorted(rows, torch.where(live, wide // page, 0))
    packed = torch.where(live, place * page + wide % page, torch.where(wide < 0, wide, len(rows) * page))
    return packed.to(ids.dtype)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _each(value: Any, copy: Callable[[Any], Any]) -> Any:
    return [copy(tensor) for tensor in value] if isinstance(value, list | tuple) else copy(value)
