"""What a builder of CUDA kernels is given off the device, with a check that counts how often it is asked."""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import BuildContext, Capability, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.spec import Limits, Spec


class CountedChecks:
    """Counts in ``checked`` how often plans made of its contexts check a call."""

    checked = 0

    def context(
        self, operator: str, spec: Spec, limits: Limits, sizes: Sizes, capability: Capability
    ) -> BuildContext:
        """Return the context of a plan on Hopper."""
        asked = check.compiled(OPERATORS[operator], spec, limits, sizes, capability=capability, device="cpu")

        def counted(**operands: Any) -> None:
            self.checked += 1
            asked(**operands)

        return BuildContext(
            operator=operator,
            spec=spec,
            limits=limits,
            device="cpu",
            arch="sm_90",
            sizes=sizes,
            group=None,
            persistent=None,
            check=counted,
            settings={},
        )
