"""Prefill over a sharded context: gathered once a layer, then token-sharded as over a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from kimi_hal.dispatch.plan import Plan
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.parallel.agreement import agree_dcp, agree_on
from kimi_hal.parallel.context import ContextCache, Route, check_contexts
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.prefill import NAME, PrefillStep, TokenShardedPrefill


@dataclass(frozen=True)
class GatheredStep:
    """One step of ``GatheredPrefill``: its rows, and the routes of its contexts."""

    rows: PrefillStep
    latents: Route
    keys: Route | None

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x [≥ total, …]``."""
        return self.rows.own(x)


class GatheredPrefill:
    """One layer's prefill where the context is sharded: gathered once a layer, then token-sharded over it.

    Nothing is merged, so the result is that of ``TokenShardedPrefill`` over a whole context, bit for bit.

    Args:
        plan: as ``TokenShardedPrefill`` takes it, of ``one_rank(spec)``.
        group: the ranks.
        dcp: how positions are spread over them.
        tokens: of all contexts of one step, at most: the workspaces hold so many.
        requests: of one step, at most.
        verify: as ``TokenShardedPrefill``.
        gather: as ``ContextCache``.

    Raises:
        PlanError, GroupError: as ``TokenShardedPrefill``; also on all ranks if ``dcp`` differs.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        dcp: DCP,
        *,
        tokens: int,
        requests: int,
        verify: bool = True,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        agree_dcp(group, dcp)
        self.inner = TokenShardedPrefill(plan, group, verify=verify)
        self.group, spec = group, cast(DSASpec, plan.spec)

        def workspace(fmt: str) -> ContextCache:
            sizes = (tokens, requests)
            return ContextCache(fmt, spec.attn.page, dcp, group, *sizes, device=plan.device, gather=gather)

        self.latents = workspace(spec.attn.latent)
        sharded = ownership.of_keys(dcp).world > 1
        self.keys = workspace(spec.indexer.index) if sharded else None

    def begin(
        self,
        lengths: Sequence[int],
        contexts: Sequence[int],
        row_req: Tensor,
        row_len: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
    ) -> GatheredStep:
        """Part a step's rows and lay out its contexts.

        Args:
            lengths: as ``TokenShardedPrefill.begin``.
            contexts: tokens of each request of the block tables, the new ones included.
            row_req: as there.
            row_len: as there, in global positions.
            latent_table: int32 ``[R, blocks]``, in pages of this rank's shard.
            index_table: likewise; of the whole context where index keys are replicated.

        Raises:
            PlanError: the contexts do not fit into the workspaces.
            ContractError, GroupError: as there; also, unless ``verify`` is off, a row that sees more keys than
                its request's context has.
        """
        if self.inner.verify:
            agree_on(self.group, {"contexts": str([*contexts])})
            check_contexts(NAME, contexts, row_req, row_len)
        latents = self.latents.route(contexts, latent_table)
        keys = self.keys.route(contexts, index_table) if self.keys else None
        tables = (latents.table, keys.table if keys else index_table)
        longest = max(contexts, default=0)
        rows = self.inner.begin(lengths, row_req, row_len, *tables, max_context=longest)
        return GatheredStep(rows, latents, keys)

    def run(
        self,
        step: GatheredStep,
        q: Tensor,
        index_q: Tensor,
        index_w: Tensor,
        latent_cache: Tensor,
        index_cache: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one layer as ``TokenShardedPrefill.run``, from this rank's shards of both caches."""
        latents = self.latents.gather(step.latents, latent_cache)
        keys = self.keys.gather(step.keys, index_cache) if self.keys and step.keys else index_cache
        return self.inner.run(step.rows, q, index_q, index_w, latents, keys, k_scale, q_scale)
