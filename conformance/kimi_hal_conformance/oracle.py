"""The oracle: the reference function of an operator, in float64 on the same bytes, and in float32 beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.reference import kda
from kimi_hal.reference.backend import function
from kimi_hal.reference.sizes import records_bytes
from kimi_hal.reference.weights import weights
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.sparse import Sparse

#: Where operands are, and where the oracle runs unless its question says otherwise.
HOST = "cpu"
#: Operators whose oracle makes tensors of its own, on the host.
ON_HOST = ("kda_commit", "kda_verify")


@dataclass(frozen=True)
class Answer:
    """What an operator must give: outputs by keyword and the buffers that it changes, by name."""

    outputs: Mapping[str, Any]
    mutated: Mapping[str, Tensor]


@dataclass(frozen=True)
class Question:
    """One call, of which the answer is wanted.

    Args:
        op: the operator.
        spec: its Spec.
        limits: the sizes that it is planned for.
        operands: by name.
        group: the ranks, or ``None``.
        sparse: operands and outputs that stand in far larger buffers on trial.
        oracle: the device on which the oracle runs (``oracle_device.py``); operands and answers stay on the host.
    """

    op: Operator
    spec: Spec
    limits: Limits
    operands: Mapping[str, Any]
    group: Any = None
    sparse: Mapping[str, Sparse] = field(default_factory=dict)
    oracle: str = HOST

    def use(self) -> Question:
        """Return the call of ``moe_experts`` that tells whether prepared weights are right.

        A case of ``prepare_moe_weights`` has the operands of that call beside its own.
        """
        own = self.op.args
        checkpoint = Checkpoint({name: self.operands[name] for name in own})
        used = {name: value for name, value in self.operands.items() if name not in own}
        return replace(self, op=ops.get("moe_experts"), operands={**used, "weights": checkpoint})


def answer(question: Question, dtype: torch.dtype) -> Answer:
    """Compute the answer in ``dtype`` on copies of the operands; nothing of the caller's changes.

    Floating-point buffers that the call mutates are held in ``dtype`` too, so that a state's own rounding
    is not part of the answer.
    """
    ask = ORACLES.get(question.op.name, by_reference)
    if question.oracle == HOST or question.op.name in ON_HOST or question.group is not None:
        return ask(question, dtype)
    there = replace(question, operands=moved(question.operands, question.oracle), oracle=HOST)
    found = ask(there, dtype)
    return Answer(moved(found.outputs, HOST), moved(found.mutated, HOST))


def moved(value: Any, device: str) -> Any:
    """Return tensors, also those in mappings and lists, on a device; others as they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Checkpoint):
        return Checkpoint({name: moved(own, device) for name, own in value.items()})
    if isinstance(value, Mapping):
        return {name: moved(own, device) for name, own in value.items()}
    return [moved(own, device) for own in value] if isinstance(value, list) else value


def by_reference(question: Question, dtype: torch.dtype) -> Answer:
    """Ask the operator's reference function."""
    op = question.op
    operands = copied(question, dtype)
    if isinstance(question.operands.get("weights"), Checkpoint):
        operands["weights"] = reference_weights(question)
    group = {"group": question.group} if op.grouped else {}
    results = function(op)(question.spec, **operands, **group, dtype=dtype)
    results = results if isinstance(results, tuple) else (results,) if op.outs else ()
    outputs = {out.keyword: value for out, value in zip(op.outs, results, strict=True)}
    return Answer(outputs, buffers(op.mutated, operands))


def copied(question: Question, dtype: torch.dtype) -> dict[str, Any]:
    """Return copies of the operands, mutated floating-point buffers in ``dtype``."""
    mutated = question.op.mutated
    return {name: _copy(value, name in mutated, dtype) for name, value in question.operands.items()}


def reference_weights(question: Question) -> list[Tensor]:
    """Return what the reference makes of a checkpoint."""
    context = BuildContext(
        operator=question.op.name,
        spec=question.spec,
        limits=question.limits,
        device="cpu",
        arch="",
        sizes=Sizes(),
        group=None,
        persistent=None,
        check=lambda **operands: None,
        settings={},
    )
    return weights(context, **question.operands["weights"])


def prepared(question: Question, dtype: torch.dtype) -> Answer:
    """Answer ``prepare_moe_weights`` by what its weights are good for."""
    return answer(question.use(), dtype)


def verified(question: Question, dtype: torch.dtype) -> Answer:
    """Answer ``kda_verify`` with a records buffer that is long enough for the reference in ``dtype``."""
    spec: Any = question.spec
    width = records_bytes(spec, question.limits.rows_per_req, u_bytes=dtype.itemsize)
    records = torch.zeros(question.limits.max_reqs, width, dtype=torch.uint8)
    return by_reference(replace(question, operands={**question.operands, "records": records}), dtype)


