"""The context of a step's requests, gathered from the shards of all ranks into a workspace in token order.

What a prefill of many rows reads is the whole context; gathered once a layer it costs fewer bytes than
merging every row's selection and attention over the ranks. Bytes are moved, never decoded, so a reader of the
workspace finds what one rank with all tokens would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.errors import ContractError, PlanError, unknown
from kimi_hal.formats import token_bytes
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import Group, require
from kimi_hal.parallel.shards import whole_lengths

#: Bytes of one message that is gathered, all ranks together: what a gather holds besides the workspace.
GATHERED = 1 << 28


@dataclass(frozen=True)
class Route:
    """Where the tokens of one step's contexts are, and where they go; shared by all layers of the step.

    Attributes:
        table: int32 ``[R, blocks]`` block table of the workspace, −1 behind a request's last page.
        source: int64 ``[n]``, slots of this rank's shard, −1 where it owns fewer tokens than another.
        target: int64 ``[W, n]``, the slots of the workspace that each rank's tokens go to, or −1.
        tokens: tokens of all contexts.
    """

    table: Tensor
    source: Tensor
    target: Tensor
    tokens: int


class ContextCache:
    """A workspace for the index keys, or the latents, of one layer's contexts.

    Args:
        fmt: name of the cache's format.
        page: tokens of a latent page; index keys have their format's own.
        dcp: how positions are spread over the ranks.
        group: the ranks.
        tokens: of all contexts of one step together, at most.
        requests: contexts of one step, at most.
        device: where the caches are.
        gather: moves bytes ``[n, row_bytes]`` to ``[W, n, row_bytes]``, for instance the ``run`` of a plan of
            ``all_gather`` with ``GatherSpec(layout="rank_major", dtype="uint8", dcp=dcp)``; ``None``: the
            group's own.

    Attributes:
        cache: ``[pages, page_bytes]`` uint8, the workspace. Its contents are those of the last ``gather``.

    Raises:
        GroupError: ``dcp`` is not the group's.
        PlanError: a size that is no whole number, or too small.
        UnknownNameError: no such format of a cache.

    Source: vLLM ``sparse_attn_indexer.py`` (``dcp_gather_kv_rows``), ``sparse_utils.py``.
    """

    def __init__(
        self,
        fmt: str,
        page: int,
        dcp: DCP,
        group: Group,
        tokens: int,
        requests: int,
        *,
        device: torch.device | str,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        for name, size, least in (("page", page, 1), ("tokens", tokens, 0), ("requests", requests, 0)):
            if not isinstance(size, int) or size < least:
                raise PlanError(f"gathered context: {name} must be a whole number from {least}, got {size!r}")
        found = formats.get(fmt)
        if isinstance(found, formats.ExpertFormat):
            raise unknown("cache format", fmt, (*formats.names("index"), *formats.names("latent")))
        self.format = found
        self.page = found.page if isinstance(found, formats.IndexFormat) else page
        self.dcp, self.group = dcp, require(group, dcp)
        self.device = device
        self._gather = gather or group.all_gather
        pages = tokens // self.page + requests
        size = token_bytes.page_bytes(found, page)
        self.cache = torch.zeros((pages, size), dtype=torch.uint8, device=device)

    def route(self, lengths: Sequence[int], table: Tensor) -> Route:
        """Lay the contexts of a step behind each other.

        Args:
            lengths: tokens of each request, in global positions, the step's own included; the same on every
                rank.
            table: int32 ``[R, blocks]``, this rank's block table, in pages of its shard. Every token that the
                rank owns below its request's length has a page.

        Raises:
            PlanError: the workspace has fewer pages.
            ContractError: the table has fewer requests, or fewer columns than this rank's tokens take.
        """
        lengths = whole_lengths("gathered context", lengths)
        self._check_table(lengths, table)
        pages = [-(-length // self.page) for length in lengths]
        if sum(pages) > len(self.cache):
            raise PlanError(
                f"contexts of {sum(lengths)} tokens take {sum(pages)} pages of {self.page}, the workspace has "
                f"{len(self.cache)}: make it with tokens={sum(lengths)}, requests={len(lengths)}"
            )
        first = DCP(world=self.dcp.world, interleave=self.dcp.interleave)  # no rank owns more than the first
        counts = torch.tensor([ownership.local_length(n, first) for n in lengths], dtype=torch.int64)
        request = torch.repeat_interleave(counts).to(self.device)
        place = torch.arange(len(request), device=self.device)
        place = place - (counts.cumsum(0) - counts).to(self.device)[request]
        starts = torch.tensor([0, *pages], dtype=torch.int64, device=self.device).cumsum(0)
        bound = torch.tensor([*lengths], dtype=torch.int64, device=self.device)[request]
        return Route(
            table=_consecutive(starts),
            source=self._source(request, place, bound, table),
            target=self._target(starts[request] * self.page, place, bound),
            tokens=sum(lengths),
        )

    def _check_table(self, lengths: Sequence[int], table: Tensor) -> None:
        """Refuse a table without a place for a token that this rank owns."""
        longest = max(lengths, default=0)
        columns = -(-ownership.local_length(longest, self.dcp) // self.page)
        if len(lengths) > table.shape[0] or columns > table.shape[1]:
            needed = f"{len(lengths)} requests of up to {columns} pages of {self.page} tokens"
            raise ContractError(
                "gathered context", [f"the block table must hold {needed}, got {list(table.shape)}"]
            )

    def _source(self, request: Tensor, place: Tensor, bound: Tensor, table: Tensor) -> Tensor:
        """Return the slot of each local position in this rank's shard."""
        column = place // self.page
        live = (ownership.position(place, self.dcp) < bound) & (column < table.shape[1])
        block = table[request[live], column[live]].long()
        source = torch.full_like(place, -1)
        source[live] = torch.where(block >= 0, block * self.page + place[live] % self.page, -1)
        return source

    def _target(self, base: Tensor, place: Tensor, bound: Tensor) -> Tensor:
        """Return the slot in the workspace of each rank's local positions."""
        positions = torch.stack([ownership.position(place, rank) for rank in _ranks(self.dcp)])
        return torch.where(positions < bound, base + positions, -1)

    def gather(self, route: Route, shard: Tensor) -> Tensor:
        """Gather the contexts of one layer from every rank's ``shard [pages, page_bytes]``; returns ``cache``."""
        source = torch.where(route.source < shard.shape[0] * self.page, route.source, -1)
        step = max(1, GATHERED // (self.dcp.world * self.format.row_bytes))
        for start in range(0, len(source), step):
            part = slice(start, start + step)
            everyone = self._gather(token_bytes.take(self.format, shard, self.page, source[part]))
            for target, rows in zip(route.target[:, part], everyone, strict=True):
                token_bytes.put(self.format, self.cache, self.page, target, rows)
        return self.cache

    def bytes(self, lengths: Sequence[int]) -> int:
        """Return what a rank sends to gather contexts of these lengths."""
        first = DCP(world=self.dcp.world, interleave=self.dcp.interleave)
        return self.format.row_bytes * sum(ownership.local_length(n, first) for n in lengths)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Tell whether contexts of these lengths fit into the workspace."""
        return sum(-(-length // self.page) for length in lengths) <= len(self.cache)


def check_contexts(who: str, contexts: Sequence[int], row_req: Tensor, row_len: Tensor) -> None:
    """Refuse rows that see more keys than their request's context has; reads the device.

    Raises:
        ContractError: names the first such row.
    """
    held = torch.tensor([*whole_lengths(who, contexts), 0], dtype=torch.int64, device=row_req.device)
    request = row_req.long()
    held = held[torch.where(request < 0, len(contexts), request).clamp(max=len(contexts))]
    beyond = ((row_len > held) & (request >= 0)).nonzero()[:, 0].tolist()
    if beyond:
        row = beyond[0]
        seen, there = int(row_len[row]), int(held[row])
        raise ContractError(
            who,
            [f"row {row} of request {int(row_req[row])} sees {seen} keys, its context has {there} tokens"],
        )


def _consecutive(starts: Tensor) -> Tensor:
    """Return a block table of pages that stand behind each other, from ``starts [R + 1]``."""
    counts = starts.diff()
    column = torch.arange(int(counts.max()) if len(counts) else 0, device=starts.device)
    return torch.where(column < counts[:, None], starts[:-1, None] + column, -1).int()


def _ranks(dcp: DCP) -> list[DCP]:
    return [DCP(world=dcp.world, rank=rank, interleave=dcp.interleave) for rank in range(dcp.world)]
