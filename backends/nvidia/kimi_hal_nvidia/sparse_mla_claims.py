"""Claims of this backend's own attention over latents and of its merge, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, FLAG, ROW
from kimi_hal_nvidia.claim_terms import COMPILED, REQUIRES, RUN

#: Cache rows are copied 16 bytes at a time.
OPERANDS = {"q": ELEMENT, "cache": TensorCap(align=16), "indices": ELEMENT}
SPEC: dict[str, Domain] = {
    "latent": OneOf(("latent.fp8.e4m3fn.tensor", "latent.nvfp4.352")),
    "page": Range(1, 1 << 20),
    **DCP,
    "num_heads": Range(1, 128),
    "topk": Range(1, 1 << 20),
    "softmax_scale": Range(0, 1 << 16),
    "index_space": OneOf(("slot", "position", "local")),
    "has_index_len": FLAG,
    "q_dtype": OneOf(("bfloat16", "float8_e4m3fn")),
    "return_lse": FLAG,
}
MERGED: dict[str, Domain] = {
    "parts": Range(1, 64),
    "num_heads": Range(1, 128),
    "dim": OneOf((512,)),
    "dtype": OneOf(("bfloat16",)),
    "return_lse": FLAG,
}
#: Numbers of a part are read 16 bytes at a time.
PARTS = {"outs": TensorCap(align=16), "lses": ELEMENT}


def _source(*own: str) -> tuple[str, ...]:
    return tuple(
        f"kimi_hal_nvidia/{name}" for name in (*own, "cubins.py", "driver.py", "parameters.py", "streams.py")
    )


#: Of the merge that ran: the faster one of few rows alone, as a table of measurements says; without a line the portable
#: one goes before.
FEW_ROWS = (Preference(rank=-15, measured="benchmarks/results/h200/tuning.json"),)

SPARSE_MLA = tuple(
    Implementation(
        operator="sparse_mla",
        name=name,
        build="kimi_hal_nvidia.sparse_mla:build_sparse_mla",
        capabilities=(Capability(arch=arch, spec=SPEC, tensors=OPERANDS, properties=ROW, requires=REQUIRES),),
        preferences=preferences,
        size="kimi_hal_nvidia.sizes:sparse_mla",
        execution=(execution,),
        source=_source(
            "attention_plan.py", "cubins/sparse_mla*", "h200.py", "sizes.py", "sparse_mla.py", "tickets.py"
        ),
        compile="kimi_hal_nvidia.sparse_mla_kernels:sparse_mla",
        configurations="kimi_hal_nvidia.attention_plan:configurations",
    )
    for name, (arch, execution, preferences) in RUN.items()
)
MERGE = tuple(
    Implementation(
        operator="merge_attn_states",
        name=name,
        build="kimi_hal_nvidia.merge_states:build_merge_attn_states",
        capabilities=(Capability(arch=arch, spec=MERGED, tensors=PARTS, properties=ROW, requires=REQUIRES),),
        preferences=FEW_ROWS if execution == "native" else COMPILED,
        execution=(execution,),
        source=_source("cubins/merge_states*", "merge_states.py"),
        compile="kimi_hal_nvidia.sparse_mla_kernels:merge_attn_states",
    )
    for name, (arch, execution, _) in RUN.items()
)
