"""From an engine's numbers to a kernel's: block tables and slots, translated once a step. int64 throughout.

An engine counts blocks of ``block_size`` tokens; a kernel counts pages of the view it was given. With several
pages a block these differ, and one translation a step serves every layer, since all layers' pages stand at
the same distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_hal.cache.layout import Layout
from kimi_hal.errors import CacheError
from kimi_hal.parallel import ownership

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor | None", "Tensor | None"]


def translate(
    block_table: Tensor | None, slots: Tensor | None, layout: Layout, kind: str, *, out: Pair = (None, None)
) -> Pair:
    """Translate an engine's block table and slots to those of one cache's kernel view.

    Args:
        block_table: ``[R, columns]`` int32 block ids, or None.
        slots: ``[T]`` int64, ``block * entries + offset`` with the entries that a block has of this cache
            (``layout.entries(kind)``: ``block_size``, for a cache of one entry a token), or None.
        layout: the packed cache.
        kind: a token cache: "latent", "index". States need none: a state id is a block id.
        out: fixed buffers, as a captured graph needs: int32 ``[≥R, ≥columns·pages]`` and int64 ``[≥T]``.

    Returns:
        ``(table, slots)``: int32 ``[R, columns · layout.pages(kind)]`` and int64 ``[T]``, or the buffers of
        ``out``, filled to their ends: what lies beyond the given rows, columns and slots becomes −1, so that
        nothing of an earlier, larger step is left.

    Edge rules: a negative number gives −1, and so does a block at or beyond ``num_blocks``: its page could
    wrap in int32. Nothing is read on the host, so the call may be captured.

    Raises:
        CacheError: a dtype or shape, or a buffer too small; all reasons together.
        UnknownNameError: no such token cache.
    """
    layout.cache(kind)
    _check(block_table, slots, layout, kind, out)
    table_out, slots_out = out
    table, moved = None, None
    if block_table is not None:
        table = _fill(_table(block_table, layout, kind).int(), table_out)
    if slots is not None:
        moved = _fill(_slots(slots, layout, kind), slots_out)
    return table, moved


def slots(
    block_table: Tensor, row_req: Tensor, positions: Tensor, layout: Layout, kind: str, *, rank: int = 0
) -> Tensor:
    """Return the slot of each token in an engine's own numbers, which ``translate`` takes; −1 where there is none.

    Args:
        block_table: ``[R, columns]`` int32 block ids of this cache's group.
        row_req: ``[T]`` int32, the request of each token.
        positions: ``[T]`` integers, global positions.
        layout: the packed cache.
        kind: a token cache.
        rank: this rank of the DCP group.

    Returns:
        ``[T]`` int64, ``block * entries + offset``. −1 where another rank owns the position, where position,
        request or block is negative, and beyond the table's requests or columns. In a compressed cache it is
        the entry to which the position belongs, which all ``ratio`` positions of it share.

    Raises:
        CacheError: a dtype or shape; all reasons together.
        UnknownNameError: no such token cache.
    """
    _check_rows(block_table, row_req, positions)
    place, owned = _places(positions.long(), layout, kind, rank)
    if not block_table.numel():
        return place.new_full(place.shape, -1)
    entries = layout.entries(kind)
    column, request = place // entries, row_req.long()
    owned = owned & (request >= 0) & (request < block_table.shape[0]) & (column < block_table.shape[1])
    block = block_table.long()[request.where(owned, 0), column.where(owned, 0)]
    return (block * entries + place % entries).where(owned & (block >= 0), -1)


def _places(position: Tensor, layout: Layout, kind: str, rank: int) -> tuple[Tensor, Tensor]:
    """Return which entry of its rank's own run each position belongs to, and whether it is this rank's."""
    cache, dcp = layout.cache(kind), layout.dcp(rank, kind)
    owned = position >= 0
    if cache.window is None:
        owned = owned & (ownership.owner(position, dcp) == dcp.rank)
        position = ownership.local(position, dcp)
    return position // cache.ratio, owned


def _table(block_table: Tensor, layout: Layout, kind: str) -> Tensor:
    """Return ``[R, columns · pages]`` int64: the pages of each block, or −1."""
    pages, step = layout.pages(kind), layout.page_step(kind)
    block = block_table.long()[:, :, None]
    inside = block.new_ones(pages).cumsum(0) - 1
    known = (block >= 0) & (block < layout.num_blocks)
    return (block * step + inside).where(known, -1).flatten(1)


def _slots(given: Tensor, layout: Layout, kind: str) -> Tensor:
    """Return ``[T]`` int64: page and offset of each slot in the kernel's view, or −1."""
    entries, page = layout.entries(kind), layout.cache(kind).page
    known = (given >= 0) & (given < layout.num_blocks * entries)
    if page is None:
        return given.where(known, -1)
    block, entry = given // entries, given % entries
    number = block * layout.page_step(kind) + entry // page
    return (number * page + entry % page).where(known, -1)


def _fill(value: Tensor, out: Tensor | None) -> Tensor:
    """Write a result to the front of a fixed buffer and −1 behind it."""
    if out is None:
        return value
    out.fill_(-1)
    out[tuple(slice(n) for n in value.shape)] = value
    return out


def _check_rows(block_table: Tensor, row_req: Tensor, positions: Tensor) -> None:
    """Refuse operands of ``slots`` that are no integers, or not one of each a token."""
    given = {"block_table": (block_table, 2), "row_req": (row_req, 1), "positions": (positions, 1)}
    reasons = []
    for name, (tensor, ndim) in given.items():
        dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        if dtype not in ("int32", "int64") or tensor.dim() != ndim:
            reasons.append(f"{name} must be int32 or int64 with {ndim} dimension(s), got {_got(tensor)}")
    if not reasons and len(row_req) != len(positions):
        reasons.append(f"row_req has {len(row_req)} rows, positions {len(positions)}: one of each a token")
    if reasons:
        raise CacheError("; ".join(reasons))


def _got(value: object) -> str:
    """Return dtype and shape of a tensor, or the type of what is none."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"  # type: ignore[attr-defined]


def _check(block_table: Tensor | None, given: Tensor | None, layout: Layout, kind: str, out: Pair) -> None:
    wanted = {"block_table": (block_table, "int32", 2), "slots": (given, "int64", 1)}
    buffers = dict(zip(wanted, out, strict=True))
    reasons = []
    for name, (tensor, dtype, ndim) in wanted.items():
        buffer, factor = buffers[name], layout.pages(kind) if name == "block_table" else 1
        for label, value in ((name, tensor), (f"out of {name}", buffer)):
            fits = str(getattr(value, "dtype", "")) == f"torch.{dtype}" and value.dim() == ndim  # type: ignore[union-attr]
            if value is not None and not fits:
                reasons.append(f"{label} must be {dtype} with {ndim} dimension(s), got {_got(value)}")
        if any(getattr(value, "ndim", None) != ndim for value in (tensor, buffer)):
            continue
        assert tensor is not None
        assert buffer is not None
        needed = [*tensor.shape[:-1], tensor.shape[-1] * factor]
        if any(have < want for have, want in zip(buffer.shape, needed, strict=True)):
            reasons.append(f"out of {name} must be at least {needed}, got {list(buffer.shape)}")
    if reasons:
        raise CacheError("; ".join(reasons))
