"""Token-sharded prefill of a sparse-attention layer: each rank computes its own rows with all heads.

Heads are sharded outside. An all-to-all turns "all rows, own heads" into "own rows, all heads"; the rank
selects and attends for its rows as if it were alone, and a second all-to-all gives the heads back. No
selection and no attention is merged: a row is computed whole by one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.dispatch.plan import Plan
from kimi_hal.errors import ContractError
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.agreement import agree_on, agree_plans
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.heads import to_heads, to_tokens
from kimi_hal.parallel.shards import Shards, whole_lengths
from kimi_hal.reference.sparse_mla import spans

NAME = "token-sharded prefill"


def one_rank(spec: DSASpec) -> DSASpec:
    """Return the Spec of the same layer where one rank holds all tokens: what each rank plans for its rows.

    Args:
        spec: of ``dsa_decode`` over a group; ``attn.num_heads`` is the group's.
    """
    alone = DCP()
    return dataclasses.replace(
        spec,
        indexer=dataclasses.replace(spec.indexer, dcp=alone, return_selected=False),
        attn=dataclasses.replace(spec.attn, dcp=alone, index_space="position", has_index_len=False),
        merge=None,
    )


@dataclass(frozen=True)
class Rows:
    """Some of a rank's rows: those of one call. ``buffer`` is the call's ``step``, or ``None``."""

    part: slice
    row_req: Tensor
    row_len: Tensor
    buffer: Tensor | None


@dataclass(frozen=True)
class PrefillStep:
    """One step's rows, parted over the ranks; shared by all layers of the step.

    Attributes:
        shards: which rows each rank computes.
        rank: this rank.
        rows: T, rows of the step; those from ``shards.total`` on are padding.
        latent_table: int32 ``[R, blocks]``, as ``dsa_decode`` takes it.
        index_table: likewise.
        calls: this rank's rows, by call.
    """

    shards: Shards
    rank: int
    rows: int
    latent_table: Tensor
    index_table: Tensor
    calls: tuple[Rows, ...]

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x [≥ total, …]``: what its index queries are projected from."""
        return self.shards.take(x, self.rank)


