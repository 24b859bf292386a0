"""KDA's decay parameters. The encoder has none: they are drawn so that decays cover their whole range."""

from __future__ import annotations

import math

from torch import Tensor

from kimi_hal.model import K3_1_PRO
from kimi_hal.workload import noise


def parameters(seed: int) -> dict[str, Tensor]:
    """Return ``kda.A_log [96]``, exp(A_log) log-uniform in [½, 4], and ``kda.dt_bias [12288]`` in [−3, 1)."""
    heads, channels = K3_1_PRO.kda_heads, K3_1_PRO.kda_heads * K3_1_PRO.kda_dim
    a_log = noise.uniform(seed, "kda.A_log", heads) * math.log(8) - math.log(2)
    dt_bias = noise.uniform(seed, "kda.dt_bias", channels) * 4 - 3
    return {"kda.A_log": a_log.float(), "kda.dt_bias": dt_bias.float()}
