"""What a builder of CUDA kernels is given off the device, with a check that counts how often it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contexts import context

from kimi_hal.dispatch.contract import BuildContext, Capability, Sizes
from kimi_hal.ops.spec import Limits, Spec


class CountedChecks:
    """Counts in ``checked`` how often plans made of its contexts check a call."""

    checked = 0

    def context(
        self, operator: str, spec: Spec, limits: Limits, sizes: Sizes, capability: Capability
    ) -> BuildContext:
        """Return the context of a plan on Hopper."""
        made = context(operator, spec, limits, sizes, capability)

        def counted(**operands: Any) -> None:
            self.checked += 1
            made.check(**operands)

        return replace(made, check=counted, persistent=None)
