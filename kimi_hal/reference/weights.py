"""The reference's expert weights: the checkpoint's own bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch.contract import BuildContext

if TYPE_CHECKING:
    from torch import Tensor

#: What ``prepare_moe_weights`` returns and ``moe_experts`` takes.
FORMAT = "moe.mxfp4.plain"


def weights(ctx: BuildContext, *, donate: bool = False, **checkpoint: Any) -> list[Tensor]:
    """Return the tensors that the reference's ``moe_experts`` takes: copies, unless they are donated."""
    from kimi_hal.reference.moe import prepare_moe_weights

    return prepare_moe_weights(ctx.spec, **checkpoint, donate=donate)
