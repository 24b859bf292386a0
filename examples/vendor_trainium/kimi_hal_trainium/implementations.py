"""What each kernel covers, as data, and what memory it needs. Imports no torch.

A claim is closed: a field of the Spec that is not named here is covered at its default alone. Attention, for
one, does not name ``q_dtype`` or ``dcp``: it takes bf16 queries, on one rank.
"""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import (
    Capability,
    Domain,
    Implementation,
    OneOf,
    Preference,
    Properties,
    Range,
    Sizes,
)

from kimi_hal_trainium.tiles import MOST

ARCHITECTURES = ("trn2", "trn3")
EXECUTION = ("native", "interpreted")
REQUIRES = {"neuron-driver": ">=2.20"}

FLOATS = OneOf(("float32", "bfloat16"))
EITHER = OneOf((False, True))
SHARDS: dict[str, Domain] = {
    "dcp.world": Range(1, 64),
    "dcp.rank": Range(0, 63),
    "dcp.interleave": Range(1, 1 << 20),
    "dcp.index": OneOf(("sharded", "replicated")),
}

SCORES = Capability(
    arch=ARCHITECTURES,
    spec={
        "index": OneOf(("index.fp8.e4m3fn.pow2.page64", "index.fp8.e4m3fn.f32.page64")),
        "num_heads": Range(1, 128),
        "score": FLOATS,
        "weights_dtype": FLOATS,
        **SHARDS,
    },
    properties=Properties(deterministic=True),
    requires=REQUIRES,
)

SELECT = Capability(
    arch=ARCHITECTURES,
    spec={
        "topk": Range(1, 1 << 20),
        "score": FLOATS,
        "scores_dtype": FLOATS,
        "ordered": EITHER,
        "return_selected": EITHER,
        "has_row_start": EITHER,
        **SHARDS,
    },
    properties=Properties(deterministic=True, batch_invariant=True, numerics_id="trainium.threshold"),
    requires=REQUIRES,
)


def attention(latent: str, out_dtypes: OneOf = FLOATS) -> Capability:
    """Return the claim on attention over one latent format.

    Two Capabilities are an "or": what holds for one format alone is said in its own.
    """
    return Capability(
        arch=ARCHITECTURES,
        spec={
            "num_heads": Range(1, 128),
            "latent": OneOf((latent,)),
            "page": Range(1, 4096),
            "topk": Range(1, 4096),
            "softmax_scale": Range(0, 1),
            "index_space": OneOf(("slot", "position")),
            "out_dtype": out_dtypes,
            "return_lse": EITHER,
        },
        properties=Properties(deterministic=True),
        requires=REQUIRES,
    )


def size_scores(spec: Any, limits: Any, arch: str) -> Sizes:
    """Return the bytes of ``indexer_logits``: known before there is a device.

    Workspace: the keys of one tile in float32. Step: the number of keys of each row, int32. Persistent: the
    table that decodes a byte.
    """
    return Sizes(workspace=MOST * spec.head_dim * 4, step=limits.max_rows * 4, persistent=256 * 4)


def size_attention(spec: Any, limits: Any, arch: str) -> Sizes:
    """Return the bytes of ``sparse_mla``: the keys of one tile in float32, and the decoding table."""
    return Sizes(workspace=MOST * (spec.kv_rank + spec.pe_dim) * 4, persistent=256 * 4)


SOURCE = ("kimi_hal_trainium/*.py",)

IMPLEMENTATIONS = (
    Implementation(
        operator="indexer_logits",
        name="tiled",
        build="kimi_hal_trainium.scores:build",
        prepare="kimi_hal_trainium.scores:prepare",
        size="kimi_hal_trainium.implementations:size_scores",
        capabilities=(SCORES,),
        execution=EXECUTION,
        source=SOURCE,
    ),
    Implementation(
        operator="topk_select",
        name="threshold",
        build="kimi_hal_trainium.select:build",
        capabilities=(SELECT,),
        execution=EXECUTION,
        source=SOURCE,
    ),
    Implementation(
        operator="sparse_mla",
        name="tiled",
        build="kimi_hal_trainium.attention:build",
        size="kimi_hal_trainium.implementations:size_attention",
        capabilities=(attention("latent.fp8.e4m3fn.tensor"), attention("latent.bf16")),
        execution=EXECUTION,
        source=SOURCE,
    ),
    Implementation(
        operator="sparse_mla",
        name="tiled_bf16",
        build="kimi_hal_trainium.attention:build_rounded",
        size="kimi_hal_trainium.implementations:size_attention",
        capabilities=(attention("latent.fp8.e4m3fn.tensor", OneOf(("bfloat16",))),),
        # It rounds more than the contract admits, so it is taken only where Spec.numerics says so, or by name.
        numerics=("attn.p=bf16",),
        # A rank is a measurement: on a device, `measured` says on which, when, and where the numbers stand.
        preferences=(Preference(rank=1),),
        execution=EXECUTION,
        source=SOURCE,
    ),
)
