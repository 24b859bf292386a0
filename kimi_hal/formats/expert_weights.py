"""Formats of expert weights as a checkpoint stores them: packed elements and scales, a tensor each.

Source: compressed-tensors 0.20.1, ``mxfp4-pack-quantized`` (``quantization/utils/mxfp_utils.py``,
``compressors/mxfp4/base.py``). Layout tables: ``docs/formats.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """MXFP4 by the compressed-tensors rule: e2m1, low nibble even, e8m0 for each ``group`` along K.

    Args:
        name: as written in a Spec.
        group: elements along K that share a scale.
    """

    kind: ClassVar[str] = "experts"

    name: str
    group: int = 32

    def encode(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise weights ``[..., K]`` (float32 or bf16).

        The group's amax is rounded to a power of two, up from a mantissa of 1.75 and down below; the
        scale's exponent is that of the power less 2, at least −127. Elements are ``x / scale``, saturated
        at ±6 and rounded to nearest even; −0.0 becomes +0.0, while a negative value that rounds to zero
        keeps its sign. An all-zero group has scale byte 127. A group with a NaN has scale byte 255 and zero
        codes.

        Returns:
            packed uint8 ``[..., K / 2]`` and scale uint8 ``[..., K / 32]``.

        Raises:
            FormatError: K is not a whole number of groups.
        """
        from kimi_hal.formats import expert_bytes

        return expert_bytes.encode(self, w)

    def decode(self, packed: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``e2m1 · 2^(scale − 127)``, ``[..., K]`` in ``dtype`` (float32).

        Raises:
            FormatError: the shapes of ``packed [..., K / 2]`` and ``scale [..., K / 32]`` don't belong
                together, or one is not uint8.
        """
        from kimi_hal.formats import expert_bytes

        return expert_bytes.decode(self, packed, scale, dtype)
