"""The reference's weights: the checkpoint's own tensors, the experts' as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.composites import ordered_weights

if TYPE_CHECKING:
    from torch import Tensor

#: What ``prepare_moe_weights`` returns and ``moe_experts`` takes.
FORMAT = "moe.mxfp4.plain"


def weights(ctx: BuildContext, *, donate: bool = False, **checkpoint: Any) -> list[Tensor]:
    """Return the tensors that ``moe_experts``, ``moe_layer`` or ``kda_layer_decode`` takes.

    Experts' tensors are copied unless they are donated; the others are kept as they are.

    Raises:
        ContractError: names that are missing or not known, for a composite.
    """
    from kimi_hal.reference.moe import prepare_moe_weights

    if ctx.operator == "moe_experts":
        return prepare_moe_weights(ctx.spec, **checkpoint, donate=donate)
    return ordered_weights(
        ctx.operator,
        ctx.spec,
        checkpoint,
        lambda **experts: prepare_moe_weights(ctx.spec.experts, **experts, donate=donate),
    )
