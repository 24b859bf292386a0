"""The formats that the core knows. A plugin adds its own through ``register``."""

from __future__ import annotations

from kimi_hal.formats.expert_weights import ExpertFormat
from kimi_hal.formats.index_keys import IndexFormat
from kimi_hal.formats.latents import BFloat16Latent, FlashMLALatent, NVFP4Latent, TensorScaledLatent

FORMATS = (
    IndexFormat(name="index.fp8.e4m3fn.f32.page64", element="e4m3fn", scale="f32"),
    IndexFormat(name="index.fp8.e4m3fn.pow2.page64", element="e4m3fn", scale="pow2"),
    IndexFormat(name="index.fp8.e4m3fn.ue8m0x4.page64", element="e4m3fn", scale="ue8m0x4"),
    IndexFormat(name="index.fp8.e4m3fnuz.f32.page64", element="e4m3fnuz", scale="f32"),
    IndexFormat(
        name="index.fp8.e4m3fnuz.f32.shuffled.page64",
        element="e4m3fnuz",
        scale="f32",
        tile_tokens=16,
        tile_bytes=16,
    ),
    IndexFormat(name="index.mxfp4.page64", element="e2m1", scale="e8m0"),
    IndexFormat(
        name="index.mxfp4.gfx950.page64",
        element="e2m1",
        scale="e8m0",
        tile_tokens=32,
        tile_bytes=16,
        scale_lanes=2,
    ),
    TensorScaledLatent(name="latent.fp8.e4m3fn.tensor", row_bytes=576, needs_scale=True, element="e4m3fn"),
    TensorScaledLatent(
        name="latent.fp8.e4m3fnuz.tensor", row_bytes=576, needs_scale=True, element="e4m3fnuz"
    ),
    NVFP4Latent(name="latent.nvfp4.352", row_bytes=352),
    FlashMLALatent(name="latent.flashmla.656", row_bytes=656),
    BFloat16Latent(name="latent.bf16", row_bytes=1152),
    ExpertFormat(name="experts.mxfp4-pack"),
)
