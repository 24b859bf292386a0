"""Claims of this backend's own indexer and selection, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, Preference, TensorCap
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, FLAG, FLOAT, ROW
from kimi_hal_nvidia.claim_terms import REQUIRES, RUN

#: From so many rows of a request on it is the fastest of those that round so, be the context as short as it may. With
#: fewer it multiplies more than there is, which pays where there are many requests or keys: tables of measurements say.
MANY = {"rows_per_req": Range(24, 1 << 20)}
SUMMED = (
    Preference(rank=-20),
    Preference(
        rank=1,
        limits=MANY,
        measured="benchmarks/results/h200/fp8_sum.json; benchmarks/results/h200_conformance_nvidia.json",
    ),
)
#: Pages are copied as they are, in pieces of 16 bytes.
PAGES = TensorCap(align=16)
#: Page orders in which a key's bytes stand together.
FP8 = (
    "index.fp8.e4m3fn.f32.page64",
    "index.fp8.e4m3fn.pow2.page64",
    "index.fp8.e4m3fn.ue8m0x4.page64",
)
FORMATS = OneOf((*FP8, "index.mxfp4.page64"))
SCORED: dict[str, Domain] = {
    "index": FORMATS,
    "num_heads": Range(1, 64),
    "score": FLOAT,
    "weights_dtype": FLOAT,
    **DCP,
}
#: Candidates of a row have to stand in a block's shared memory.
SELECTED: dict[str, Domain] = {"topk": Range(1, 2048), "ordered": FLAG, "return_selected": FLAG}
SPECS: dict[str, dict[str, Domain]] = {
    "quantize_index_query": {
        "index": FORMATS,
        "num_heads": Range(1, 128),
        "weights_dtype": FLOAT,
        "weight_scale": Range(0, 1 << 16),
        "hadamard": FLAG,
    },
    "indexer_logits": SCORED,
    "indexer_topk": SCORED | SELECTED | {"emit": OneOf(("local", "slot"))},
    "topk_select": SELECTED | DCP | {"score": FLOAT, "scores_dtype": FLOAT, "has_row_start": FLAG},
}
OPERANDS = {"q": ELEMENT, "q_scale": ELEMENT, "weights": ELEMENT, "cache": PAGES}
TENSORS: dict[str, dict[str, TensorCap]] = {
    "quantize_index_query": {"q": ELEMENT, "weights": ELEMENT},
    "indexer_logits": OPERANDS,
    "indexer_topk": OPERANDS,
    "topk_select": {"scores": ELEMENT},
}
#: Operators whose scores are shared out by words that a plan keeps.
SCORING = ("indexer_logits", "indexer_topk")
MODULES = {
    "quantize_index_query": "quantize_query",
    "indexer_logits": "scores",
    "indexer_topk": "indexer",
    "topk_select": "topk",
}
SOURCE = tuple(
    f"kimi_hal_nvidia/{name}"
    for name in (
        "cubins/index_scores_*",
        "cubins/quantize_query*",
        "cubins/topk_*",
        "cubins.py",
        "driver.py",
        "fp8_sum.py",
        "h200.py",
        "indexer.py",
        "layouts.py",
        "parameters.py",
        "quantize_query.py",
        "scores.py",
        "sizes.py",
        "streams.py",
        "tickets.py",
        "topk.py",
    )
)


def _implementation(operator: str, name: str) -> Implementation:
    arch, execution, preferences = RUN[name]
    return Implementation(
        operator=operator,
        name=name,
        build=f"kimi_hal_nvidia.{MODULES[operator]}:build_{operator}",
        capabilities=(
            Capability(
                arch=arch,
                spec=SPECS[operator],
                tensors=TENSORS[operator],
                properties=ROW,
                requires=REQUIRES,
            ),
        ),
        preferences=preferences,
        size=f"kimi_hal_nvidia.sizes:{operator}" if operator in SCORING else None,
        execution=(execution,),
        source=SOURCE,
        compile=f"kimi_hal_nvidia.indexer_kernels:{operator}",
    )


def _summed(operator: str) -> Implementation:
    """Return FP8 keys by FP8 products, which Hopper adds with 13 fraction bits: where a Spec admits that."""
    return Implementation(
        operator=operator,
        name="cuda_fp8_sum",
        build=f"kimi_hal_nvidia.fp8_sum:build_{operator}",
        capabilities=(
            Capability(
                arch=("sm_90",),
                spec=SPECS[operator] | {"index": OneOf(FP8)},
                tensors=OPERANDS,
                properties=ROW,
                requires=REQUIRES,
            ),
        ),
        preferences=SUMMED,
        numerics=("logits=fp8_sum",),
        size=f"kimi_hal_nvidia.sizes:{operator}" if operator == "indexer_topk" else None,
        source=SOURCE,
        compile=f"kimi_hal_nvidia.indexer_kernels:{operator}_by_sums",
    )


INDEXER = (
    *(_summed(operator) for operator in SCORING),
    *(_implementation(operator, name) for name in RUN for operator in SPECS),
)
