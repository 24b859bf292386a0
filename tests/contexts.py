"""What a builder is given of a plan that is made by hand, off the device."""

from __future__ import annotations

import torch

from kimi_hal.dispatch.contract import BuildContext, Capability, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.spec import Limits, Spec


def context(
    operator: str, spec: Spec, limits: Limits, sizes: Sizes, capability: Capability, arch: str = "sm_90"
) -> BuildContext:
    """Return the context of a plan for an architecture, whose operands are on the CPU."""
    return BuildContext(
        operator=operator,
        spec=spec,
        limits=limits,
        device="cpu",
        arch=arch,
        sizes=sizes,
        group=None,
        persistent=torch.zeros(sizes.persistent, dtype=torch.uint8) if sizes.persistent else None,
        check=check.compiled(OPERATORS[operator], spec, limits, sizes, capability=capability, device="cpu"),
        settings={},
    )
