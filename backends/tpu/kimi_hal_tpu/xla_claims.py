"""Claims of the traced programs, as data. Imports neither torch nor torch_xla."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Properties
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal_tpu import splits
from kimi_hal_tpu.claims import DCP, FLAG, FLOAT, KDA, KDA_PAIR, MOE, SELECTED, TPUS
from kimi_hal_tpu.xla.sizes import RECORDS

#: What ``prepare_moe_weights`` returns and ``moe_experts`` takes: the checkpoint's own bytes.
FORMAT = "tpu.mxfp4.plain"


#: In the place of a generation: where code is interpreted none is asked for, and no device is called so.
INTERPRETED = ("interpreted",)
#: Index formats whose queries torch-xla has a type for, and those whose queries it has none for.
QUERIES = (
    "index.fp8.e4m3fn.f32.page64",
    "index.fp8.e4m3fn.pow2.page64",
    "index.fp8.e4m3fn.ue8m0x4.page64",
    "index.mxfp4.page64",
    "index.mxfp4.gfx950.page64",
)
FNUZ_QUERIES = ("index.fp8.e4m3fnuz.f32.page64", "index.fp8.e4m3fnuz.f32.shuffled.page64")


@dataclass(frozen=True)
class Typed(OneOf):
    """Values that torch-xla has a type for, and what to say of the others."""

    lacking: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()} (torch-xla 2.9 has no type for {self.lacking} numbers)"


SCORED: dict[str, Domain] = {
    "index": Typed(QUERIES, "fnuz"),
    "num_heads": Range(1, 128),
    "score": FLOAT,
    "weights_dtype": FLOAT,
    **DCP,
}
CACHE: dict[str, Domain] = {
    "latent": OneOf(
        (
            "latent.fp8.e4m3fn.tensor",
            "latent.fp8.e4m3fnuz.tensor",
            "latent.nvfp4.352",
            "latent.flashmla.656",
            "latent.bf16",
        )
    ),
    "page": Range(1, 1 << 20),
}
SPECS: dict[str, dict[str, Domain]] = {
    "quantize_index_query": {
        "index": Typed(QUERIES, "fnuz"),
        "num_heads": Range(1, 128),
        "weights_dtype": FLOAT,
        "weight_scale": Range(0, 1 << 16),
        "hadamard": FLAG,
    },
    "store_index_keys": {"index": OneOf(QUERIES + FNUZ_QUERIES), "dump_slot": Range(-1, 1 << 40)},
    "indexer_logits": SCORED,
    "indexer_topk": SCORED | SELECTED | {"emit": OneOf(("local", "slot"))},
    "topk_select": SELECTED | DCP | {"score": FLOAT, "scores_dtype": FLOAT, "has_row_start": FLAG},
    "store_latent": CACHE | {"dump_slot": Range(-1, 1 << 40)},
    "sparse_mla": {
        **CACHE,
        **DCP,
        "num_heads": Range(1, 128),
        "topk": Range(1, 1 << 15),
        "softmax_scale": Range(0, 1 << 16),
        "index_space": OneOf(("slot", "position", "local")),
        "has_index_len": FLAG,
        "q_dtype": Typed(("bfloat16", "float8_e4m3fn"), "fnuz"),
        "out_dtype": FLOAT,
        "return_lse": FLAG,
    },
    "merge_attn_states": {
        "parts": Range(1, 64),
        "num_heads": Range(1, 128),
        "dim": Range(1, 1024),
        "dtype": FLOAT,
        "return_lse": FLAG,
    },
    **dict.fromkeys(("kda_gate", "kda_conv", "kda_prefill", "kda_decode", "kda_verify", "kda_commit"), KDA),
    "moe_route": {
        "num_experts": Range(1, 1 << 12),
        "topk": Range(1, 1 << 10),
        "renormalize": FLAG,
        "scale": Range(0, 1e6),
        "groups": Range(1, 1 << 10),
        "topk_groups": Range(1, 1 << 10),
        "denom_eps": Range(0, 1),
        "ordered": FLAG,
    },
    "topk_merge": DCP
    | {
        "topk": Range(1, 1 << 15),
        "protocol": OneOf(("full", "compact", "scores_only")),
        "quota": Range(1, 1 << 20),
        "score": FLOAT,
        "ordered": FLAG,
        "return_global": FLAG,
    },
    "all_gather": DCP
    | {
        "layout": OneOf(("rank_major", "token_order", "last_dim")),
        "dtype": Typed(
            (
                "uint8",
                "int8",
                "int16",
                "int32",
                "int64",
                "bfloat16",
                "float32",
                "float8_e4m3fn",
                "float8_e5m2",
            ),
            "fnuz and e8m0",
        ),
        "ndim": Range(1, 8),
    },
    "prepare_moe_weights": MOE,
    "moe_experts": MOE,
}
#: What is covered besides where code is interpreted: torch-xla 2.9 has no type for these numbers.
TYPELESS: dict[str, dict[str, Domain]] = {
    "quantize_index_query": {"index": OneOf(FNUZ_QUERIES)},
    "indexer_logits": {"index": OneOf(FNUZ_QUERIES)},
    "indexer_topk": {"index": OneOf(FNUZ_QUERIES)},
    "sparse_mla": {"q_dtype": OneOf(("float8_e4m3fnuz",))},
    "all_gather": {"dtype": OneOf(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"))},
}
ROW = Properties(deterministic=True)
SOURCE = (
    "kimi_hal_tpu/xla/*.py",
    "kimi_hal_tpu/static.py",
    "kimi_hal_tpu/staging.py",
    "kimi_hal_tpu/empty.py",
    "kimi_hal_tpu/buckets.py",
    "kimi_hal_tpu/expert_grid.py",
    "kimi_hal_tpu/scales.py",
)
EXPERTS = frozenset({"prepare_moe_weights", "moe_experts"})


def _capabilities(operator: str) -> tuple[Capability, ...]:
    """Return what a program covers on a TPU and interpreted, then what it covers interpreted alone."""
    requires = {"torch_xla": ">=2.9,<2.10"}
    everywhere = Capability(arch=TPUS, spec=SPECS[operator], properties=ROW, requires=requires)
    if operator not in TYPELESS:
        return (everywhere,)
    more = SPECS[operator] | TYPELESS[operator]
    return everywhere, Capability(arch=INTERPRETED, spec=more, properties=ROW, requires=requires)


def _implementation(operator: str) -> Implementation:
    return Implementation(
        operator=operator,
        name="xla",
        build="kimi_hal_tpu.xla.bridge:build",
        capabilities=_capabilities(operator),
        preferences=(Preference(rank=0),),
        weights="kimi_hal.reference.weights:weights" if operator == "moe_experts" else None,
        size="kimi_hal_tpu.xla.sizes:sizes" if operator in KDA_PAIR else None,
        records=RECORDS if operator in KDA_PAIR else None,
        weights_format=FORMAT if operator in EXPERTS else None,
        execution=("native", "interpreted"),
        source=SOURCE,
        split=splits.XLA,
    )


XLA = tuple(_implementation(operator) for operator in SPECS)
