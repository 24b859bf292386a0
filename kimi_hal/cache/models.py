"""What three models keep between steps, described for the planner. Only Kimi K3.1 Pro follows from a ``Model``.

Sources: ``docs/cache.md``.
"""

from __future__ import annotations

from kimi_hal import formats
from kimi_hal.cache.kinds import StateCache, StatePart, TokenCache
from kimi_hal.domain import OneOf
from kimi_hal.errors import CacheError, nearest
from kimi_hal.model import Model

Description = tuple[TokenCache | StateCache, ...]

#: How a conv state can lie: [3, channels], or [channels, 3] as disaggregated transfers want it.
CONV_LAYOUTS = ("width_channel", "channel_width")


def describe(
    model: Model, *, latent: str, index: str | None, conv_layout: str = "width_channel"
) -> Description:
    """Return the caches of a hybrid model of sparse latent attention and KDA.

    Args:
        model: whose layers and widths.
        latent: format of the latents.
        index: format of the index keys; ``None``: attention is dense and has none (Kimi K3).
        conv_layout: "width_channel" or "channel_width".

    Raises:
        UnknownNameError: a format that is not registered; names the nearest.
        CacheError: an unknown conv layout.
    """
    layers = model.full_attention_layers
    rows = formats.latent(latent)
    caches = [TokenCache(name="latent", layers=layers, entry_bytes=rows.row_bytes, format=latent)]
    if index is not None:
        keys = formats.index(index)
        caches.append(
            TokenCache(name="index", layers=layers, entry_bytes=keys.row_bytes, format=index, page=keys.page)
        )
    kda = delta_attention(model.kda_layers, model.kda_heads, model.kda_dim, model.conv_width - 1, conv_layout)
    return (*caches, kda)


def delta_attention(
    layers: tuple[int, ...], heads: int, dim: int, width: int, conv_layout: str = "width_channel"
) -> StateCache:
    """Return the state of KDA layers: recurrent float32 ``[H, V, K]`` and ``width`` raw inputs in bf16."""
    if conv_layout not in CONV_LAYOUTS:
        known = OneOf(CONV_LAYOUTS)
        raise CacheError(f"conv_layout={conv_layout!r} is not {known}{nearest(conv_layout, CONV_LAYOUTS)}")
    channels = 3 * heads * dim
    by_width = conv_layout == "width_channel"
    conv = StatePart(
        name="conv",
        dtype="bfloat16",
        shape=(width, channels) if by_width else (channels, width),
        axis=1 if by_width else 0,
        segments=("q", "k", "v"),
    )
    recurrent = StatePart(name="recurrent", dtype="float32", shape=(heads, dim, dim))
    return StateCache(name="kda", layers=layers, heads=heads, parts=(recurrent, conv))


def glm_5_3_flash() -> Description:
    """Return GLM-5.3-Flash's caches: 11 latent layers whose index keys stand for 4 tokens each, 34 KDA layers.

    The last tokens that do not fill an index key yet wait in a ring of 4 raw entries, one a request.
    """
    layers = tuple(range(3, 45, 4))
    others = tuple(i for i in range(45) if i not in layers)
    ring = StatePart(name="tail", dtype="bfloat16", shape=(4, 2, 128))
    return (
        TokenCache(name="latent", layers=layers, entry_bytes=576, format="latent.fp8.e4m3fn.tensor"),
        TokenCache(
            name="index",
            layers=layers,
            entry_bytes=132,
            format="index.fp8.e4m3fn.pow2.page64",
            page=64,
            ratio=4,
        ),
        delta_attention(others, heads=64, dim=128, width=3),
        StateCache(name="ring", layers=layers, heads=None, parts=(ring,)),
    )


def deepseek_v4_flash() -> Description:
    """Return DeepSeek-V4-Flash's caches: latents of 4 and of 128 tokens, windows of 128 tokens, compressors.

    43 layers: the first two see the window alone, then ratios 4 and 128 take turns. Pages are whole multiples
    of 576 bytes. A compressor's running sums are windows: two entries of 4 tokens, one of 128.
    """
    four, many = tuple(range(2, 43, 2)), tuple(range(3, 43, 2))

    def window(name: str, layers: tuple[int, ...], entry: int, tokens: int, block: int) -> TokenCache:
        return TokenCache(
            name=name, layers=layers, entry_bytes=entry, window=tokens, block_size=block, align=576
        )

    return (
        TokenCache(name="latent4", layers=four, entry_bytes=584, ratio=4, align=576),
        TokenCache(name="latent128", layers=many, entry_bytes=584, ratio=128, align=576),
        TokenCache(name="index", layers=four, entry_bytes=132, ratio=4, align=576),
        window("window", tuple(range(43)), 584, 128, 64),
        window("sums4", four, 8192, 8, 4),
        window("index_sums4", four, 2048, 8, 4),
        window("sums128", many, 4096, 128, 8),
    )
