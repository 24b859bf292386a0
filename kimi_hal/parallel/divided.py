"""Prefill with divided query rows: keys gathered, rows selected for by one rank each, nothing merged.

Each rank scores its own rows against the gathered index keys and selects globally; the selections, not the
heads, travel. Attention then reads gathered latents with this rank's heads of all rows, or, where gathering
latents costs more bytes or room than it saves, the sharded latents as a decode does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.composites import DSASpec, part_specs
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.agreement import agree_dcp, agree_on, agree_plans
from kimi_hal.parallel.context import ContextCache, Route, check_contexts
from kimi_hal.parallel.exchange import exchange_heads, gather_heads
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.prefill import checked_lengths, one_rank
from kimi_hal.parallel.shards import Shards
from kimi_hal.parallel.tokens import gather_tokens

NAME = "row-divided prefill"


def divided_specs(spec: DSASpec) -> dict[str, tuple[str, Spec]]:
    """Return operator and Spec of each part, by name, for a layer whose ``dsa_decode`` has this Spec.

    ``attend`` reads gathered latents with this rank's heads; ``attend_shard`` and ``merge`` are what is left
    of a decode over the group where latents stay sharded.
    """
    parts = part_specs("dsa_decode", one_rank(spec))
    shard = dataclasses.replace(spec.attn, index_space="position", has_index_len=False)
    merge = MergeSpec(
        parts=spec.dcp.world,
        num_heads=spec.heads,
        dim=spec.attn.kv_rank,
        dtype=spec.out_dtype,
        return_lse=True,
    )
    whole = dataclasses.replace(one_rank(spec).attn, num_heads=spec.heads)
    return {
        "query": ("quantize_index_query", parts["quantize_index_query"].spec),
        "select": ("indexer_topk", parts["indexer_topk"].spec),
        "attend": ("sparse_mla", whole),
        "attend_shard": ("sparse_mla", shard),
        "merge": ("merge_attn_states", merge),
    }


@dataclass(frozen=True)
class DividedStep:
    """One step: the rows of each rank, the routes of its contexts, and whether latents are gathered.

    Attributes:
        shards: which rows each rank selects for.
        rank: this rank.
        row_req: int32 ``[T]``, of all rows.
        own_req: int32 ``[width]``, of this rank's rows.
        own_len: int32 ``[width]``.
        index_table: of what ``select`` reads.
        keys: route of the index keys, or ``None`` where every rank has them all.
        latent_table: of what attention reads.
        latents: route of the latents, or ``None`` where they stay sharded.
        buffers: ``step`` buffers by part.
    """

    shards: Shards
    rank: int
    row_req: Tensor
    own_req: Tensor
    own_len: Tensor
    index_table: Tensor
    keys: Route | None
    latent_table: Tensor
    latents: Route | None
    buffers: Mapping[str, Tensor]

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x [≥ total, …]``: what its index queries are projected from."""
        return self.shards.take(x, self.rank)