class TokenShardedPrefill:
    """One layer's prefill over W ranks that hold the whole context and 1/W of the heads each.

    Bit-identical to the same plan on one rank with all heads, where the plan promises batch invariance
    (``plan.properties.batch_invariant``); within the plan's own rounding otherwise.

    Args:
        plan: of ``dsa_decode`` for one rank (``dcp.world`` 1, ``attn.num_heads`` of all ranks together), with
            ``Limits(uniform=False)``, since pieces are ragged. More rows than its ``max_rows`` take several
            calls; ``shards.padded_rows`` gives the most that a rank gets.
        group: the ranks.
        verify: compare the rows of each request over the ranks at every ``begin``.

    Raises:
        PlanError: the plan is of another operator, spread over ranks itself, or its heads cannot be parted.
        GroupError: on all ranks, if their plans differ.

    Source: vLLM ``v1/worker/gpu/pcp_manager.py`` for the pieces.
    """

    def __init__(self, plan: Plan, group: Group, *, verify: bool = True) -> None:
        self.plan, self.group, self.verify = plan, group, verify
        agree_plans(group, NAME, _problem(plan, group.size()), plan)
        self._workspace = plan.new_workspace() if plan.workspace_bytes else None

    def begin(
        self,
        lengths: Sequence[int],
        row_req: Tensor,
        row_len: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
        *,
        max_context: int | None = None,
    ) -> PrefillStep:
        """Part a step's rows. Every rank gives the same.

        Args:
            lengths: new rows of each request, in the order in which the requests stand behind each other.
            row_req: ``[T]`` int32, T ≥ the sum of ``lengths``; further rows are padding.
            row_len: ``[T]`` int32, each row's exclusive key bound; a cached prefix counts.
            latent_table: ``[R, blocks]`` int32.
            index_table: ``[R, blocks]`` int32.
            max_context: the longest request, a hint for the plan's ``prepare``.

        Raises:
            ContractError: fewer rows than ``lengths`` say, ``row_len`` of another length than ``row_req``.
            GroupError: on all ranks, if ``lengths`` or T differ.
        """
        rows = row_req.shape[0]
        if self.verify:
            agree_on(self.group, {"rows": rows, "lengths": str([*lengths])})
        lengths = checked_lengths(NAME, lengths, row_req, row_len)
        shards = Shards.pieces(lengths, self.group.size(), row_req.device)
        req, bound = (shards.take(x, self.group.rank()) for x in (row_req, row_len))
        step = PrefillStep(shards, self.group.rank(), rows, latent_table, index_table, ())
        parts = spans(max(1, shards.width), self.plan.limits.max_rows)
        calls = (self._rows(part, req[part], bound[part], step, max_context) for part in parts)
        return dataclasses.replace(step, calls=tuple(calls))

    def _rows(
        self, part: slice, row_req: Tensor, row_len: Tensor, step: PrefillStep, max_context: int | None
    ) -> Rows:
        if not self.plan.step_bytes:
            return Rows(part, row_req, row_len, None)
        buffer = self.plan.new_step()
        tables = (step.latent_table, step.index_table)
        self.plan.prepare(row_req, row_len, *tables, step=buffer, max_context=max_context)
        return Rows(part, row_req, row_len, buffer)

    def run(
        self,
        step: PrefillStep,
        q: Tensor,
        index_q: Tensor,
        index_w: Tensor,
        latent_cache: Tensor,
        index_cache: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one layer.

        Args:
            step: of ``begin``.
            q: ``[≥ total, H, 576]``, this rank's heads of all rows.
            index_q: ``[width, Hi, 128]``, all index heads of this rank's rows, made from ``step.own(…)``.
            index_w: ``[width, Hi]``.
            latent_cache: ``[pages, page_bytes]``, with the step's own tokens in it.
            index_cache: likewise.
            k_scale: as ``dsa_decode`` takes it.
            q_scale: likewise.

        Returns:
            ``out [T, H, 512]`` and ``lse [T, H]`` of this rank's heads (``[T, 0]`` without
            ``attn.return_lse``). Padded rows are 0 and −inf.

        Raises:
            ContractError: index queries of other rows than this rank's; what the plan refuses.
        """
        width = step.shards.width
        named = {"index_q": index_q, "index_w": index_w}
        other = [
            f"{n} must have this rank's {width} rows, got {len(x)}"
            for n, x in named.items()
            if len(x) != width
        ]
        if other:
            raise ContractError(NAME, [*other, "make it from step.own(…)"])
        tokens = to_tokens(self.group, q, step.shards)
        caches = (latent_cache, index_cache, step.latent_table, step.index_table)
        more = {} if self._workspace is None else {"workspace": self._workspace}
        done = [
            self.plan.run(
                *(x[call.part] for x in (tokens, index_q, index_w)),
                *caches,
                call.row_req,
                call.row_len,
                k_scale,
                q_scale,
                **more | ({} if call.buffer is None else {"step": call.buffer}),
            )
            for call in step.calls
        ]
        results = (torch.cat(parts) for parts in zip(*done, strict=True))
        out, lse = to_heads(self.group, step.shards, step.rows, *results)
        lse[step.shards.total :] = -torch.inf
        return out, lse


def checked_lengths(who: str, lengths: Sequence[int], row_req: Tensor, row_len: Tensor) -> list[int]:
    """Return a step's lengths as ints; refuse more rows than there are, and rows without a bound."""
    whole = whole_lengths(who, lengths)
    rows, reasons = row_req.shape[0], []
    if sum(whole) > rows:
        reasons.append(f"lengths are {sum(whole)} rows together, row_req has {rows}")
    if row_len.shape != row_req.shape:
        reasons.append(f"row_len must have row_req's shape {list(row_req.shape)}, got {list(row_len.shape)}")
    if reasons:
        raise ContractError(who, reasons)
    return whole


def _problem(plan: Plan, world: int) -> str:
    """Return why a plan cannot compute a rank's rows, or an empty text."""
    if plan.operator.name != "dsa_decode":
        return f"takes a plan of dsa_decode, got one of {plan.operator.name}"
    spec = plan.spec
    assert isinstance(spec, DSASpec)
    if spec.dcp.world > 1:
        return (
            f"rows are computed by one rank, the plan is for dcp.world={spec.dcp.world}: plan one_rank(spec)"
        )
    if spec.attn.num_heads % world:
        return f"{spec.attn.num_heads} heads cannot be parted over {world} ranks"
    if plan.limits.uniform:
        return "pieces are ragged: plan with Limits(uniform=False, …)"
    return ""
