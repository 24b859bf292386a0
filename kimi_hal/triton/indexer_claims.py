"""Claims of the indexer family and of ``topk_select``, as data. Imports no Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, EXECUTION, FLAG, FLOAT, LAST, REQUIRES, ROW

#: Scales are read as float32: pages begin at whole 16 bytes, as packed caches have them.
PAGES = TensorCap(align=16)
FORMATS = OneOf(
    (
        "index.fp8.e4m3fn.f32.page64",
        "index.fp8.e4m3fn.pow2.page64",
        "index.fp8.e4m3fn.ue8m0x4.page64",
        "index.fp8.e4m3fnuz.f32.page64",
        "index.fp8.e4m3fnuz.f32.shuffled.page64",
        "index.mxfp4.page64",
        "index.mxfp4.gfx950.page64",
    )
)
SCORED: dict[str, Domain] = {
    "index": FORMATS,
    "num_heads": Range(1, 128),
    "score": FLOAT,
    "weights_dtype": FLOAT,
    **DCP,
}
SELECTED: dict[str, Domain] = {"topk": Range(1, 1 << 20), "ordered": FLAG, "return_selected": FLAG}
SPECS: dict[str, dict[str, Domain]] = {
    "quantize_index_query": {
        "index": FORMATS,
        "num_heads": Range(1, 128),
        "weights_dtype": FLOAT,
        "weight_scale": Range(0, 1 << 16),
        "hadamard": FLAG,
    },
    "store_index_keys": {"index": FORMATS, "dump_slot": Range(-1, 1 << 40)},
    "indexer_logits": SCORED,
    "indexer_topk": SCORED | SELECTED | {"emit": OneOf(("local", "slot"))},
    "topk_select": SELECTED | DCP | {"score": FLOAT, "scores_dtype": FLOAT, "has_row_start": FLAG},
}
TENSORS: dict[str, dict[str, TensorCap]] = {
    "quantize_index_query": dict.fromkeys(("q", "weights"), ELEMENT),
    "store_index_keys": {"k": ELEMENT, "cache": PAGES},
    "indexer_logits": {"q": ELEMENT, "q_scale": ELEMENT, "weights": ELEMENT, "cache": PAGES},
    "topk_select": {"scores": ELEMENT},
}
TENSORS["indexer_topk"] = TENSORS["indexer_logits"]
SIZES = {
    "indexer_topk": "kimi_hal.triton.sizes:indexer_topk",
    "topk_select": "kimi_hal.triton.sizes:topk_select",
}


def indexer(arch: tuple[str, ...]) -> tuple[Implementation, ...]:
    """Return the family's portable implementations for these architectures."""
    return tuple(_implementation(operator, arch) for operator in SPECS)


def _implementation(operator: str, arch: tuple[str, ...]) -> Implementation:
    module = "topk_merge" if operator == "topk_select" else "indexer"
    return Implementation(
        operator=operator,
        name="triton",
        build=f"kimi_hal.triton.{module}:build_{operator}",
        compile=f"kimi_hal.triton.{module}_kernels:{operator}",
        capabilities=(
            Capability(
                arch=arch,
                spec=SPECS[operator],
                tensors=TENSORS[operator],
                properties=ROW,
                requires=REQUIRES,
            ),
        ),
        preferences=LAST,
        size=SIZES.get(operator),
        execution=EXECUTION,
        source=SOURCE,
    )


SOURCE = tuple(
    f"kimi_hal/triton/{name}.py"
    for name in (
        "flags",
        "indexer",
        "index_pages",
        "index_quantisation",
        "index_scores",
        "minifloat",
        "order",
        "selection",
        "shards",
        "sizes",
        "topk_merge",
    )
)
