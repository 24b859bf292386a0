"""The table that decodes a byte: 256 values of FP8 e4m3fn in float32, kept by the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def decoding_table(persistent: Any) -> Tensor:
    """Fill the plan's persistent bytes, which it allocated and zeroed, and return them as float32."""
    table: Tensor = persistent[: 256 * 4].view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8, device=persistent.device)
    return table.copy_(codes.view(torch.float8_e4m3fn).float())
