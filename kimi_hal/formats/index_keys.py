"""Formats of the index-key cache: pages of 64 keys of 128, all elements first, then all scales.

Sources: DeepGEMM ``tests/test_attention.py`` (page of keys, then scales), vLLM
``v1/attention/ops/rocm_aiter_mla_sparse.py`` (the shuffled page), aiter
``ops/triton/attention/pa_mqa_logits_mxfp4.py`` (the gfx950 order). Layout tables: ``docs/formats.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kimi_hal.errors import FormatError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: How an FP8 key can write its scale.
FP8_SCALES = ("f32", "pow2", "ue8m0x4")

#: Bytes of scale a key has, in every index format: one float32, or four e8m0.
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class IndexFormat:
    """One byte layout of index keys.

    Args:
        name: as written in a Spec.
        element: "e4m3fn", "e4m3fnuz" or "e2m1".
        scale: "f32" (raw), "pow2" (float32 that is a power of two), "ue8m0x4" (one power of two as four
            equal bytes) or "e8m0" (one byte for each 32 elements).
        tile_tokens: tokens of a run inside which elements are interleaved; 1 is the plain order.
        tile_bytes: bytes of one token that stay together inside a run; None is the whole key.
        scale_lanes: inside a run scale byte s of a token stands at ``[s % lanes, token, s // lanes]``.
        page: tokens of a page.
        head_dim: elements of a key.
    """

    kind: ClassVar[str] = "index"

    name: str
    element: str
    scale: str
    tile_tokens: int = 1
    tile_bytes: int | None = None
    scale_lanes: int = 1
    page: int = 64
    head_dim: int = 128

    def __post_init__(self) -> None:
        """Refuse a layout that does not fill its page."""
        chunk = self.tile_bytes or self.element_bytes
        parts = ((self.page, self.tile_tokens), (self.element_bytes, chunk), (SCALE_BYTES, self.scale_lanes))
        for whole, part in parts:
            if whole % part:
                raise FormatError(f"format {self.name!r}: {part} does not divide {whole}; see IndexFormat")
        known = {"e4m3fn": FP8_SCALES, "e4m3fnuz": FP8_SCALES, "e2m1": ("e8m0",)}
        if self.scale not in known.get(self.element, ()):
            raise FormatError(
                f"format {self.name!r}: element {self.element!r} with scale {self.scale!r} is not known; "
                + ", ".join(f"{element}: {' | '.join(scales)}" for element, scales in known.items())
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one key without its scale."""
        return self.head_dim // 2 if self.element == "e2m1" else self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one key with its scale: 132 or 68."""
        return self.element_bytes + SCALE_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page * self.row_bytes

    @property
    def query_dtype(self) -> str:
        """The dtype of a quantised query: an FP8 dtype, or uint8 for packed e2m1."""
        return "uint8" if self.element == "e2m1" else f"float8_{self.element}"

    def element_offset(self, token: int, dim: int) -> int:
        """Return the byte inside the page that holds element ``dim`` of a token.

        For e2m1 an even ``dim`` is the byte's low nibble.
        """
        byte = dim // 2 if self.element == "e2m1" else dim
        chunk = self.tile_bytes or self.element_bytes
        run, inside = divmod(token, self.tile_tokens)
        in_run = (byte // chunk * self.tile_tokens + inside) * chunk + byte % chunk
        return run * self.tile_tokens * self.element_bytes + in_run

    def scale_offset(self, token: int, byte: int = 0) -> int:
        """Return the byte inside the page that holds scale byte ``byte`` (0 to 3) of a token."""
        run, inside = divmod(token, self.tile_tokens)
        each = SCALE_BYTES // self.scale_lanes
        in_run = (byte % self.scale_lanes * self.tile_tokens + inside) * each + byte // self.scale_lanes
        return self.page * self.element_bytes + run * self.tile_tokens * SCALE_BYTES + in_run

    def pack(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise ``keys [n, 128]``; returns elements ``[n, 128 or 64]`` and scales ``[n, 4]``, uint8."""
        from kimi_hal.formats import index_bytes

        return index_bytes.pack(self, keys)

    def unpack(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo ``pack``: element times scale in ``dtype``, ``[n, 128]``."""
        from kimi_hal.formats import index_bytes

        return index_bytes.unpack(self, elements, scales, dtype)

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor) -> None:
        """Quantise keys into their slots of a cache, in place; no other byte changes.

        Args:
            cache: ``[pages, page_bytes]`` uint8, ``stride(1) == 1``, ``stride(0)`` free.
            slots: ``[n]`` int64, each in ``[0, pages * page)``. Of two rows with one slot the later is kept.
            keys: ``[n, 128]`` float32 or bf16.

        Raises:
            FormatError: the cache's dtype, shape or stride is not this format's; or, seen on the CPU only, a
                slot outside the cache.
        """
        from kimi_hal.formats import index_bytes

        index_bytes.write(self, cache, slots, keys)

    def read(self, cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Decode the keys of ``slots [n]``, and of no others, to ``[n, 128]`` in ``dtype`` (float32)."""
        from kimi_hal.formats import index_bytes

        return self.unpack(*index_bytes.gather(self, cache, slots), dtype or index_bytes.FLOAT32)

    def read_pages(self, pages: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Decode whole pages ``[n, page_bytes]`` to ``[n, 64, 128]`` in ``dtype`` (float32)."""
        from kimi_hal.formats import index_bytes

        keys = self.unpack(*index_bytes.split(self, pages), dtype or index_bytes.FLOAT32)
        return keys.reshape(pages.shape[0], self.page, self.head_dim)

    def encode_query(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise index queries ``[..., 128]``.

        Returns:
            FP8: ``[..., 128]`` in the FP8 dtype and float32 ``[...]``, the power of two
            ``2**⌈log2(max(amax, 1e-4) / 448)⌉`` (224 for fnuz), which the caller folds into the head weights.
            MXFP4: packed e2m1 ``[..., 64]`` and e8m0 ``[..., 4]``, both uint8.
        """
        from kimi_hal.formats import index_bytes

        return index_bytes.encode_query(self, q)

    def decode_query(self, q: Tensor, q_scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Undo ``encode_query`` to ``[..., 128]`` in ``dtype`` (float32).

        ``q_scale`` may be None or empty for FP8, whose scale has been folded into the weights: then the
        elements alone are returned.
        """
        from kimi_hal.formats import index_bytes

        return index_bytes.decode_query(self, q, q_scale, dtype or index_bytes.FLOAT32)
