"""Claims of the Pallas kernels, as data. Imports neither torch nor jax."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Properties
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal_tpu import splits
from kimi_hal_tpu.claims import DCP, FLAG, FLOAT, KDA, KDA_PAIR, MOE, SELECTED, SPARSE_CORES, TPUS
from kimi_hal_tpu.xla.sizes import RECORDS

#: What ``prepare_moe_weights`` returns and ``moe_experts`` takes: transposed, in blocks of the intermediate width.
EXPERTS_FORMAT = "tpu.mxfp4.blocks"
#: Pages whose 64 keys carry one float32 scale each.
INDEX = OneOf(("index.fp8.e4m3fn.f32.page64", "index.fp8.e4m3fn.pow2.page64"))
SCORED: dict[str, Domain] = {
    "index": INDEX,
    "num_heads": Range(1, 128),
    "score": FLOAT,
    "weights_dtype": FLOAT,
    **DCP,
}
#: A line of the block table stands whole in SMEM, twice: 2^20 keys are 128 KB.
ONE_ROW: dict[str, Domain] = {"max_context": Range(0, 1 << 20)}
SPECS: dict[str, dict[str, Domain]] = {
    "indexer_logits": SCORED,
    "indexer_topk": SCORED | SELECTED | {"emit": OneOf(("local", "slot"))},
    "topk_select": SELECTED | DCP | {"score": FLOAT, "scores_dtype": FLOAT, "has_row_start": FLAG},
    "sparse_mla": {
        "latent": OneOf(("latent.fp8.e4m3fn.tensor", "latent.nvfp4.352", "latent.bf16")),
        "page": Range(1, 1 << 20),
        **DCP,
        "num_heads": Range(1, 128),
        "topk": Range(1, 1 << 15),
        "softmax_scale": Range(0, 1 << 16),
        "index_space": OneOf(("slot", "position", "local")),
        "has_index_len": FLAG,
        "q_dtype": OneOf(("bfloat16", "float8_e4m3fn")),
        "out_dtype": FLOAT,
        "return_lse": FLAG,
    },
    # Mosaic has no product of matrices of one column.
    "kda_prefill": KDA | {"head_dim": Range(2, 256)},
    **dict.fromkeys(("kda_decode", "kda_verify", "kda_commit"), KDA),
    "moe_experts": MOE,
}
LIMITS: Mapping[str, dict[str, Domain]] = {"indexer_logits": ONE_ROW, "indexer_topk": ONE_ROW}
#: Operators of which a part runs on SparseCore.
ON_SPARSE_CORE = frozenset({"indexer_topk", "topk_select", "sparse_mla"})
#: The simulator, compiling, and torch_tpu.
JAX = {"jax": ">=0.10,<0.11"}
#: Operators whose kernels the libtpu of torch-xla compiles, and the generations that it knows. Its jax has nothing of
#: SparseCore; its Mosaic copies whole tiles alone, which index scores and experts do not.
BY_TORCH_XLA = frozenset({"kda_prefill", "kda_decode", "kda_verify", "kda_commit"})
KNOWN_TO_TORCH_XLA = ("v5e", "v5p", "v6e")
TORCH_XLA = {"torch_xla": ">=2.9,<2.10", "jax": ">=0.7.1,<0.8", "libtpu": ">=0.0.21,<0.0.22"}
ROW = Properties(deterministic=True, batch_invariant=True)
#: Operators that store checkpoints: what comes behind one is computed as if a call began there.
CHECKPOINTED = frozenset({"kda_prefill", "kda_commit"})
CONTINUED = Properties(deterministic=True, batch_invariant=True, checkpoint_exact=True)
SOURCE = tuple(
    f"kimi_hal_tpu/{name}.py"
    for name in ("pallas/*", "static", "staging", "empty", "buckets", "generations", "expert_grid", "scales")
)


def _environments(operator: str) -> tuple[dict[str, str], ...]:
    """Return what each environment that can trace an operator's kernels has."""
    return (JAX, TORCH_XLA) if operator in BY_TORCH_XLA else (JAX,)


def _capability(operator: str, requires: dict[str, str]) -> Capability:
    own = SPARSE_CORES if operator in ON_SPARSE_CORE else TPUS
    return Capability(
        arch=KNOWN_TO_TORCH_XLA if requires is TORCH_XLA else own,
        spec=SPECS[operator],
        limits=LIMITS.get(operator, {}),
        properties=CONTINUED if operator in CHECKPOINTED else ROW,
        requires=requires,
    )


def _implementation(operator: str) -> Implementation:
    return Implementation(
        operator=operator,
        name="pallas",
        build="kimi_hal_tpu.pallas.bridge:build",
        capabilities=tuple(_capability(operator, needs) for needs in _environments(operator)),
        preferences=(Preference(rank=-10),),
        # The traced programs' own layout: a commit of either takes the records of either's verify.
        size="kimi_hal_tpu.xla.sizes:sizes" if operator in KDA_PAIR else None,
        records=RECORDS if operator in KDA_PAIR else None,
        execution=("native", "interpreted", "compile_only"),
        weights="kimi_hal_tpu.pallas.expert_blocks:weights" if operator == "moe_experts" else None,
        weights_format=EXPERTS_FORMAT if operator == "moe_experts" else None,
        compile=f"kimi_hal_tpu.descriptions:{operator}",
        source=SOURCE,
        split=splits.pallas(operator),
    )


#: What turns the checkpoint's experts into what ``moe_experts`` takes, in torch.
PREPARE = Implementation(
    operator="prepare_moe_weights",
    name="pallas",
    build="kimi_hal_tpu.pallas.expert_blocks:build",
    capabilities=tuple(
        Capability(arch=TPUS, spec=MOE, properties=Properties(deterministic=True), requires=needs)
        for needs in _environments("moe_experts")
    ),
    preferences=(Preference(rank=-10),),
    weights_format=EXPERTS_FORMAT,
    execution=("native", "interpreted"),
    source=SOURCE,
    split=splits.XLA,
)
PALLAS = (*(_implementation(operator) for operator in SPECS), PREPARE)
