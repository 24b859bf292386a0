"""Bytes that the traced programs need of a caller, without torch: the records between verify and commit.

The layout of one sequence with room for Q rows: k and v ``[Q, H, K]`` in bf16 as they came from the convolution, the
gate ``[Q, H, K]`` and beta ``[Q, H]`` as given, the raw inputs ``[Q, C]`` in bf16. A commit decodes them again.
"""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.kda import KDASpec

RECORDS = "tpu.k_v_g_b_x.v1"


def sizes(spec: KDASpec, limits: Any, arch: str) -> Sizes:
    """Return the record bytes of a plan."""
    gate = 2 if spec.gate_dtype == "bfloat16" else 4
    heads = spec.num_heads * spec.head_dim
    row = 4 * heads + gate * heads + gate * spec.num_heads + 2 * spec.channels
    return Sizes(records=limits.rows_per_req * row)