def committed(
    question: Question, dtype: torch.dtype, prefill: Callable[..., Tensor] = kda.kda_prefill
) -> Answer:
    """Answer ``kda_commit`` without any record: convolve and run the accepted rows as if they were decoded.

    ``prefill`` runs them: the reference's, or one that makes the roundings of a numerics class.
    """
    spec: Any = question.spec
    room = question.limits.rows_per_req  # of a record: more accepted rows count as that many
    operands = {**question.operands, "accepted": question.operands["accepted"].clamp(max=room)}
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(layers(question.operands)):
        pools = (layer["conv_state"].to(dtype), layer["state"].to(dtype))
        for name, pool in zip(
            ("conv_states", "states"), _commit(spec, operands, layer, pools, prefill), strict=True
        ):
            found[f"{name}[{i}]"] = pool
    return Answer({}, found)


#: What a case of ``kda_commit`` holds beside the operands of its first layer's ``kda_verify``: what the commit
#: takes, and under ``more`` the operands of further layers where they differ from the first one's.
OF_COMMIT = ("accepted", "out_ids", "checkpoint_ids", "checkpoint_lens", "more")


def layers(operands: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the operands of the ``kda_verify`` of each layer."""
    first = {name: value for name, value in operands.items() if name not in OF_COMMIT}
    return [first, *(first | dict(own) for own in operands.get("more", ()))]


Pools = tuple[Tensor, Tensor]


def _commit(
    spec: Any,
    operands: Mapping[str, Any],
    layer: Mapping[str, Any],
    pools: Pools,
    prefill: Callable[..., Tensor],
) -> Pools:
    """Return conv states and states after a commit."""
    accepted, slots = operands["accepted"], pools[1].shape[0]
    ids = layer["state_ids"]
    live = (accepted > 0) & (ids >= 0) & (ids < slots)
    counts = operands.get("checkpoint_lens", accepted * 0 - 1)
    results = [
        (operands.get("checkpoint_ids", ids * 0 - 1), counts),
        (operands.get("out_ids", ids), accepted),
    ]
    done = tuple(pool.clone() for pool in pools)
    for targets, rows in results:
        kept = live & (rows >= 0) & (rows <= accepted) & (targets >= 0) & (targets < slots)
        after = decoded(spec, layer, rows.where(kept, 0), pools, prefill)
        for pool, advanced in zip(done, after, strict=True):
            pool[targets[kept].long()] = advanced[ids[kept].long()]
    return done[0], done[1]


def decoded(
    spec: Any,
    layer: Mapping[str, Any],
    counts: Tensor,
    pools: Pools,
    prefill: Callable[..., Tensor] = kda.kda_prefill,
) -> Pools:
    """Return copies of conv states and states in which so many rows of each sequence have been decoded."""
    conv_state, state = (pool.clone() for pool in pools)
    rows, ends = accepted_rows(layer["cu_seqlens"], counts)
    common = {"state_ids": layer["state_ids"].where(counts > 0, -1), "cu_seqlens": ends}
    mixed = kda.kda_conv(spec, layer["x"][rows], layer["weight"], conv_state, **common, dtype=state.dtype)
    q, k, v = mixed.bfloat16().view(rows.numel(), 3, spec.num_heads, spec.head_dim).unbind(1)
    gate = (layer["raw_g"][rows], layer["raw_beta"][rows], layer["A_log"], layer["dt_bias"])
    prefill(spec, q, k, v, *gate, state, **common, dtype=state.dtype)
    return conv_state, state


def accepted_rows(cu_seqlens: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that were accepted, in order, and the offsets of the sequences that they form."""
    starts, counts = cu_seqlens[:-1].tolist(), accepted.clamp(min=0).tolist()
    rows = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    return torch.tensor(rows, dtype=torch.int64), ends


ORACLES: Mapping[str, Callable[[Question, torch.dtype], Answer]] = {
    "kda_commit": committed,
    "kda_verify": verified,
    "prepare_moe_weights": prepared,
}


def buffers(names: tuple[str, ...], operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the named operands, the members of a list apart."""
    found: dict[str, Tensor] = {}
    for name in names:
        value = operands.get(name)
        if isinstance(value, list):
            found |= {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


def _copy(value: Any, mutated: bool, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_copy(item, mutated, dtype) for item in value]
    if not isinstance(value, Tensor):
        return value
    if mutated and value.is_floating_point():
        return value.to(dtype, copy=True)
    return value.clone()
