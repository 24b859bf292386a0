"""What a model keeps between steps, as data: entries of tokens, and states of requests.

The planner reads nothing else, so a model with other pages is described here and planned by the same code
(``models.py`` holds three). Names follow the field: an entry is what one token, or ``ratio`` tokens, leave in
one layer's cache; a page is what a kernel addresses; a block is what an engine allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_hal.cache.integers import whole
from kimi_hal.errors import CacheError

#: Bytes of an element, by dtype name.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

#: A state, and each of its parts, starts at a multiple of so many bytes.
STATE_ALIGN = 256


def up(size: int, multiple: int) -> int:
    """Round a size up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Entries that tokens leave in some layers, all of one width.

    Args:
        name: how views, translation and descriptors call it: "latent", "index".
        layers: layers that have one, in the order in which their pages stand in a row.
        entry_bytes: bytes of one entry, scales included.
        format: its name in ``kimi_hal.formats``; "" for a layout that is not registered there.
        page: entries of a kernel page; ``None``: the entries of a block are one page, whatever their number,
            and with ``align=1`` they are rows, one after another.
        ratio: tokens that one entry stands for (a compressed cache: 4, 128).
        window: tokens of history that a request keeps; ``None``: all.
        block_size: tokens of a block, for a windowed cache; ``None``: the plan's.
        align: a page is padded to a multiple of so many bytes.
        replicated: under DCP each rank holds the entries of all ranks, instead of its own.
    """

    name: str
    layers: tuple[int, ...]
    entry_bytes: int
    format: str = ""
    page: int | None = None
    ratio: int = 1
    window: int | None = None
    block_size: int | None = None
    align: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes below 1, layers named twice, and a block size without a window."""
        sizes = {"entry_bytes": self.entry_bytes, "ratio": self.ratio, "align": self.align}
        sizes |= {n: v for n in ("page", "window", "block_size") if (v := getattr(self, n)) is not None}
        for name, value in sizes.items():
            whole(f"cache {self.name!r}: {name}", value, 1)
        _distinct(self.name, self.layers)
        if self.block_size is not None and self.window is None:
            raise CacheError(
                f"cache {self.name!r}: block_size={self.block_size} needs a window; "
                "caches of the whole history share the plan's block_size"
            )

    @property
    def row_multiple(self) -> int:
        """Return what a block's bytes must be a multiple of, so that kernels can address this cache.

        A page of its own numbering: whole pages, so that page ``block * (block_bytes / page_bytes) + j``
        exists. A page that is the block: whole entries, for kernels that address rows, or whole ``align``.
        """
        if self.page is not None:
            return self.page_bytes(self.page)
        return self.entry_bytes if self.align == 1 else self.align

    @property
    def divisible(self) -> bool:
        """Tell whether the pages of a large block are those of small blocks, one after another."""
        return self.page is not None or self.align == 1

    def page_bytes(self, entries: int) -> int:
        """Return the bytes of a page of so many entries."""
        return up(entries * self.entry_bytes, self.align)


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One tensor of a state. ``shape`` is that of all heads; one axis is divided among the ranks.

    Args:
        name: "recurrent" or "conv".
        dtype: "float32", "bfloat16", "float16" or "uint8".
        shape: sizes over all heads.
        axis: the axis that heads divide.
        segments: names of the runs along that axis, each of which holds all heads: ("q", "k", "v").
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int = 0
    segments: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        """Refuse an unknown dtype, an axis that is not there, and no segments."""
        if self.dtype not in ITEM_BYTES:
            raise CacheError(
                f"state part {self.name!r}: dtype {self.dtype!r} is not {' or '.join(ITEM_BYTES)}"
            )
        for size in self.shape:
            whole(f"state part {self.name!r}: a size of its shape", size)
        if not 0 <= self.axis < len(self.shape) or min(self.shape) < 1:
            raise CacheError(f"state part {self.name!r}: axis {self.axis} is not in shape {list(self.shape)}")
        if not self.segments:
            raise CacheError(f"state part {self.name!r}: segments are empty; a part of one run has ('',)")

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of ``tp`` ranks holds."""
        sizes = list(self.shape)
        sizes[self.axis] //= tp
        return tuple(sizes)

    def local_bytes(self, tp: int) -> int:
        """Return the bytes that one of ``tp`` ranks holds."""
        return math.prod(self.local_shape(tp)) * ITEM_BYTES[self.dtype]

    def runs(self, tp: int, heads: range, total: int) -> list[tuple[int, int, str]]:
        """Return where some of a rank's heads lie: ``(offset, bytes, segment)`` of each contiguous run.

        Args:
            tp: ranks that divide the heads.
            heads: heads of this rank, counted from its own first one.
            total: heads of this rank.
        """
        shape = self.local_shape(tp)
        inner = math.prod(shape[self.axis + 1 :]) * ITEM_BYTES[self.dtype]
        head = shape[self.axis] // len(self.segments) // total * inner
        return [
            (outer * shape[self.axis] * inner + (s * total + heads.start) * head, len(heads) * head, segment)
            for outer in range(math.prod(shape[: self.axis]))
            for s, segment in enumerate(self.segments)
        ]


@dataclass(frozen=True, kw_only=True)
class StateCache:
    """The state that a request has in each of some layers, of one size whatever its length.

    Args:
        name: "kda".
        layers: layers that have one.
        heads: heads that ranks divide; ``None``: every rank holds the whole state.
        parts: its tensors, in the order in which they stand in a block.
        interval: tokens between the states that prefix caching keeps, a multiple of the block size;
            ``None``: only the live state is kept.
    """

    name: str
    layers: tuple[int, ...]
    heads: int | None
    parts: tuple[StatePart, ...]
    interval: int | None = None

    def __post_init__(self) -> None:
        """Refuse layers named twice, a state without parts, sizes below 1, and parts that heads do not divide."""
        _distinct(self.name, self.layers)
        for name, value in (("heads", self.heads), ("interval", self.interval)):
            if value is not None:
                whole(f"state {self.name!r}: {name}", value, 1)
        if not self.parts:
            raise CacheError(f"state {self.name!r} has no parts")
        for part in self.parts:
            if part.shape[part.axis] % ((self.heads or 1) * len(part.segments)):
                raise CacheError(
                    f"state {self.name!r}: {self.heads} heads and {len(part.segments)} segments do not divide "
                    f"axis {part.axis} of {part.name} {list(part.shape)}"
                )

    def ranks(self, tp: int) -> int:
        """Return by how many ranks the state is divided.

        Raises:
            CacheError: ``tp`` does not divide the heads; names the sizes that do.
        """
        if self.heads is None:
            return 1
        if self.heads % tp:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise CacheError(f"tp={tp} does not divide {self.heads} heads of {self.name}; possible: {legal}")
        return tp

    def offsets(self, tp: int) -> dict[str, int]:
        """Return where each part starts in the state of one rank."""
        starts, end = {}, 0
        for part in self.parts:
            starts[part.name] = end
            end += up(part.local_bytes(self.ranks(tp)), STATE_ALIGN)
        return starts

    def state_bytes(self, tp: int) -> int:
        """Return the bytes of one layer's state on one rank, padding of its parts included."""
        return sum(up(part.local_bytes(self.ranks(tp)), STATE_ALIGN) for part in self.parts)


def _distinct(name: str, layers: tuple[int, ...]) -> None:
    for layer in layers:
        whole(f"{name!r}: a layer", layer, 0)
    if not layers or len(set(layers)) != len(layers):
        raise CacheError(f"{name!r} must name at least one layer, and each once; got {list(layers)}")
