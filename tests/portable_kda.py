"""Checks of the portable KDA kernels: gates whose factors are beyond float32 where their product is not."""

from __future__ import annotations

import torch
from interpreted import device, on_device

import kimi_hal as hal
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference.recurrence import gate

DEVICE = device()
ONE = Limits(max_rows=1, max_reqs=1)


def check_a_gate_far_out_is_its_limit_and_never_nan() -> None:
    raw = torch.tensor([-90.0, -200.0, 0.0, -0.0, 90.0, 3e38, -3e38]).expand(1, 3, 7).bfloat16().contiguous()
    rates, bias = torch.tensor([0.0, 90.0, 200.0]), torch.zeros(21)
    for bound in (None, -5.0):
        spec = KDASpec(num_heads=3, head_dim=7, lower_bound=bound)
        run = on_device(
            hal.plan("kda_gate", spec, ONE, device=DEVICE, implementation="nvidia.triton").run, DEVICE
        )
        g, _ = run(raw, torch.zeros(1, 3).bfloat16(), rates, bias)
        exact = gate(spec, raw, rates, bias, torch.float64).float()
        torch.testing.assert_close(g, exact, rtol=1e-4, atol=1e-37)  # a device may flush subnormals
