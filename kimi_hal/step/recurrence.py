"""The calls of one KDA layer's decode step, between the input and the output projection."""

from __future__ import annotations

import torch

from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.spec import Limits
from kimi_hal.presets import Deployment
from kimi_hal.step.call import Call, Steps, size
from kimi_hal.step.inputs import Inputs

#: Tokens that each sequence has behind it when the step begins.
HISTORY = 128


class RecurrenceStep:
    """``batch`` sequences of one token each; their states are what ``HISTORY`` tokens of the text left."""

    def __init__(self, inputs: Inputs, deployment: Deployment, batch: int, context: int, device: str) -> None:
        self.inputs, self.batch, self.device = inputs, batch, device
        self.end = context
        self.history = min(HISTORY, context - batch)
        self.specs = deployment.specs()
        spec = self.specs["kda_decode"]
        self.heads, self.dim = deployment.model.heads(deployment.tp), deployment.model.kda_dim
        rows = batch * (self.history + 1)
        self.limits = Limits(max_rows=rows, max_reqs=batch, rows_per_req=self.history + 1, uniform=False)
        self.spec = spec
        taps = deployment.model.conv_width - 1
        self.state = torch.zeros(batch, self.heads, self.dim, self.dim, device=device)
        self.conv_state = torch.zeros(
            batch, taps, 3 * self.heads * self.dim, dtype=torch.bfloat16, device=device
        )
        self.ids = torch.arange(batch, dtype=torch.int32, device=device)

    def fill(self) -> None:
        """Run each sequence's history through convolution and prefill."""
        if not self.history:
            return
        starts = [self.end - self.batch + i - self.history for i in range(self.batch)]
        parts = [self.inputs.kda_inputs(slice(s, s + self.history), self.heads) for s in starts]
        x, raw_g, raw_beta = (
            torch.cat([getattr(p, name) for p in parts]).to(self.device)
            for name in ("x", "raw_g", "raw_beta")
        )
        ends = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.history
        first = parts[0]
        conv = plan("kda_conv", self.spec, self.limits, device=self.device)
        mixed = conv.run(x, first.conv_weight.to(self.device), self.conv_state, self.ids, ends)
        q, k, v = mixed.unflatten(1, (3, self.heads, self.dim)).unbind(1)
        gate = (raw_g, raw_beta, first.A_log.to(self.device), first.dt_bias.to(self.device))
        prefill = plan("kda_prefill", self.spec, self.limits, device=self.device)
        prefill.run(q, k, v, *gate, self.state, self.ids, ends)

    def calls(self) -> Steps:
        """Yield the step's calls. The composite runs on copies of the states that the parts advance."""
        rows = slice(self.end - self.batch, self.end)
        inputs = self.inputs.kda_inputs(rows, self.heads)
        on = {name: getattr(inputs, name).to(self.device) for name in inputs.__dataclass_fields__}
        before = self.conv_state.clone(), self.state.clone()
        ends = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
        conv = {"x": on["x"], "weight": on["conv_weight"], "conv_state": self.conv_state}
        (mixed,) = yield self._call(
            "kda_conv", conv | {"state_ids": self.ids, "cu_seqlens": ends}, "conv_state"
        )
        q, k, v = mixed.unflatten(1, (3, self.heads, self.dim)).unbind(1)
        gate = {name: on[name] for name in ("raw_g", "raw_beta", "A_log", "dt_bias")}
        yield self._call("kda_gate", gate)
        row = {"q": q, "k": k, "v": v, **gate, "state": self.state, "state_ids": self.ids}
        yield self._call("kda_decode", row, "state")
        weights = {
            "conv": on["conv_weight"],
            "A_log": on["A_log"],
            "dt_bias": on["dt_bias"],
            "norm": on["norm_weight"],
        }
        layer = {name: on[name] for name in ("x", "raw_g", "raw_beta", "out_gate")}
        pools = {"conv_state": before[0], "state": before[1], "state_ids": self.ids}
        yield self._call("kda_layer_decode", layer | {"weights": weights} | pools, "conv_state", "state")

    def _call(self, operator: str, operands: dict[str, object], *pools: str) -> Call:
        """Return a call; a state pool is read and written once."""
        touched = {name: 2 * size(operands[name]) for name in pools}
        return Call(operator, self.specs[operator], self.limits, operands, touched)
