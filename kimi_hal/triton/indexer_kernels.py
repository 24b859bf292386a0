"""The code of the portable indexer, as it is launched for the model's own sizes, and what it must hold."""

from __future__ import annotations

from typing import Any

from kimi_hal import formats
from kimi_hal.dispatch.contract import Kernel, Target
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.triton import index_pages, index_quantisation, index_scores, instructions, shards
from kimi_hal.triton.compiling import Launch, described
from kimi_hal.triton.indexer import CONVERTED, HEADS, KEYS, STAGES, WIDE, WIDE_HEADS, WIDE_KEYS, WIDE_STAGES
from kimi_hal.triton.topk_merge_kernels import selection_kernels

FP8, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
SHUFFLED, GFX950 = "index.fp8.e4m3fnuz.f32.shuffled.page64", "index.mxfp4.gfx950.page64"
TYPES = {
    "q": "*u8",
    "q_scale": "*u8",
    "weights": "*fp32",
    "cache": "*u8",
    "block_table": "*i32",
    "row_req": "*i32",
    "row_len": "*i32",
    "out": "*fp32",
}
STRIDES = ("cache_page", "q_row", "q_head", "out_row", "k_row", "span", "unit")
SIZES = {"D": 128, "ROWS": 16}
#: Bytes a thread that an assembler keeps in memory at most, over all targets (Triton 3.9), and some room.
SPILLED = {"verify": 256, "prefill": 256, "shuffled": 64}


def quantize_index_query(target: Target) -> tuple[Kernel, ...]:
    """Return the quantisation of queries to FP8 and MXFP4."""
    types = {"q": "*bf16", "weights": "*bf16", "q_out": "*u8", "scale_out": "*u8", "weights_out": "*fp32"}
    types |= {"weight_scale": "fp32"}
    elements = {"fp8": ("e4m3fn", True), "mxfp4": ("e2m1", False)}
    return tuple(
        described(
            name,
            Launch(
                index_quantisation.quantize,
                types,
                SIZES | {"ELEMENT": element, "HADAMARD": hadamard, "STAGES": 7},
                STRIDES,
            ),
            target,
            expected=[instructions.exact_division(target)],
            forbidden=[instructions.NO_APPROXIMATE_DIVISION],
        )
        for name, (element, hadamard) in elements.items()
    )


def store_index_keys(target: Target) -> tuple[Kernel, ...]:
    """Return the store of FP8 keys, and of MXFP4 keys in an order of their own."""
    types = {"k": "*bf16", "slots": "*i64", "cache": "*u8", "capacity": "i64"}
    return tuple(
        described(
            name,
            Launch(
                index_quantisation.store,
                types,
                index_pages.constants(formats.index(layout)) | SIZES,
                STRIDES,
            ),
            target,
            # MX scales are powers of two, made by exponent arithmetic
            expected=[instructions.exact_division(target)] if layout == FP8 else [],
            forbidden=[instructions.NO_APPROXIMATE_DIVISION],
        )
        for name, layout in (("fp8", FP8), ("mxfp4-gfx950", GFX950))
    )


def indexer_logits(target: Target) -> tuple[Kernel, ...]:
    """Return scores of one row, of rows together, and of other formats; in prefill where that is its own cut."""
    found = [
        _scored("decode", FP8, 1, target, loads=True, dcp=DCP(world=8, rank=3)),
        _scored("verify", FP8, HEADS // 32, target),
        _scored("shuffled", SHUFFLED, 1, target),
        _scored("mxfp4", MXFP4, 1, target),
    ]
    if target.arch in WIDE:
        found.append(_scored("prefill", FP8, WIDE_HEADS // 32, target))
    return tuple(found)


def indexer_topk(target: Target) -> tuple[Kernel, ...]:
    """Return scores and the selection that emits slots."""
    spec = IndexerTopKSpec(index=FP8, emit="slot", score="bfloat16")
    return (_scored("scores", FP8, 1, target), *selection_kernels(spec, target))


def _scored(
    name: str, layout: str, rows: int, target: Target, *, loads: bool = False, **fields: Any
) -> Kernel:
    """Describe the scores of ``rows`` rows together."""
    fmt = formats.index(layout)
    fp8 = fmt.element != "e2m1"
    expected = [instructions.matrix(target, "f16" if fp8 else "bf16")]
    forbidden = [instructions.NO_FP8_PRODUCTS]
    if fp8:
        wanted, unwanted = instructions.conversion(target, fmt.element)
        expected, forbidden = [*expected, *wanted], [*forbidden, *unwanted]
    if loads:
        expected.append(
            instructions.ASYNCHRONOUS if instructions.cuda(target) else instructions.wide_loads(target)
        )
    launch = _scores(layout, rows, target.arch, **fields)
    return described(name, launch, target, expected, forbidden, SPILLED.get(name, 0))


def _scores(layout: str, rows: int, arch: str, **fields: Any) -> Launch:
    """Return the launch for ``rows`` rows together; for one row keys are shared out evenly."""
    fmt = formats.index(layout)
    wide = rows * 32 > HEADS
    constants = {
        "H": 32,
        "HP": 32,
        "BM": rows,
        "BN": WIDE_KEYS if wide else KEYS,
        "STAGES": WIDE_STAGES if wide else STAGES,
        "NATIVE": arch in CONVERTED.get(fmt.element, ()),
        **index_pages.constants(fmt),
        **shards.constants(IndexerSpec(index=layout, **fields).dcp),
    }
    if rows > 1:
        return Launch(index_scores.scores_by_place, TYPES, constants, STRIDES)
    return Launch(index_scores.scores_balanced, TYPES, constants | {"BLOCKS": 64}, STRIDES)
