"""The bytes of expert weights, in torch: what the methods of ``ExpertFormat`` do."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.errors import FormatError
from kimi_hal.formats import minifloat, scales
from kimi_hal.formats.expert_weights import ExpertFormat

#: What a float32's bits need so that a mantissa of 1.75 or more carries into the exponent.
CARRY_FROM_1_75 = 1 << 21


def scale_codes(largest: Tensor) -> Tensor:
    """Return the e8m0 codes, int32, of float32 amax by the compressed-tensors rule; all-zero gives 127."""
    rounded = (largest.view(torch.int32) + CARRY_FROM_1_75) >> 23
    return torch.where(largest == 0, 127, (rounded - 2).clamp(0, 254))


def encode(fmt: ExpertFormat, w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights ``[..., K]``."""
    if w.shape[-1] % fmt.group:
        raise FormatError(
            f"{fmt.name} packs groups of {fmt.group} along K, and K = {w.shape[-1]} is not a multiple: "
            "pad K with zeros"
        )
    blocks = scales.groups(w.to(torch.float32), fmt.group)
    code = scale_codes(scales.amax(blocks))
    code = torch.where(torch.isnan(blocks).any(dim=-1), 255, code).to(torch.uint8)
    # Adding +0.0 turns −0.0 into +0.0 and nothing else: the library multiplies by sign(x), which is 0 there.
    scaled = blocks / minifloat.decode_e8m0(code)[..., None] + 0.0
    return minifloat.pack_nibbles(minifloat.encode(scaled, minifloat.E2M1).flatten(-2)), code


def decode(fmt: ExpertFormat, packed: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Multiply elements by their scales in ``dtype``."""
    whole = (*packed.shape[:-1], packed.shape[-1] * 2 // fmt.group)
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or tuple(scale.shape) != whole:
        raise FormatError(
            f"{fmt.name} takes packed [..., K / 2] and scale [..., K / {fmt.group}], both uint8, not "
            f"{list(packed.shape)} {packed.dtype} and {list(scale.shape)} {scale.dtype}"
        )
    return scales.mx_decode(packed, scale, dtype or torch.float32, fmt.group)
