"""Claims of the adapters to FlashInfer's attention, as data. Imports no torch and none of the library.

None was run, so none promises anything: not that its bits are the same again, nor that a graph may hold it.
"""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import FLAG
from kimi_hal_nvidia.adapters import claim_terms
from kimi_hal_nvidia.adapters.claim_terms import BEHIND, FLASHINFER

REQUIRES = FLASHINFER | {"triton": ">=3.6"}
#: FlashInfer's names of what they are compiled for: sm_100a and sm_103a, and every sm_12x.
DATACENTER, WORKSTATION = ("sm_100", "sm_103"), ("sm_120", "sm_121")
NOT_RUN = "no such device was here"

SPEC: dict[str, Domain] = claim_terms.ATTENTION | {"topk": Range(1, 4096)}
BFLOAT16: dict[str, Domain] = SPEC | {"latent": OneOf(("latent.bf16",))}
#: The queries' format is the cache's.
FP8: dict[str, Domain] = SPEC | {
    "latent": OneOf(("latent.fp8.e4m3fn.tensor",)),
    "q_dtype": OneOf(("float8_e4m3fn",)),
}
#: The sm_120 kernels for few rows, the only ones that are called, are for pages of 64 tokens.
RECORD: dict[str, Domain] = SPEC | {"latent": OneOf(("latent.flashmla.656",)), "page": OneOf((64,))}
#: TRT-LLM's kernels are shown pages of 32 tokens, and step from row to row of the whole cache by one stride.
ROWS: dict[str, Domain] = {"return_lse": FLAG, "page": Range(32, 1 << 20, multiple=32)}
#: XQA returns no LSE.
PAGES: dict[str, Domain] = {"return_lse": OneOf((False,)), "page": Range(1, 1 << 20)}
PACKED, STRIDED = TensorCap(align=16, contiguous=("all",)), TensorCap(align=16)


def _source(*modules: str) -> tuple[str, ...]:
    common = ("compacted", "flashinfer_calls", "flashinfer_sizes", "libraries", "pages", "slots")
    adapters = (f"kimi_hal_nvidia/adapters/{name}.py" for name in (*modules, *common))
    return (*adapters, "kimi_hal_nvidia/streams.py")


def _attention(
    name: str,
    arch: tuple[str, ...],
    spec: dict[str, Domain],
    cache: TensorCap,
    builder: str,
    size: str,
    *numerics: str,
) -> Implementation:
    """Return an implementation of ``sparse_mla``."""
    module = builder.partition(":")[0]
    return Implementation(
        operator="sparse_mla",
        name=name,
        build=f"kimi_hal_nvidia.adapters.{builder}",
        size=f"kimi_hal_nvidia.adapters.flashinfer_sizes:{size}",
        capabilities=(Capability(arch=arch, spec=spec, tensors={"cache": cache}, requires=REQUIRES),),
        preferences=BEHIND,
        numerics=numerics,
        not_run=NOT_RUN,
        source=_source(module, *(("flashinfer", "gathered") if module == "xqa" else ())),
    )


#: FP8 products are taken to be added no better than Hopper adds them: how these devices do is not known here.
IN_FP8 = ("attn.p=fp8", "attn.dots=fp8_sum")
ATTENTION = (
    _attention(
        "flashinfer", DATACENTER, BFLOAT16 | ROWS, PACKED, "flashinfer:build_rows", "rows", "attn.p=bf16"
    ),
    _attention("flashinfer_fp8", DATACENTER, FP8 | ROWS, PACKED, "flashinfer:build_rows", "rows", *IN_FP8),
    _attention(
        "flashinfer_records",
        WORKSTATION,
        RECORD | {"return_lse": FLAG},
        PACKED,
        "flashinfer:build_records",
        "records",
        "attn.q=fp8_block",
        *IN_FP8,
    ),
    _attention("xqa", WORKSTATION, BFLOAT16 | PAGES, STRIDED, "xqa:build_pages", "pages", "attn.p=bf16"),
    _attention("xqa_fp8", WORKSTATION, FP8 | PAGES, STRIDED, "xqa:build_pages", "pages", *IN_FP8),
)
