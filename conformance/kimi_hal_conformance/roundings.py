"""The roundings that an operator's contract admits inside it, made once each in an answer exact but for them.

Their error is a unit of the budget (``budget.py``): a kernel that rounds there is not wrong, and one that does
not round gains nothing by it. What the contract does not name is in no entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.moe import MoESpec
from kimi_hal.reference import composites, moe
from kimi_hal_conformance.oracle import Answer, Question, buffers, copied, reference_weights

F64 = torch.float64


def inner(question: Question) -> Answer | None:
    """Return the float64 answer with the admitted roundings made, or ``None`` where there are none."""
    if question.op.name not in ADMITTED:
        return None
    return ADMITTED[question.op.name](question)


def rounded(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return float64 values that went through another dtype."""
    return x.to(dtype).to(F64)


def experts(
    spec: MoESpec,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: list[Tensor],
    expert_map: Tensor | None = None,
    quantise: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Return ``moe_experts`` with gate, up and their activation rounded to bf16, in float64.

    ``quantise`` is made of x and of the activation besides, where a numerics class says so.
    """
    x = quantise(x.to(F64))
    local = moe.local_experts(spec, topk_ids, expert_map)
    fmt = formats.experts(spec.weights)
    y = torch.zeros(x.shape, dtype=F64)
    for expert in sorted(set(local[local >= 0].tolist())):
        w13, w13_scale, w2, w2_scale = (t[expert] for t in weights)
        rows, columns = (local == expert).nonzero(as_tuple=True)
        gate, up = rounded(x[rows] @ fmt.decode(w13, w13_scale, F64).T).chunk(2, dim=-1)
        result = quantise(rounded(moe.activate(spec, gate, up))) @ fmt.decode(w2, w2_scale, F64).T
        y.index_put_((rows,), result * topk_weights[rows, columns, None], accumulate=True)
    return y


def _experts(question: Question) -> Answer:
    spec: Any = question.spec
    operands = {**question.operands, "weights": reference_weights(question)}
    return Answer({"out": experts(spec, **operands)}, {})


def _prepared(question: Question) -> Answer:
    """Round inside the call of ``moe_experts`` that tells whether the weights are right."""
    return _experts(question.use())


def _moe_layer(question: Question) -> Answer:
    """Round z, the partial sums, the norm's result, the shared activation and the projections."""
    spec: Any = question.spec
    parts = dict(composites.reference_parts("moe_layer", spec, F64))
    width = getattr(torch, spec.experts.out_dtype)
    parts["moe_experts"] = lambda *operands: rounded(experts(spec.experts, *operands), width)
    body = composites.compose_moe_layer(
        spec, parts, composites.sharers(spec, question.group), wide=F64, narrow=torch.bfloat16
    )
    operands = {**question.operands, "weights": reference_weights(question)}
    return Answer({"out": body(**operands)}, {})


def _kda_layer_decode(question: Question) -> Answer:
    """Round the recurrence's output before the norm."""
    spec: Any = question.spec
    parts = dict(composites.reference_parts("kda_layer_decode", spec, F64))
    parts["kda_decode"] = _then_rounded(parts["kda_decode"])
    operands = copied(question, F64) | {"weights": reference_weights(question)}
    body = composites.compose_kda_layer_decode(spec, parts, F64)
    return Answer({"out": body(**operands)}, buffers(question.op.mutated, operands))


def _dsa_decode(question: Question) -> Answer | None:
    """Round the parts that ranks exchange, in the dtype of attention's output; one rank exchanges none."""
    spec: Any = question.spec
    if spec.dcp.world == 1:
        return None
    parts = dict(composites.reference_parts("dsa_decode", spec, F64, question.group))
    attend, dtype = parts["sparse_mla"], getattr(torch, spec.attn.out_dtype)

    def attended(*operands: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*operands)
        return rounded(out, dtype), lse

    parts["sparse_mla"] = attended
    out, lse = composites.compose_dsa_decode(spec, parts, question.group)(**question.operands)
    return Answer({"out": out, "lse_out": lse}, {})


def _then_rounded(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *operands: rounded(fn(*operands))


ADMITTED: Mapping[str, Callable[[Question], Answer | None]] = {
    "dsa_decode": _dsa_decode,
    "kda_layer_decode": _kda_layer_decode,
    "moe_experts": _experts,
    "moe_layer": _moe_layer,
    "prepare_moe_weights": _prepared,
}
