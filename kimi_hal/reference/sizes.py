"""Bytes that the reference needs of a caller, without torch: only the records between verify and commit.

The layout ``kda.u_k_g_x.v1`` of one sequence with room for Q rows, packed without padding: the corrections
``u`` ``[H, Q, V]`` in the dtype of the computation (float32; float64 in the oracle), the convolved keys ``k``
``[H, Q, K]`` in bf16 before their normalisation, the gate ``raw_g`` ``[H, Q, K]`` in the Spec's gate dtype
(with ``gate="log"`` the finished float32 g), and the raw inputs ``x`` ``[Q, C]`` in bf16.
"""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.kda import KDASpec

RECORDS = "kda.u_k_g_x.v1"


def row_bytes(spec: KDASpec, u_bytes: int = 4) -> int:
    """Return the record bytes of one verified row, with ``u_bytes`` for each element of u."""
    gate_bytes = 2 if spec.gate_dtype == "bfloat16" else 4
    return spec.num_heads * spec.head_dim * (u_bytes + 2 + gate_bytes) + 2 * spec.channels


def records_bytes(spec: KDASpec, rows: int, u_bytes: int = 4) -> int:
    """Return the record bytes of one sequence with room for ``rows`` rows."""
    return rows * row_bytes(spec, u_bytes)


def sizes(spec: Any, limits: Any, arch: str) -> Sizes:
    """Return the sizes of a reference plan: record bytes for a KDA Spec, nothing for another."""
    if isinstance(spec, KDASpec):
        return Sizes(records=records_bytes(spec, limits.rows_per_req))
    return Sizes()
