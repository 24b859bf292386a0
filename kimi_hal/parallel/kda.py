"""Kimi Delta Attention where tokens are sharded outside: full chunk gathered, heads split, outputs given back.

A recurrence runs over all tokens of a sequence in order, so token shards must meet; heads never do. Between
two layers a rank holds its own tokens. Inside it holds all tokens of its own heads, whose states it alone has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from kimi_hal.dispatch.plan import Plan
from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.parallel.agreement import agree_on, agree_plans
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.heads import to_tokens
from kimi_hal.parallel.shards import Shards
from kimi_hal.parallel.stops import Round, Stops, rounds
from kimi_hal.parallel.tokens import gather_tokens, reduce_tokens

NAME = "context-parallel KDA"


@dataclass(frozen=True)
class KDAStep:
    """One step's sequences: which tokens each rank holds, and the calls that advance the states.

    Attributes:
        shards: the tokens of each rank.
        rows: T, rows of the full chunk; those from ``shards.total`` on are padding.
        calls: usually one; more where states are wanted at tokens that a plan cannot store by itself.
        buffers: ``step`` buffers of convolution and prefill, for each call.
    """

    shards: Shards
    rows: int
    calls: tuple[Round, ...]
    buffers: tuple[tuple[Tensor | None, Tensor | None], ...]


class ContextKDA:
    """One KDA layer over W ranks with token shards, each with the states of 1/W of the heads.

    Args:
        conv: plan of ``kda_conv`` for this rank's heads.
        prefill: plan of ``kda_prefill`` for the same Spec.
        group: the ranks.
        verify: compare the step's lengths over the ranks at every ``begin``.

    Raises:
        PlanError: the two plans are of other operators, or of different Specs.
        GroupError: on all ranks, if their plans differ.

    Source: SGLang's announcement of day-0 support ("Prefill context parallelism").
    """

    def __init__(self, conv: Plan, prefill: Plan, group: Group, *, verify: bool = True) -> None:
        self.conv, self.prefill, self.group, self.verify = conv, prefill, group, verify
        agree_plans(group, NAME, _problem(conv, prefill), conv, prefill)
        self.spec = cast(KDASpec, prefill.spec)
        self._workspace = prefill.new_workspace() if prefill.workspace_bytes else None

    @property
    def multiple(self) -> int | None:
        """Return what tokens a call can store a state at by itself; ``None`` without ``Spec.checkpoints``."""
        if not self.spec.checkpoints:
            return None
        return math.lcm(self.conv.checkpoint_multiple, self.prefill.checkpoint_multiple)

    def begin(
        self,
        lengths: Sequence[int],
        shards: Shards,
        state_ids: Tensor,
        has_initial_state: Tensor | None = None,
        stops: Mapping[int, Stops] | None = None,
        *,
        rows: int | None = None,
    ) -> KDAStep:
        """Lay out a step. Every rank gives the same.

        Args:
            lengths: rows of each sequence of the full chunk, in order.
            shards: which of these rows each rank holds outside.
            state_ids: int32 ``[N]``, slots of conv state and state.
            has_initial_state: bool ``[N]``; ``None``: all True.
            stops: by sequence, where its states are handed over: token counts from its first row of this step
                (0 to its length, ascending) and the slots that get both states there. Any token and any number
                of them: a prefix cache's block ends, the last token before another worker takes the request.
            rows: T of the full chunk, with padding; ``None``: the shards' total.

        Raises:
            ContractError: stops outside a sequence, two of them at one slot; shards of other rows or ranks.
            GroupError: on all ranks, if the step differs.
        """
        if self.verify:
            agree_on(self.group, {"rows": rows, "lengths": str([*lengths]), "stops": str(stops or {})})
        problems = []
        if sum(lengths) != shards.total:
            problems.append(f"lengths are {sum(lengths)} rows, the shards have {shards.total}")
        if shards.world != self.group.size():
            problems.append(f"the shards are of {shards.world} ranks, the group has {self.group.size()}")
        if rows is not None and rows < shards.total:
            problems.append(f"rows={rows} is less than the shards' {shards.total}")
        if problems:
            raise ContractError(NAME, problems)
        calls = rounds(lengths, state_ids, has_initial_state, stops or {}, self.multiple)
        buffers = tuple((_filled(self.conv, call), _filled(self.prefill, call)) for call in calls)
        return KDAStep(shards, shards.total if rows is None else rows, calls, buffers)

    def gather(self, step: KDAStep, own: Tensor) -> Tensor:
        """Return the full chunk ``[T, …]`` from every rank's tokens ``own [width, …]``; padding is zero."""
        return gather_tokens(self.group, own, step.shards, step.rows)

    def run(
        self,
        step: KDAStep,
        x: Tensor,
        weight: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        conv_state: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Convolve and run the recurrence for this rank's heads over the full chunk.

        Args:
            step: of ``begin``.
            x: ``[T, C]`` raw inputs of this rank's heads.
            weight: ``[C, 4]``.
            raw_g: ``[T, H, K]``.
            raw_beta: ``[T, H]``.
            A_log: ``[H]``, or ``None`` with ``gate="log"``.
            dt_bias: ``[H·K]``, likewise.
            conv_state: pool, advanced in place.
            state: pool, advanced in place.

        Returns:
            ``o [T, H, V]`` bf16, before norm and output gate; zero in padding.
        """
        gates = (raw_g, raw_beta, A_log, dt_bias)
        whole: Tensor | None = None
        for call, buffers in zip(step.calls, step.buffers, strict=True):
            cuts = (call.state_ids, call.cu_seqlens, call.has_initial_state)
            stored = (call.checkpoint_offsets, call.checkpoint_ids) if self.spec.checkpoints else ()
            y = self.conv.run(x, weight, conv_state, *cuts, *stored, **_given(step=buffers[0]))
            qkv = y.view(len(y), 3, self.spec.num_heads, self.spec.head_dim).unbind(1)
            more = _given(step=buffers[1], workspace=self._workspace)
            o = self.prefill.run(*qkv, *gates, state, *cuts, *stored, **more)
            call.hand_over(conv_state)
            call.hand_over(state)
            whole = o if whole is None else whole.index_copy_(0, call.rows, o[call.rows])
        assert whole is not None  # there is always a call, if an empty one
        return whole

    def give_back(self, step: KDAStep, o: Tensor) -> Tensor:
        """Return all heads of the own tokens, ``[width, W·H, V]``, from the own heads of all; no bit changes."""
        return to_tokens(self.group, o, step.shards)

    def reduce(self, step: KDAStep, partial: Tensor) -> Tensor:
        """Return the sum over ranks of the own tokens' rows, ``[width, …]``, added in rank order.

        Args:
            step: of ``begin``.
            partial: ``[T, …]``, for instance o through this rank's rows of the output projection.
        """
        return reduce_tokens(self.group, partial, step.shards)


def _problem(conv: Plan, prefill: Plan) -> str:
    """Return why two plans are not the two halves of a layer, or an empty text."""
    for plan, name in ((conv, "kda_conv"), (prefill, "kda_prefill")):
        if plan.operator.name != name:
            return f"takes a plan of {name}, got one of {plan.operator.name}"
    if conv.spec != prefill.spec:
        return "kda_conv and kda_prefill are planned for different Specs"
    return ""


def _filled(plan: Plan, call: Round) -> Tensor | None:
    """Return the plan's ``step`` buffer for a call, or ``None`` where it has none."""
    if not plan.step_bytes:
        return None
    buffer = plan.new_step()
    plan.prepare(call.cu_seqlens, call.state_ids, step=buffer, cu_seqlens_host=call.host)
    return buffer


def _given(**operands: Tensor | None) -> dict[str, Tensor]:
    """Return the operands that there are."""
    return {name: value for name, value in operands.items() if value is not None}
