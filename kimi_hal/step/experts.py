"""The calls of one MoE layer's decode step: routing over all experts, and the experts that this rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_hal.checkpoint import read_experts
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.spec import Limits
from kimi_hal.presets import Deployment
from kimi_hal.step.call import Call, Steps, size
from kimi_hal.step.inputs import Inputs


class ExpertStep:
    """``batch`` tokens over one expert-parallel rank; a token without a local expert gives a zero row."""

    def __init__(
        self,
        inputs: Inputs,
        deployment: Deployment,
        batch: int,
        context: int,
        device: str,
        shard: Path,
        layer: int,
    ) -> None:
        self.inputs, self.device, self.shard, self.layer = inputs, device, shard, layer
        self.rows = slice(context - batch, context)
        self.specs = deployment.specs()
        self.limits = Limits(max_rows=batch, max_reqs=batch)

    def calls(self) -> Steps:
        """Yield the step's calls."""
        logits = self.inputs.router_logits(self.rows).to(self.device)
        bias = logits.new_zeros(logits.shape[1]) if not hasattr(self.inputs, "router") else self._bias()
        weights, ids = yield self._call("moe_route", {"logits": logits, "bias": bias})
        spec = self.specs["moe_experts"]
        assert isinstance(spec, MoESpec)
        stored = read_experts(self.shard, self.layer, spec, tp=K3_1_PRO.moe_intermediate // spec.intermediate)
        checkpoint = {name: getattr(stored, name).to(self.device) for name in stored._fields}
        x = self.inputs.hidden(self.rows, spec.hidden).to(self.device)
        operands = {"x": x, "topk_weights": weights, "topk_ids": ids, "weights": checkpoint}
        used = self._used(ids, spec)
        yield self._call("moe_experts", operands, {"weights": size(checkpoint) // spec.num_local * used})

    def _bias(self) -> Tensor:
        router: Any = self.inputs
        bias: Tensor = router.router().bias
        return bias.to(self.device)

    def _used(self, ids: Tensor, spec: MoESpec) -> int:
        """Return how many of this rank's experts have a token."""
        local = ids - spec.expert_offset
        mine = local[(local >= 0) & (local < spec.num_local)]
        return len(set(mine.tolist()))

    def _call(self, operator: str, operands: dict[str, Any], touched: dict[str, int] | None = None) -> Call:
        return Call(operator, self.specs[operator], self.limits, operands, touched or {})