class RowDividedPrefill:
    """One layer's prefill over the ranks of decode context parallelism, with query rows divided.

    The selection has the bits of one rank's where ``select`` promises batch invariance. Attention over
    gathered latents is that of one rank with the same heads; over sharded latents it is merged by LSE and
    agrees within rounding.

    Args:
        spec: of the layer's ``dsa_decode`` over the group.
        plans: a plan for each of ``divided_specs(spec)``; ``select`` and ``attend`` with ragged rows
            (``Limits(uniform=False)``). ``planned`` makes them.
        group: the ranks.
        tokens: of all contexts of one step, at most: the workspace of the keys holds so many.
        requests: of one step, at most.
        latent_tokens: likewise for latents; contexts that do not fit stay sharded. ``None``: ``tokens``; 0:
            latents are never gathered.
        verify: compare the step's lengths over the ranks at every ``begin``.

    Source: announced for AMD Instinct MI355X (vLLM day-0 support, "Context-parallel sparse attention prefill").
    """

    def __init__(
        self,
        spec: DSASpec,
        plans: Mapping[str, Plan],
        group: Group,
        *,
        tokens: int,
        requests: int,
        latent_tokens: int | None = None,
        verify: bool = True,
    ) -> None:
        agree_dcp(group, spec.dcp)
        self.spec, self.plans, self.group, self.verify = spec, plans, group, verify
        agree_plans(group, NAME, "", *plans.values())
        self._run = {name: made.run for name, made in plans.items()}

        def workspace(fmt: str, room: int) -> ContextCache:
            sizes = (room, requests)
            return ContextCache(fmt, spec.attn.page, spec.dcp, group, *sizes, device=plans["select"].device)

        sharded = ownership.of_keys(spec.dcp).world > 1
        room = tokens if latent_tokens is None else latent_tokens
        self.keys = workspace(spec.indexer.index, tokens) if sharded else None
        self.latents = workspace(spec.attn.latent, room) if room else None
        largest = max(plans.values(), key=lambda made: made.workspace_bytes)
        self._workspace = largest.new_workspace() if largest.workspace_bytes else None

    @classmethod
    def planned(
        cls, spec: DSASpec, limits: Limits, group: Group, *, device: torch.device | str, **sizes: int | None
    ) -> RowDividedPrefill:
        """Plan the parts by the settings in force, and build.

        Args:
            spec: of the layer's ``dsa_decode`` over the group.
            limits: of one step; its rows are ragged whatever ``limits.uniform`` says.
            group: the ranks.
            device: a torch device.
            sizes: ``tokens``, ``requests`` and ``latent_tokens``.
        """
        ragged = dataclasses.replace(limits, uniform=False, block_table_width=None, num_pages=None)
        plans = {
            name: plan(operator, part, ragged, device=device)
            for name, (operator, part) in divided_specs(spec).items()
        }
        return cls(spec, plans, group, **sizes)  # type: ignore[arg-type]

    def begin(
        self,
        lengths: Sequence[int],
        contexts: Sequence[int],
        row_req: Tensor,
        row_len: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
    ) -> DividedStep:
        """Divide a step's rows, lay out its contexts and decide whether latents are gathered.

        Arguments, and what is refused: as ``GatheredPrefill.begin``.
        """
        rows, rank = row_req.shape[0], self.group.rank()
        if self.verify:
            agree_on(self.group, {"rows": rows, "lengths": str([*lengths]), "contexts": str([*contexts])})
            check_contexts(NAME, contexts, row_req, row_len)
        lengths = checked_lengths(NAME, lengths, row_req, row_len)
        shards = Shards.pieces(lengths, self.group.size(), row_req.device)
        keys = self.keys.route(contexts, index_table) if self.keys else None
        whole = self.latents if self.gathers(contexts, rows) else None
        latents = whole.route(contexts, latent_table) if whole else None
        step = DividedStep(
            shards=shards,
            rank=rank,
            row_req=row_req,
            own_req=shards.take(row_req, rank),
            own_len=shards.take(row_len, rank),
            index_table=keys.table if keys else index_table,
            keys=keys,
            latent_table=latents.table if latents else latent_table,
            latents=latents,
            buffers={},
        )
        return dataclasses.replace(step, buffers=self._buffers(step, row_len, max(contexts, default=0)))

    def gathers(self, contexts: Sequence[int], rows: int) -> bool:
        """Tell whether latents are gathered: they fit, and gathering sends fewer bytes than merging does.

        Merging sends this rank's queries to all and gets their parts of its heads, for each of ``rows``.
        """
        attn = self.spec.attn
        query = (attn.kv_rank + attn.pe_dim) * torch_dtype(attn.q_dtype).itemsize
        part = attn.kv_rank * torch_dtype(attn.out_dtype).itemsize + 4
        merged = rows * self.spec.heads * (query + part)
        cache = self.latents
        return cache is not None and cache.holds(contexts) and cache.bytes(contexts) <= merged

    def _buffers(self, step: DividedStep, row_len: Tensor, longest: int) -> dict[str, Tensor]:
        """Fill the ``step`` buffers of the parts that have one."""
        attend = "attend" if step.latents else "attend_shard"
        rows = {
            "select": (step.own_req, step.own_len, step.index_table),
            attend: (step.row_req, row_len, step.latent_table),
        }
        buffers = {}
        for name, operands in rows.items():
            if self.plans[name].step_bytes:
                buffers[name] = self.plans[name].new_step()
                self.plans[name].prepare(*operands, step=buffers[name], max_context=longest)
        return buffers

    def run(
        self,
        step: DividedStep,
        q: Tensor,
        index_q: Tensor,
        index_w: Tensor,
        latent_cache: Tensor,
        index_cache: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one layer; operands and results as ``TokenShardedPrefill.run``, from this rank's shards.

        ``q`` has exactly T rows; ``lse`` is ``[T, 0]`` where latents are gathered and ``attn.return_lse`` is
        off.
        """
        picks = self.select(step, index_q, index_w, index_cache)
        if self.latents and step.latents:
            latents = self.latents.gather(step.latents, latent_cache)
            return self._attend("attend", step, q, latents, picks, k_scale, q_scale)
        everyones = gather_heads(self.group, q)
        parts = self._attend("attend_shard", step, everyones, latent_cache, picks, k_scale, q_scale)
        result: tuple[Tensor, Tensor] = self._run["merge"](
            *exchange_heads(self.group, *parts, self.spec.head_exchange)
        )
        return result

    def select(self, step: DividedStep, index_q: Tensor, index_w: Tensor, index_cache: Tensor) -> Tensor:
        """Return every row's selection, int32 ``[T, k]`` global positions: each made by one rank, then shared."""
        keys = self.keys.gather(step.keys, index_cache) if self.keys and step.keys else index_cache
        quantised = self._run["query"](index_q, index_w)
        rows = (step.own_req, step.own_len)
        own, _ = self._run["select"](*quantised, keys, step.index_table, *rows, **self._more("select", step))
        picks = gather_tokens(self.group, own, step.shards, step.row_req.shape[0])
        picks[step.shards.total :] = -1
        return picks

    def _attend(
        self,
        name: str,
        step: DividedStep,
        q: Tensor,
        cache: Tensor,
        picks: Tensor,
        k_scale: Tensor | None,
        q_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        operands = (q, cache, picks, k_scale, q_scale, None, step.latent_table, step.row_req)
        result: tuple[Tensor, Tensor] = self._run[name](*operands, **self._more(name, step))
        return result

    def _more(self, name: str, step: DividedStep) -> dict[str, Tensor]:
        more = {} if self._workspace is None else {"workspace": self._workspace}
        return more | ({"step": step.buffers[name]} if name in step.buffers else {})
