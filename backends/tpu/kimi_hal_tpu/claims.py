"""What every claim of this backend has in common, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.domain import Domain, OneOf, Range

TPUS = ("v5e", "v5p", "v6e", "tpu7x")
#: Generations with SparseCores.
SPARSE_CORES = ("v5p", "v6e", "tpu7x")
FLAG = OneOf((False, True))
FLOAT = OneOf(("float32", "bfloat16"))
DCP: dict[str, Domain] = {
    "dcp.world": Range(1, 64),
    "dcp.rank": Range(0, 63),
    "dcp.interleave": Range(1, 1 << 20),
    "dcp.index": OneOf(("sharded", "replicated")),
}
SELECTED: dict[str, Domain] = {"topk": Range(1, 1 << 15), "ordered": FLAG, "return_selected": FLAG}
#: An engine builds one KDASpec for all six operators: what one does not look at may be anything.
KDA: dict[str, Domain] = {
    "num_heads": Range(1, 128),
    "head_dim": Range(1, 256),
    "gate": OneOf(("raw", "log")),
    "lower_bound": OneOf((None, -5.0)),
    "qk_norm": FLAG,
    "scale": Range(0, 1 << 16),
    "conv_layout": OneOf(("width_channel", "channel_width")),
    "checkpoints": FLAG,
    "num_layers": Range(1, 1024),
    "norm_eps": Range(0, 1),
}
#: A verify and its commit.
KDA_PAIR = frozenset({"kda_verify", "kda_commit"})
MOE: dict[str, Domain] = {
    "num_experts": Range(1, 1 << 12),
    "num_local": Range(1, 1 << 12),
    "expert_offset": Range(0, 1 << 12),
    "has_expert_map": FLAG,
    "topk": Range(1, 1 << 10),
    "hidden": Range(1, 1 << 14),
    "intermediate": Range(1, 1 << 14),
    "weights": OneOf(("experts.mxfp4-pack",)),
    "activation": OneOf(("situ", "swiglu")),
    "beta": Range(1e-3, 1e6),
    "linear_beta": OneOf((None, 25.0, 0.0, -1.0)),
    "out_dtype": FLOAT,
}
