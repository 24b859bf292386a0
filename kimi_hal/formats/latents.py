"""Formats of the latent cache: 512 latent elements and 64 of the shared key, a token a row.

Sources: vLLM ``concat_and_cache_mla`` (FP8 per tensor), vLLM ``nvfp4_ds_mla`` and FlashInfer
``mla/_core.py`` (NVFP4), FlashMLA ``tests/quant.py`` (656 bytes). Layout tables: ``docs/formats.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kimi_hal.errors import FormatError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LatentFormat:
    """One byte layout of latents; a subclass says how a row is packed.

    Args:
        name: as written in a Spec.
        row_bytes: bytes of one token.
        needs_scale: whether elements are relative to the cache's one-element float32 ``k_scale``.
    """

    kind: ClassVar[str] = "latent"

    name: str
    row_bytes: int
    needs_scale: bool = False

    def pack(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
        """Quantise ``kv_c [n, 512]`` and ``k_pe [n, 64]`` to rows ``[n, row_bytes]`` uint8."""
        raise FormatError(
            f"{type(self).__name__} {self.name!r} does not say how a row is packed: define pack()"
        )

    def unpack(self, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Undo ``pack``: ``[n, 576]``, element times scale in ``dtype``."""
        raise FormatError(
            f"{type(self).__name__} {self.name!r} does not say how a row is read: define unpack()"
        )

    def write(
        self, cache: Tensor, page: int, slots: Tensor, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None
    ) -> None:
        """Quantise latents into their slots of a cache, in place; no other byte changes.

        Args:
            cache: ``[pages, page * row_bytes]`` uint8, ``stride(1) == 1``, ``stride(0)`` free.
            page: tokens of a page.
            slots: ``[n]`` int64, each in ``[0, pages * page)``. Of two rows with one slot the later is kept.
            kv_c: ``[n, 512]`` float32 or bf16.
            k_pe: ``[n, 64]`` float32 or bf16.
            k_scale: one-element float32, for a format that ``needs_scale``; else None.

        Raises:
            FormatError: the cache's dtype, shape or stride is not this format's, or ``k_scale`` is given
                where it has no meaning, or missing.
        """
        from kimi_hal.formats import latent_bytes

        latent_bytes.write(self, cache, page, slots, (kv_c, k_pe), k_scale)

    def read(
        self,
        cache: Tensor,
        page: int,
        slots: Tensor,
        k_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Decode the latents of ``slots [n]``, and of no others, to ``[n, 576]`` in ``dtype`` (float32)."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.read(self, cache, page, slots, k_scale, dtype)


@dataclass(frozen=True, kw_only=True)
class TensorScaledLatent(LatentFormat):
    """576 FP8 bytes: 512 latent, 64 key part; the value is the element times ``k_scale``."""

    element: str

    def pack(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
        """Divide by ``k_scale`` in float32 and round, saturating."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.pack_scaled(self, kv_c, k_pe, k_scale)

    def unpack(self, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply by ``k_scale`` in ``dtype``."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.unpack_scaled(self, rows, k_scale, dtype)
