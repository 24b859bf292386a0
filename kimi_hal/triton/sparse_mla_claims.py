"""Claims of the sparse_mla family, as data. Imports no Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, EXECUTION, FLAG, FLOAT, LAST, REQUIRES, ROW

#: Latents are read by whole words: rows begin at whole 16 bytes, as packed caches have them.
PAGES = TensorCap(align=16)
FORMATS = OneOf(
    (
        "latent.fp8.e4m3fn.tensor",
        "latent.fp8.e4m3fnuz.tensor",
        "latent.nvfp4.352",
        "latent.flashmla.656",
        "latent.bf16",
    )
)
CACHE: dict[str, Domain] = {"latent": FORMATS, "page": Range(1, 1 << 20)}
ATTENTION: dict[str, Domain] = {
    **CACHE,
    **DCP,
    "num_heads": Range(1, 128),
    "topk": Range(1, 1 << 20),
    "softmax_scale": Range(0, 1 << 16),
    "index_space": OneOf(("slot", "position", "local")),
    "has_index_len": FLAG,
    "q_dtype": OneOf(("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz")),
    "out_dtype": FLOAT,
    "return_lse": FLAG,
}
MERGE: dict[str, Domain] = {
    "parts": Range(1, 64),
    "num_heads": Range(1, 128),
    "dim": Range(1, 1024),
    "dtype": FLOAT,
    "return_lse": FLAG,
}
SOURCE = tuple(
    f"kimi_hal/triton/{name}.py"
    for name in (
        "sparse_mla",
        "attention",
        "latent_rows",
        "latent_quantisation",
        "latent_plan",
        "minifloat",
    )
)
#: Where a Spec admits bfloat16 probabilities, the kernel that rounds to them is the faster one.
ROUNDED = "attn.p=bf16"


def sparse_mla(arch: tuple[str, ...]) -> tuple[Implementation, ...]:
    """Return the family's portable implementations for these architectures."""
    attention = dict.fromkeys(("q", "indices"), ELEMENT) | {"cache": PAGES}
    return (
        _implementation(arch, "store_latent", CACHE | {"dump_slot": Range(-1, 1 << 40)}, {"cache": PAGES}),
        _implementation(arch, "sparse_mla", ATTENTION, attention, size=SIZE),
        _implementation(
            arch,
            "sparse_mla",
            ATTENTION | {"out_dtype": OneOf(("bfloat16",))},
            attention,
            name="triton_p16",
            build="build_sparse_mla_p16",
            compile="sparse_mla_p16",
            size=SIZE,
            numerics=(ROUNDED,),
            preferences=(Preference(rank=-9),),
        ),
        _implementation(arch, "merge_attn_states", MERGE, {"outs": ELEMENT, "lses": ELEMENT}),
    )


SIZE = "kimi_hal.triton.latent_plan:sparse_mla"


def _implementation(
    arch: tuple[str, ...],
    operator: str,
    spec: dict[str, Domain],
    tensors: dict[str, TensorCap],
    *,
    name: str = "triton",
    build: str = "",
    compile: str = "",
    size: str | None = None,
    numerics: tuple[str, ...] = (),
    preferences: tuple[Preference, ...] = LAST,
) -> Implementation:
    return Implementation(
        operator=operator,
        name=name,
        build=f"kimi_hal.triton.sparse_mla:{build or f'build_{operator}'}",
        compile=f"kimi_hal.triton.sparse_mla_kernels:{compile or operator}",
        capabilities=(Capability(arch=arch, spec=spec, tensors=tensors, properties=ROW, requires=REQUIRES),),
        preferences=preferences,
        size=size,
        execution=EXECUTION,
        numerics=numerics,
        source=SOURCE,
    )
