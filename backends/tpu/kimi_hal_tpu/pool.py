"""DSA pages and KDA states in one array of blocks, addressed by the numbers of ``kimi_hal.cache``.

XLA has values and no views of one buffer: what a kernel reads is taken from the array, what it wrote is put back. A
step takes the blocks that its tables name, in their order, so that shapes follow from the tables' alone and nothing of
a pool is moved that the step does not name. A block that two requests share, as a prefix does, is taken for each.

Words of 32 bits are what every layout here is made of, and what a TPU moves. The array has one row more than the
layout has blocks: numbers that name nothing read and write that one.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache import Layout
from kimi_hal.cache.layout import Place
from kimi_hal.errors import CacheError

WORD = 4
#: Bytes of a row of Mosaic's pages.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Step:
    """The blocks of one group that a step names, and numbers that count in them.

    Args:
        layout: of the pool, with as many blocks as the step names.
        ids: ``[n]`` int32 block ids of the pool, in order; what names nothing is negative.
        table: ``[R, columns]`` int32 numbers in ``ids``, −1 where the pool's table names nothing.
    """

    layout: Layout
    ids: Tensor
    table: Tensor

    def slots(self, row_req: Tensor, positions: Tensor, kind: str, *, rank: int = 0) -> Tensor:
        """Return the slot of each token as ``kimi_hal.cache.slots`` does, in the blocks of this step."""
        with traced(self.table):
            return cache.slots(self.table, row_req, positions, self.layout, kind, rank=rank)

    def numbers(self, kind: str, slots: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return block table and slots for a kernel that is given what ``Pool.take`` took.

        Args:
            kind: a token cache.
            slots: ``[T]`` int64, as ``slots`` gives them.

        Returns:
            int32 ``[R, columns · layout.pages(kind)]`` and int64 ``[T]``; −1 where there is nothing.
        """
        with traced(self.table):
            table, moved = cache.translate(self.table, slots, self.layout, kind)
            assert table is not None
            page = self.layout.cache(kind).page or self.layout.entries(kind)
            if moved is not None:
                moved = (self._dense(moved // page, kind) * page + moved % page).where(moved >= 0, -1)
            return self._dense(table, kind).where(table >= 0, -1), moved

    def _dense(self, page: Tensor, kind: str) -> Tensor:
        """Return numbers of pages among those that were taken: between two blocks lies nothing of other layers."""
        step = self.layout.page_step(kind)
        return page // step * self.layout.pages(kind) + page % step


class Pool:
    """One array of blocks.

    Args:
        layout: with ``num_blocks`` known, equal for every rank.
        blocks: ``[num_blocks + 1, block_bytes / 4]`` int32 on any device; ``None``: zeros on ``device``.
        device: of a new array.

    Raises:
        CacheError: a layout without blocks or with pages that are no whole words, or an array of another shape.
    """

    def __init__(self, layout: Layout, blocks: Tensor | None = None, *, device: Any = "cpu") -> None:
        self.layout = layout
        shape = (layout.num_blocks + 1, layout.block_bytes // WORD)
        self._check(shape, blocks)
        self.blocks = torch.zeros(shape, dtype=torch.int32).to(device) if blocks is None else blocks

    def step(self, block_table: Tensor) -> Step:
        """Return the blocks that a table names.

        Args:
            block_table: ``[R, columns]`` int32 block ids of a group; for states ``state_ids[:, None]``.

        Raises:
            CacheError: the table has another dtype or number of dimensions, or is on another device.
        """
        _refuse(self._ids("block_table", block_table, 2, "[R, columns]"))
        with traced(block_table):
            ids = block_table.reshape(-1)
            number = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device).view(block_table.shape)
            layout = dataclasses.replace(self.layout, num_blocks=max(1, ids.shape[0]))
            return Step(layout, ids, number.where(self._known(block_table), -1))

    def take(self, kind: str, layer: int, step: Step) -> Tensor:
        """Return one layer's part of a step's blocks, as the operators of the contract take it.

        Returns:
            Latents ``[n, block_size · row_bytes]`` and index keys ``[n · pages, page_bytes]`` uint8; states
            ``[n, H, V, K]`` float32 and ``[n, 3, C]`` or ``[n, C, 3]`` bf16.
        """
        place, start, dtype, shape = self._part(kind, layer)
        words = self._words(place, start, dtype, shape, step)
        with traced(words):
            return words.view(dtype).reshape(-1, *shape)

    def kernel(self, kind: str, layer: int, step: Step) -> Tensor:
        """Return one layer's pages in the layout that Mosaic wants of them.

        Returns:
            Index keys ``[n · pages, page_bytes / 128, 128]`` uint8, latents ``[n · block_size, row_bytes / 4]`` int32.
        """
        self.layout.cache(kind)
        place, start, dtype, shape = self._part(kind, layer)
        words = self._words(place, start, dtype, shape, step)
        with traced(words):
            if self.layout.cache(kind).page is None:
                return words.reshape(-1, self.layout.cache(kind).entry_bytes // WORD)
            return words.view(torch.uint8).reshape(-1, shape[0] // LANES, LANES)

    def put(self, kind: str, layer: int, step: Step, value: Tensor) -> None:
        """Write what ``take`` returned and a kernel changed back into the step's blocks.

        A block that the step names twice must not be one that the kernel wrote: which of the two stays is not said.

        Raises:
            CacheError: the value has another shape or dtype than ``take`` returns, or is on another device.
        """
        place, start, dtype, shape = self._part(kind, layer)
        first, count = _span(place, start, dtype, shape, self._each(kind))
        whole = (step.ids.shape[0] * self._each(kind), *shape)
        if tuple(value.shape) != whole or value.dtype != dtype or value.device != self.blocks.device:
            raise CacheError(
                f"{kind} of layer {layer} is {_kind(dtype)} {list(whole)} on {self.blocks.device} in a step of "
                f"{step.ids.shape[0]} blocks, got {_kind(value.dtype)} {list(value.shape)} on {value.device}: "
                f"give what take({kind!r}, {layer}, step) returned"
            )
        with traced(self.blocks):
            row = step.ids.shape[0], count * WORD // value.element_size()
            packed = value.reshape(row).view(torch.int32)
            self.blocks[self._rows(step), first : first + count] = packed

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, as a request does with a kept state; a pair of which one names nothing is left out.

        Args:
            source: ``[n]`` int32 block ids.
            target: ``[n]`` int32 block ids, each once.

        Raises:
            CacheError: they are not as many, have another dtype or number of dimensions, or are on another device.
        """
        reasons = [*self._ids("source", source, 1, "[n]"), *self._ids("target", target, 1, "[n]")]
        if not reasons and source.shape != target.shape:
            reasons = [
                f"source names {source.shape[0]} blocks, target {target.shape[0]}: each pair is one copy"
            ]
        _refuse(reasons)
        with traced(self.blocks):
            both = self._known(source) & self._known(target)
            rows = [ids.where(both, self.layout.num_blocks).long() for ids in (source, target)]
            self.blocks[rows[1]] = self.blocks.index_select(0, rows[0])

    def _ids(self, name: str, ids: Tensor, dims: int, shape: str) -> list[str]:
        """Return why these cannot be block ids of this pool: nothing is converted, since 2^32 is no block."""
        if ids.dtype == torch.int32 and ids.dim() == dims and ids.device == self.blocks.device:
            return []
        got = f"{_kind(ids.dtype)} {list(ids.shape)} on {ids.device}"
        return [f"{name} must be int32 {shape} on {self.blocks.device}, got {got}"]

    def _known(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & (ids < self.layout.num_blocks)

    def _words(
        self, place: Place, start: int, dtype: torch.dtype, shape: tuple[int, ...], step: Step
    ) -> Tensor:
        first, count = _span(place, start, dtype, shape, self._each(place.cache))
        with traced(self.blocks):
            return self.blocks[:, first : first + count].index_select(0, self._rows(step))

    def _rows(self, step: Step) -> Tensor:
        """Return the row of each block; of one that names nothing the last row."""
        return step.ids.where(self._known(step.ids), self.layout.num_blocks).long()

    def _each(self, kind: str) -> int:
        """Return how many pieces of a part's shape a block has."""
        return self.layout.pages(kind) if any(c.name == kind for c in self.layout.caches) else 1

    def _part(self, kind: str, layer: int) -> tuple[Place, int, torch.dtype, tuple[int, ...]]:
        """Return where a layer's part stands in a block: its place, its start there, its type and shape."""
        layout = self.layout
        for state in layout.states:
            for part in state.parts:
                if part.name == kind:
                    place = _of(layout, state.name, layer)
                    shape = part.local_shape(state.ranks(layout.tp))
                    return place, state.offsets(layout.tp)[kind], getattr(torch, part.dtype), shape
        entries = layout.cache(kind)
        page = entries.page_bytes(entries.page or layout.entries(kind))
        return _of(layout, kind, layer), 0, torch.uint8, (page,)

    def _check(self, shape: tuple[int, int], blocks: Tensor | None) -> None:
        reasons = []
        if self.layout.num_blocks < 1:
            reasons.append("the layout has no blocks yet: layout.sized(memory=…)")
        reasons += [f"{name} is not whole words of {WORD} bytes" for name in _odd(self.layout)]
        if blocks is not None and (tuple(blocks.shape) != shape or blocks.dtype != torch.int32):
            got = f"{_kind(blocks.dtype)} {list(blocks.shape)}"
            reasons.append(
                f"the array of blocks must be int32 {list(shape)}, one row more than blocks; got {got}"
            )
        _refuse(reasons)


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise CacheError("; ".join(reasons))


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _odd(layout: Layout) -> list[str]:
    """Return the caches and parts of states that words of 32 bits do not divide."""
    places = (place for group in layout.groups for place in group.places)
    sizes = [(place.cache, place.offset | place.bytes) for place in places]
    sizes += [(p.name, p.local_bytes(s.ranks(layout.tp))) for s in layout.states for p in s.parts]
    return sorted({name for name, size in sizes if size % WORD})


def _of(layout: Layout, name: str, layer: int) -> Place:
    """Return the place of one layer of a cache."""
    found = {place.layer: place for _, place in layout.places(name)}
    if layer not in found:
        raise CacheError(f"{name} has no layer {layer}; it has {', '.join(map(str, sorted(found)))}")
    return found[layer]


def _span(place: Place, start: int, dtype: torch.dtype, shape: tuple[int, ...], each: int) -> tuple[int, int]:
    """Return the first word of a part in a block's row, and how many."""
    return (place.offset + start) // WORD, each * math.prod(shape) * dtype.itemsize // WORD


def traced(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return what keeps torch's functions in torch-xla's trace; nothing where the tensor is on the host."""
    if tensor.device.type != "xla":
        return nullcontext()
    from kimi_hal_tpu.xla.tracing import Traced

    return Traced()
