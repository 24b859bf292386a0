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
        kv_rank: latent elements of a token.
        pe_dim: elements of the shared key part.
    """

    kind: ClassVar[str] = "latent"

    name: str
    row_bytes: int
    needs_scale: bool = False
    kv_rank: int = 512
    pe_dim: int = 64

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
            FormatError: the cache's dtype, shape or stride is not this format's; ``k_scale`` is given where
                it has no meaning, or missing; or, seen on the CPU only, a slot is outside the cache.
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

    def scales(self, cache: Tensor, page: int, slots: Tensor) -> Tensor:
        """Return the float32 scales that stand beside the latents of ``slots [n]``, in the order of the elements.

        Returns:
            ``[n, groups]`` float32, each for ``kv_rank / groups`` elements; one group of 1 where none stands there.
        """
        from kimi_hal.formats import latent_bytes

        return latent_bytes.no_scales(slots)


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


@dataclass(frozen=True, kw_only=True)
class NVFP4Latent(LatentFormat):
    """352 bytes: 512 e2m1 (low nibble even), 64 e4m3 of the key part, 32 e4m3 scales of 16 elements each.

    Scale ``s`` stands at byte ``320 + 8 * (s & 3) + (s >> 2)``. There is no scale of the whole cache, and
    none of the key part.
    """

    group: int = 16

    def pack(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
        """Scale = e4m3 rounded up of ``max(amax / 6, 2**-9)``, at most 448; element = ``x * (1 / scale)``."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.pack_nvfp4(self, kv_c, k_pe)

    def unpack(self, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Element times scale; exact in bf16 and wider."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.unpack_nvfp4(self, rows, dtype)


@dataclass(frozen=True, kw_only=True)
class FlashMLALatent(LatentFormat):
    """656 bytes, FlashMLA's record: 512 e4m3fn, 4 float32 scales of 128 elements each, 64 bf16."""

    group: int = 128

    def pack(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
        """Scale = ``2**⌈log2(max(amax / 448, 1e-4))⌉``, FlashMLA's own rule; a reader takes any float32."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.pack_flashmla(self, kv_c, k_pe)

    def unpack(self, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Element times the stored float32 scale, which need not be a power of two."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.unpack_flashmla(self, rows, dtype)

    def scales(self, cache: Tensor, page: int, slots: Tensor) -> Tensor:
        """Return the four scales of each record, ``[n, 4]`` float32."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.flashmla_scales(self, latent_bytes.of_slots(self, cache, page, slots))


@dataclass(frozen=True, kw_only=True)
class BFloat16Latent(LatentFormat):
    """1152 bytes: 512 and 64 bf16, for adapters of kernels without a quantised cache."""

    def pack(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
        """Round to bf16, to nearest even."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.pack_bf16(kv_c, k_pe)

    def unpack(self, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Widen."""
        from kimi_hal.formats import latent_bytes

        return latent_bytes.unpack_bf16(rows).to(dtype)
