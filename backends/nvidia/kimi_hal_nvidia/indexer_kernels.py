"""The code of this backend's own indexer, and what it must hold."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal_nvidia import fp8_sum as sums
from kimi_hal_nvidia.compiling import described
from kimi_hal_nvidia.quantize_query import STEM
from kimi_hal_nvidia.scores import KINDS, RINGS
from kimi_hal_nvidia.topk import CLUSTERS, FORMS

#: Rows of scores are read by vectors of 16 bytes.
WIDE_LOADS = Instruction(r"LDG(STS)?\.E\.(BYPASS\.)?128", "scores are read sixteen bytes a thread at a time")
BULK_COPY = Instruction(r"UBLKCP", "a page of keys is one asynchronous copy")
COPIED = Instruction(r"LDGSTS\.E\.BYPASS\.128", "keys are copied sixteen bytes a thread, past the registers")
CLUSTER = Instruction(r"UCGABAR_ARV", "blocks of a cluster meet before they read each other's candidates")
FP8_PRODUCTS = Instruction(r"QGMMA|QMMA|UTCQMMA", "FP8 products are added with few bits")
TO_FP8 = Instruction(r"F2FP\.SATFINITE\.E4M3", "FP8 codes are made by instruction")
CONVERTED = Instruction(r"F2FP\.F16\.E4M3", "FP8 keys are converted by instruction")
#: Heads of the model's indexer.
HEADS = 32
#: Bytes a thread that registers do not suffice for, at most: MXFP4 scores on Blackwell, where a warp multiplies. On
#: Hopper they suffice.
SPILLED = 128


def products(target: Target, element: str) -> Instruction:
    """Return the products of keys, added exactly or in float32: of a warpgroup on Hopper, of a warp elsewhere."""
    hopper = target.arch == "sm_90"
    if element == "fp4":
        product = r"IGMMA\.64x\d+x32\.U8\.S8" if hopper else r"IMMA\.16832\.U8\.S8"
        return Instruction(product, "MXFP4 numbers are multiplied and added as integers")
    product = r"HGMMA\.64x\d+x16\.F32" if hopper else r"HMMA\.16816\.F32"
    return Instruction(product, "keys are multiplied as float16 and added in float32")


def quantize_index_query(target: Target) -> tuple[Kernel, ...]:
    """Return the kernels of both elements."""
    return (
        described(STEM, "quantize_fp8", target, expected=[TO_FP8]),
        described(STEM, "quantize_fp4", target),
    )


def topk_select(target: Target) -> tuple[Kernel, ...]:
    """Return the cuts of selection, of float32 scores."""
    return tuple(
        described(
            stem,
            f"{what}_float32",
            target,
            expected=[WIDE_LOADS, *([CLUSTER] if what in CLUSTERS else [])],
            spilled=SPILLED,
            shared=shared,
        )
        for what, (stem, _, shared) in FORMS.items()
    )


def indexer_logits(target: Target) -> tuple[Kernel, ...]:
    """Return the scores of both elements with the model's heads, by rows that share keys and by all rows."""
    return tuple(
        described(
            f"index_scores_{element}",
            ring.kernel(element, kind),
            target,
            expected=[
                products(target, element),
                BULK_COPY,
                *([CONVERTED] if element == "fp8" else []),
            ],
            forbidden=[FP8_PRODUCTS] if element == "fp8" else [],
            spilled=SPILLED,
            shared=ring.shared(element),
        )
        for element in ("fp8", "fp4")
        for ring in RINGS
        for kind in KINDS
        if ring.heads == HEADS
    )


def indexer_logits_by_sums(target: Target) -> tuple[Kernel, ...]:
    """Return the scores of FP8 keys as they stand, for both numbers of heads and both types of scores."""
    product = Instruction(r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", "FP8 keys are multiplied as they stand")
    return tuple(
        described(
            sums.STEM,
            sums.kernel_name(heads, score),
            target,
            expected=[product, COPIED],
            forbidden=[CONVERTED],
            shared=sums.SHARED,
        )
        for heads in sums.HEADS
        for score in sums.SCORES
    )


def indexer_topk(target: Target) -> tuple[Kernel, ...]:
    """Return what it launches for FP8 keys of long contexts, of a row each; the others are those of its two parts."""
    launched = ("fp8-32x1", "wide-float32")
    return tuple(k for k in (*indexer_logits(target), *topk_select(target)) if k.name in launched)


def indexer_topk_by_sums(target: Target) -> tuple[Kernel, ...]:
    """Return what it launches for many rows of long contexts; the others are those of its two parts."""
    launched = (f"{sums.kernel_name(HEADS, 'float32').replace('_', '-')}", "many-float32")
    return tuple(k for k in (*indexer_logits_by_sums(target), *topk_select(target)) if k.name in launched)
