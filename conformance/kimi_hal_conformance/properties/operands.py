"""The metadata check that every implementation calls: what is refused before anything is launched."""

from __future__ import annotations

from typing import Any

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain, raises


def merge_check(modules: Modules) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the check of a ``merge_attn_states``, and operands that it accepts."""
    ops, check = modules("ops"), modules("ops.check")
    spec = modules("ops.sparse_mla").MergeSpec(parts=2, num_heads=3, dim=8)
    limits = modules("ops.spec").Limits(max_rows=4, max_reqs=4)
    outs = torch.zeros(2, 4, 3, 8, dtype=torch.bfloat16)
    return check.compiled(ops.get("merge_attn_states"), spec, limits), {
        "outs": outs,
        "lses": torch.zeros(2, 4, 3),
    }


@plain("operands")
def accepted(modules: Modules) -> object:
    """Check operands that are right."""
    check, operands = merge_check(modules)
    return check(**operands)


@holds("operands/dtypes", "int64 indices where int32 is read")
def dtypes(modules: Modules) -> None:
    """An index of another width is refused by name, never read as if it were the right one."""
    ops, check, errors = modules("ops"), modules("ops.check"), modules("errors")
    spec = modules("ops.topk_merge").TopKSpec(topk=4)
    call = check.compiled(ops.get("topk_select"), spec)
    scores, lengths = torch.zeros(3, 8), torch.tensor([1, 2, 3])
    raises(
        errors.ContractError, lambda: call(scores=scores, row_len=lengths), "row_len must be int32, got int64"
    )
    expect("int32", call(scores=scores, row_len=lengths.int()), None)


@holds("operands/strides", "a transposed operand")
def strides(modules: Modules) -> None:
    """A stride that the contract does not allow is refused by name."""
    check, operands = merge_check(modules)
    turned = operands | {"outs": operands["outs"].transpose(2, 3).contiguous().transpose(2, 3)}
    raises(modules("errors").ContractError, lambda: check(**turned), "outs must have stride 1")


@holds("operands/shapes", "parts that do not agree on their rows; more rows than the plan serves")
def shapes(modules: Modules) -> None:
    """Operands that do not agree, and sizes beyond the plan's Limits, are refused."""
    check, operands = merge_check(modules)
    error = modules("errors").ContractError
    raises(error, lambda: check(**operands | {"lses": torch.zeros(2, 3, 3)}), "lses")
    rows = {name: value.repeat_interleave(2, dim=1) for name, value in operands.items()}
    raises(error, lambda: check(**rows), "T=8", "max_rows=4")


@holds("operands/every-reason", "a dtype and a shape that are both wrong")
def every_reason(modules: Modules) -> None:
    """All reasons are told together."""
    check, operands = merge_check(modules)
    wrong = {"outs": operands["outs"].float(), "lses": torch.zeros(2, 4, 5)}
    raises(modules("errors").ContractError, lambda: check(**wrong), "outs must be bfloat16", "lses")
