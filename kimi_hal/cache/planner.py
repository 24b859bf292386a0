"""The planner: from what a model keeps to where it stands. Reads descriptions only; knows no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from kimi_hal.cache import grouping
from kimi_hal.cache.grouping import Bucket
from kimi_hal.cache.integers import whole
from kimi_hal.cache.kinds import STATE_ALIGN, StateCache, TokenCache, up
from kimi_hal.cache.layout import Group, Layout
from kimi_hal.cache.models import Description, describe
from kimi_hal.errors import CacheError
from kimi_hal.model import K3_1_PRO, Model
from kimi_hal.ops.spec import DCP

#: Tokens of a block, at most.
MAX_BLOCK = 1 << 20


def plan(
    model: Model | Sequence[TokenCache | StateCache] = K3_1_PRO,
    *,
    block_size: int,
    tp: int = 1,
    latent: str | None = None,
    index: str | None = None,
    memory: int | None = None,
    num_blocks: int | None = None,
    dcp: DCP | int = 1,
    conv_layout: str = "width_channel",
    max_context: int | None = None,
) -> Layout:
    """Lay one block out as one contiguous row of pages and states.

    Args:
        model: a ``Model``, or the descriptions of its caches.
        block_size: tokens of a block on one rank, a power of two: then blocks of instances of any two
            tensor-parallel sizes divide evenly and pair.
        tp: tensor-parallel ranks. Entries of tokens are the same on each, heads of states are divided.
        latent: format of the latents, for a ``Model``.
        index: format of the index keys, for a ``Model``; ``None``: it has none.
        memory: bytes of one device for the cache; with neither this nor ``num_blocks`` the layout has no
            blocks yet (``Layout.sized``).
        num_blocks: rows, instead of ``memory``.
        dcp: ranks of a DCP group, or its ``DCP`` (world, interleave, and whether index keys are replicated).
        conv_layout: of KDA's conv state, for a ``Model``: "width_channel" or "channel_width".
        max_context: tokens of a request; the model's, or 2^20.

    Returns:
        The layout, equal for every rank. Its row is padded to whole latent rows and whole index pages;
        ``Layout.padding`` says by how much.

    Raises:
        CacheError: sizes that do not go together: what was asked, what is possible.
        UnknownNameError: a format that is not registered.
    """
    block_size, tp = whole("block_size", block_size), whole("tp", tp)
    spread = dcp if isinstance(dcp, DCP) else DCP(world=whole("dcp", dcp))
    if max_context is None:
        max_context = model.max_context if isinstance(model, Model) else 1 << 20
    caches, states = _described(model, latent, index, conv_layout, spread)
    _check_sizes(block_size, tp, spread, caches, states)
    groups, row = _groups(caches, states, block_size, tp, spread.world)
    layout = Layout(
        model=model.name if isinstance(model, Model) else "",
        block_size=block_size,
        block_bytes=row,
        num_blocks=0,
        tp=tp,
        world=spread.world,
        interleave=spread.interleave,
        max_context=whole("max_context", max_context, 1),
        caches=caches,
        states=states,
        groups=groups,
    )
    sized = memory is not None or num_blocks is not None
    return layout.sized(memory=memory, num_blocks=num_blocks) if sized else layout


def _described(
    model: Model | Sequence[TokenCache | StateCache],
    latent: str | None,
    index: str | None,
    conv_layout: str,
    dcp: DCP,
) -> tuple[tuple[TokenCache, ...], tuple[StateCache, ...]]:
    """Return token caches and states; index keys that DCP replicates are marked so."""
    given: Description
    if isinstance(model, Model):
        if latent is None:
            raise CacheError(
                f"latent= is missing: {model.name} needs a latent format, latent.fp8.e4m3fn.tensor"
            )
        given = describe(model, latent=latent, index=index, conv_layout=conv_layout)
    elif latent is not None or index is not None:
        raise CacheError("latent= and index= belong to a Model; descriptions name their own formats")
    else:
        given = tuple(model)
    caches = tuple(c for c in given if isinstance(c, TokenCache))
    states = tuple(s for s in given if isinstance(s, StateCache))
    names = [c.name for c in given]
    if not names or len(set(names)) != len(names):
        raise CacheError(f"a cache needs at least one description, and each its own name; got {names}")
    views = [c.name for c in caches] + [part.name for s in states for part in s.parts]
    if len(set(views)) != len(views):
        raise CacheError(
            f"views are named by token cache and by part of a state, each its own name; got {views}"
        )
    if dcp.index == "replicated":
        caches = tuple(dataclasses.replace(c, replicated=True) if c.name == "index" else c for c in caches)
    return caches, states


def _check_sizes(
    block_size: int, tp: int, dcp: DCP, caches: Sequence[TokenCache], states: Sequence[StateCache]
) -> None:
    reasons = [*_problems(block_size, tp, dcp), *_split_entries(caches, dcp)]
    for state in states:
        try:
            state.ranks(max(tp, 1))
        except CacheError as error:
            reasons.append(str(error))
        if state.interval is not None and state.interval % max(block_size, 1):
            reasons.append(
                f"{state.name} is kept every {state.interval} tokens, which is not whole blocks of {block_size}"
            )
    if reasons:
        raise CacheError("; ".join(reasons))


def _split_entries(caches: Sequence[TokenCache], dcp: DCP) -> Iterator[str]:
    """Yield the compressed caches whose entries would be spread over ranks."""
    for cache in caches:
        sharded = dcp.world > 1 and cache.window is None and not cache.replicated
        if sharded and dcp.interleave % cache.ratio:
            yield (
                f"interleave={dcp.interleave} splits entries of {cache.ratio} tokens of {cache.name} over ranks: "
                f"use a multiple of {cache.ratio}"
            )


def _problems(block_size: int, tp: int, dcp: DCP) -> Iterator[str]:
    if not 1 <= block_size <= MAX_BLOCK or block_size & (block_size - 1):
        low = 1 << max(min(block_size, MAX_BLOCK).bit_length() - 1, 0)
        near = f"{low} or {min(2 * low, MAX_BLOCK)}" if 1 <= block_size < MAX_BLOCK else f"1 to {MAX_BLOCK}"
        yield (
            f"block_size={block_size} is not a power of two, so blocks of instances of other sizes could not "
            f"pair with it: use {near}"
        )
    elif block_size % dcp.interleave:
        yield f"interleave={dcp.interleave} does not divide block_size={block_size}: use a power of two up to it"
    if tp < 1:
        yield f"tp={tp} must be at least 1"
    elif tp % dcp.world:
        yield f"dcp={dcp.world} does not divide tp={tp}: a DCP group is ranks of the tensor-parallel group"


def _groups(
    caches: Sequence[TokenCache], states: Sequence[StateCache], block_size: int, tp: int, world: int
) -> tuple[tuple[Group, ...], int]:
    """Return the groups and the bytes of a row: the tokens' pages say how wide it is, all others must fit.

    Without a cache of the whole history the row is as wide as its widest bucket.
    """
    multiple = math.lcm(STATE_ALIGN, *(cache.row_multiple for cache in caches))
    tokens = grouping.token_bucket(caches, block_size, world)
    others = [*grouping.window_buckets(caches, block_size), *grouping.state_buckets(states, tp)]
    anchors = [tokens] if tokens else others
    used = max(sum(piece.bytes for piece in bucket.pieces) for bucket in anchors)
    row = up(used, multiple)
    groups = [group for bucket in anchors[:1] if tokens for group in bucket.split(row)]
    for bucket in others:
        try:
            groups += bucket.split(row)
        except CacheError as error:
            raise CacheError(f"{error}; {_remedy(bucket, used, block_size, multiple, tp)}") from None
    return tuple(groups), row


def _remedy(bucket: Bucket, used: int, block_size: int, multiple: int, tp: int) -> str:
    """Say which block size would hold the largest piece of a bucket."""
    largest, size = max(piece.bytes for piece in bucket.pieces), block_size
    while up(used * (size // block_size), multiple) < largest:
        size *= 2
    return f"use block_size={size}, or more than tp={tp} ranks to divide the heads"
