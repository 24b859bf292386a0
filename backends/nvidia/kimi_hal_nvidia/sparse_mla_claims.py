"""Claims of this backend's own attention over latents, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, FLAG, ROW
from kimi_hal_nvidia.indexer_claims import BY_NAME, REQUIRES

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
SOURCE = tuple(
    f"kimi_hal_nvidia/{name}"
    for name in (
        "attention_plan.py",
        "cubins/sparse_mla*",
        "cubins.py",
        "driver.py",
        "parameters.py",
        "sparse_mla.py",
        "streams.py",
    )
)


def _implementation(name: str, arch: tuple[str, ...], execution: str) -> Implementation:
    return Implementation(
        operator="sparse_mla",
        name=name,
        build="kimi_hal_nvidia.sparse_mla:build_sparse_mla",
        capabilities=(Capability(arch=arch, spec=SPEC, tensors=OPERANDS, properties=ROW, requires=REQUIRES),),
        preferences=BY_NAME,
        execution=(execution,),
        source=SOURCE,
        compile="kimi_hal_nvidia.sparse_mla_kernels:sparse_mla",
        configurations="kimi_hal_nvidia.attention_plan:configurations",
    )


#: Blackwell's code is looked at and never run: nothing can plan it.
SPARSE_MLA = (
    _implementation("cuda", ("sm_90",), "native"),
    _implementation("cuda_blackwell", ("sm_100", "sm_103"), "compile_only"),
)
