"""Claims of the adapters to other libraries' kernels, as data. Imports no torch and none of the libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Properties, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, FLAG
from kimi_hal_nvidia.adapters.claim_terms import ATTENTION, BEHIND, FLASHINFER
from kimi_hal_nvidia.adapters.flashinfer_claims import ATTENTION as FLASHINFER_ATTENTION

HOPPER = ("sm_90",)
#: Selections whose ties, NaN and signed zeros are not the contract's.
ANY_TIE = Properties(capture="full", tie_rule="any")
#: FlashMLA cuts keys by the number of rows.
ROWS_MATTER = Properties(deterministic=True, capture="full")
WHOLE = TensorCap(align=16, contiguous=("all",))
PACKED = TensorCap(align=1, contiguous=("all",))
#: Distributions that bring each library, each with the versions whose call was tried.
DEEPGEMM = ({"deep-gemm": ">=2.8,<2.9"}, {"vllm": ">=0.33"})
FLASHMLA = ({"sgl-flash-mla": ">=1.0", "triton": ">=3.6"}, {"vllm": ">=0.33", "triton": ">=3.6"})
VLLM = ({"vllm": ">=0.33"},)

KEYS: dict[str, Domain] = {
    "index": OneOf(("index.fp8.e4m3fn.f32.page64", "index.fp8.e4m3fn.pow2.page64")),
    "num_heads": OneOf((32, 64)),
    **DCP,
}
OPERANDS = {"q": WHOLE, "weights": WHOLE, "cache": TensorCap(align=16), "q_scale": ELEMENT}
#: Up to two rows of a request share its keys in one product; more are a prefill, which gathers the keys first.
DECODE: dict[str, Domain] = {"rows_per_req": Range(1, 2)}
PREFILL: dict[str, Domain] = {"rows_per_req": Range(3, 1 << 20), "max_reqs": Range(1, 64)}

FLASHMLA_SPEC: dict[str, Domain] = ATTENTION | {"topk": Range(1, 1 << 16)}
RECORD: dict[str, Domain] = FLASHMLA_SPEC | {
    "return_lse": FLAG,
    "latent": OneOf(("latent.flashmla.656",)),
    "page": Range(16, 4096, multiple=16),
}
#: Its prefill's LSE has an error of some 10^-6, more than float32's: not claimed.
ROWS: dict[str, Domain] = FLASHMLA_SPEC | {
    "return_lse": OneOf((False,)),
    "latent": OneOf(("latent.bf16",)),
    "page": Range(1, 1 << 20),
}


def _either(base: Capability, libraries: tuple[Mapping[str, str], ...]) -> tuple[Capability, ...]:
    """Return a capability for each library that may bring the kernels."""
    return tuple(dataclasses.replace(base, requires=library) for library in libraries)


def _source(*modules: str) -> tuple[str, ...]:
    adapters = (f"kimi_hal_nvidia/adapters/{name}.py" for name in (*modules, "libraries"))
    return (*adapters, "kimi_hal_nvidia/streams.py")


ADAPTERS = (
    Implementation(
        operator="indexer_logits",
        name="deepgemm",
        build="kimi_hal_nvidia.adapters.deepgemm:build_indexer_logits",
        prepare="kimi_hal_nvidia.adapters.deepgemm:prepare_indexer_logits",
        size="kimi_hal_nvidia.adapters.sizes:indexer_logits",
        capabilities=(
            *_either(
                Capability(
                    arch=HOPPER,
                    spec=KEYS,
                    limits=DECODE,
                    tensors=OPERANDS,
                    properties=Properties(deterministic=True, capture="full"),
                ),
                DEEPGEMM,
            ),
            *_either(
                Capability(
                    arch=HOPPER,
                    spec=KEYS,
                    limits=PREFILL,
                    tensors=OPERANDS,
                    properties=Properties(deterministic=True),
                ),
                DEEPGEMM,
            ),
        ),
        preferences=BEHIND,
        numerics=("logits=fp8_sum",),
        source=_source("deepgemm", "keys", "pages", "placed", "sizes"),
    ),
    Implementation(
        operator="topk_select",
        name="vllm",
        build="kimi_hal_nvidia.adapters.topk:build_vllm",
        size="kimi_hal_nvidia.adapters.sizes:vllm_topk",
        capabilities=_either(
            Capability(
                arch=HOPPER,
                spec={"topk": OneOf((512, 1024, 2048)), **DCP},
                tensors={"scores": PACKED},
                properties=ANY_TIE,
            ),
            VLLM,
        ),
        preferences=BEHIND,
        source=_source("topk", "keys", "sizes"),
    ),
    Implementation(
        operator="topk_select",
        name="flashinfer",
        build="kimi_hal_nvidia.adapters.topk:build_flashinfer",
        capabilities=_either(
            Capability(
                arch=HOPPER,
                spec={"topk": Range(1, 2048), "has_row_start": FLAG, **DCP},
                tensors={"scores": PACKED},
                properties=ANY_TIE,
            ),
            (FLASHINFER,),
        ),
        preferences=(Preference(rank=-31),),
        source=_source("topk", "keys"),
    ),
    Implementation(
        operator="sparse_mla",
        name="flashmla",
        build="kimi_hal_nvidia.adapters.flashmla:build_sparse_mla",
        capabilities=(
            *_either(
                Capability(
                    arch=HOPPER, spec=RECORD, tensors={"cache": TensorCap(align=16)}, properties=ROWS_MATTER
                ),
                FLASHMLA,
            ),
            *_either(
                Capability(
                    arch=HOPPER, spec=ROWS, tensors={"cache": TensorCap(align=16)}, properties=ROWS_MATTER
                ),
                FLASHMLA,
            ),
        ),
        preferences=BEHIND,
        numerics=("attn.k=bf16", "attn.p=bf16"),
        source=_source("flashmla", "pages", "slots"),
    ),
    *FLASHINFER_ATTENTION,
)
