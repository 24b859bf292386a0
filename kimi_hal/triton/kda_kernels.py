"""The code of the portable KDA gate and decode step for the model's own sizes."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Kernel, Target
from kimi_hal.triton import instructions, kda
from kimi_hal.triton.compiling import Launch, described

#: Scalars and small tensors that are float32; the rest are bfloat16.
FLOATS = {"A_log": "*fp32", "dt_bias": "*fp32", "scale": "fp32"}


def kda_gate(target: Target) -> tuple[Kernel, ...]:
    """Return the gate with the bounded form that the model has."""
    types = FLOATS | {"raw_g": "*bf16", "raw_beta": "*bf16", "g_out": "*fp32", "beta_out": "*fp32"}
    launch = Launch(kda._gate, types, {"K": 128, "BLOCK": 128, "LOWER_BOUND": -5.0})
    return (described("bounded", launch, target, expected=[instructions.exponential(target)]),)


def kda_decode(target: Target) -> tuple[Kernel, ...]:
    """Return the step that makes its gate itself."""
    tensors = dict.fromkeys(("q", "k", "v", "gate", "beta", "out"), "*bf16")
    constants = {"K": 128, "BLOCK_K": 128, "BLOCK_V": 32, "RAW_GATE": True, "LOWER_BOUND": -5.0, "NORM": True}
    launch = Launch(kda._decode, FLOATS | tensors | {"state": "*fp32", "state_ids": "*i32"}, constants)
    return (described("raw-gate", launch, target, expected=[instructions.exponential(target)]),)
