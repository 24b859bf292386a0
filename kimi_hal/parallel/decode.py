"""``dsa_decode`` over a group in the form that a graph holds, beside the eager one that answers its flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.composed import CAPTURES, Buffers, sizes
from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.check import WORKSPACE_ALIGN
from kimi_hal.ops.composites import DSASpec, part_specs
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.parallel.groups import Group
from kimi_hal.reference.composites import compose_dsa_decode

MERGE = "topk_merge"


class CapturedDecode:
    """One sparse-attention layer's decode over W ranks, with messages that T and the Spec alone decide.

    An engine captures ``run`` for its layers, replays, reads ``flag`` once, and where it is not zero sets it to
    zero and repeats the step eagerly with ``answer``, on the same buffers. Neither writes a cache or a state;
    what else the step advances (``kda_decode``) must not be repeated: capture it with ``kda_verify``, and
    commit once the flag has been read.

    Args:
        spec: of ``dsa_decode``.
        limits: its sizes.
        group: the ranks; with ``TorchGroup`` one of ``verify=False``.
        device: a torch device.
        capacity: room of the merge's second exchange; ``None``: ``Capacity.default``.

    Attributes:
        flag: int32 ``[1]``, as ``CapturedMerge.flag``: the rows that ``run`` has left without an answer.
        eager: the plan that answers, with protocol ``full``.
        plans: the plans of the parts, by name.
        capture: ``"none"``, ``"piecewise"`` or ``"full"``: how far all parts can be captured.
    """

    def __init__(
        self,
        spec: DSASpec,
        limits: Limits,
        group: Group | None,
        *,
        device: torch.device | str,
        capacity: Capacity | None = None,
    ) -> None:
        self.spec = spec
        whole = spec
        if spec.merge is not None:
            merge = dataclasses.replace(spec.merge, protocol="full", quota=None)
            whole = dataclasses.replace(spec, merge=merge)
        self.eager = plan("dsa_decode", whole, limits, device=device, group=group)
        self.plans: dict[str, Plan] = {}
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        runs: dict[str, Callable[..., Any]] = {}
        for name, part in part_specs("dsa_decode", spec, limits).items():
            grouped = group if name == MERGE else None
            made = plan(part.operator, part.spec, part.limits or limits, device=device, group=grouped)
            self.plans[name], runs[name] = made, made.run
        if spec.merge is not None:
            runs[MERGE], self.flag = self._merge(spec.merge, limits, group, capacity)
        self._buffers, needed = Buffers.of(self.plans), sizes(self.plans)
        self._step, self._workspace = self._room(needed.step), self._room(needed.workspace)
        self._body = compose_dsa_decode(spec, runs, group if spec.dcp.world > 1 else None)

    def _merge(
        self, spec: TopKMergeSpec, limits: Limits, group: Group | None, capacity: Capacity | None
    ) -> tuple[Callable[..., Any], Tensor]:
        """Return a merge that can be captured, and its flag: the planned one if it has one, else plain torch."""
        made = self.plans[MERGE]
        flag = self.flag if spec.protocol == "full" else getattr(made.run, "flag", None)
        if made.properties.capture == "full" and flag is not None and capacity is None:
            return made.run, flag
        merge = CapturedMerge(spec, group, limits, device=made.device, capacity=capacity)
        return merge.run, merge.flag

    def _room(self, size: int) -> Tensor | None:
        """Return aligned bytes at an address that stays, or ``None`` for none."""
        if not size:
            return None
        room = torch.zeros(size + WORKSPACE_ALIGN, dtype=torch.uint8, device=self.eager.device)
        start = -room.data_ptr() % WORKSPACE_ALIGN
        return room[start : start + size]

    @property
    def capture(self) -> str:
        """Return how far the parts can be captured; the merge in plain torch can."""
        parts = [made.properties.capture for name, made in self.plans.items() if name != MERGE]
        return min(parts, key=CAPTURES.index)

    def prepare(
        self,
        row_req: Tensor,
        row_len: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
        *,
        max_context: int | None = None,
    ) -> None:
        """Fill the parts' ``step`` buffers, once a step, for all layers and for ``run`` alone."""
        if self._step is None:
            return
        tables = {"indexer_topk": index_table, "sparse_mla": latent_table}
        for name in tables.keys() & self._buffers.steps.keys():
            share = self._buffers.share(name, self._step)
            self.plans[name].prepare(row_req, row_len, tables[name], step=share, max_context=max_context)

    def run(
        self,
        q: Tensor,
        index_q: Tensor,
        index_w: Tensor,
        latent_cache: Tensor,
        index_cache: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
        row_req: Tensor,
        row_len: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run ``dsa_decode``; a row that the flag counts gives 0 and −inf."""
        more = self._buffers.more(self._step, self._workspace)
        last = "merge_attn_states" if self.spec.dcp.world > 1 else "sparse_mla"
        more.setdefault(last, {}).update(out=out, lse_out=lse_out)
        caches = (latent_cache, index_cache, latent_table, index_table)
        result: tuple[Tensor, Tensor] = self._body(
            q, index_q, index_w, *caches, row_req, row_len, k_scale, q_scale, more=more
        )
        return result

    def answer(self, *operands: Tensor | None, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Run ``dsa_decode`` eagerly with protocol ``full``, which answers every row; operands as ``run``."""
        result: tuple[Tensor, Tensor] = self.eager.run(*operands, **keywords)
        return result
