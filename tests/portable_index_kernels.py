"""The kernels of the indexer family and of the selection as they are launched for the model's own sizes."""

from __future__ import annotations

from typing import Any

from compiled import Kernel

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.triton import index_pages, index_quantisation, index_scores, selection, shards
from kimi_hal.triton.indexer import CONVERTED, HEADS, KEYS, STAGES, WIDE, WIDE_HEADS, WIDE_KEYS, WIDE_STAGES

FP8, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
SHUFFLED, GFX950 = "index.fp8.e4m3fnuz.f32.shuffled.page64", "index.mxfp4.gfx950.page64"
#: PPU architectures compile from these of CUDA.
ARCHITECTURES = {"80": "ppu_10", "89": "ppu_15", "90": "sm_90", "100": "sm_100"}

SCORED = {
    "q": "*u8",
    "q_scale": "*u8",
    "weights": "*fp32",
    "cache": "*u8",
    "block_table": "*i32",
    "row_req": "*i32",
    "row_len": "*i32",
    "out": "*fp32",
}
SELECTED = {
    "scores": "*fp32",
    "row_len": "*i32",
    "row_start": "*i32",
    "row_req": "*i32",
    "out": "*i32",
    "scores_out": "*fp32",
    "block_table": "*i32",
    "scratch": "*i32",
}
ROWS = (
    "cache_page",
    "q_row",
    "q_head",
    "out_row",
    "scores_row",
    "scratch_row",
    "k_row",
    "span",
    "unit",
)


def scores(name: str, arch: str, rows: int, **fields: Any) -> Kernel:
    """Return the scores of ``rows`` rows together, balanced for one row."""
    fmt = formats.index(name)
    wide = rows * 32 > HEADS
    constants = {
        "H": 32,
        "HP": 32,
        "BM": rows,
        "BN": WIDE_KEYS if wide else KEYS,
        "STAGES": WIDE_STAGES if wide else STAGES,
        "NATIVE": arch in CONVERTED.get(fmt.element, ()),
        **index_pages.constants(fmt),
        **shards.constants(IndexerSpec(index=name, **fields).dcp),
    }
    if rows > 1:
        return Kernel(index_scores.scores_by_place, SCORED, constants, ROWS)
    return Kernel(index_scores.scores_balanced, SCORED, constants | {"BLOCKS": 64}, ROWS)


def select(kernel: Any, warps: int, spec: Any, start: bool = False, **constants: Any) -> Kernel:
    """Return a kernel of the selection; names that it does not have are left out."""
    paged = isinstance(spec, IndexerTopKSpec)
    rounded = spec.score == "bfloat16"
    known = {
        "ROUND": rounded,
        "LOW": 16 if rounded else 0,
        "COARSE": 16 if rounded else 8,
        "HAS_START": start,
        "HAS_REQUEST": paged,
        "PAGE": 64,
        "SLOTS": paged and spec.emit == "slot",
        "SELECTED": spec.return_selected,
        "G": 4096,
        "CAP": 8192,
        "CAP_HALVINGS": 8,
        "CHUNKS": 64,
        "CHUNK_HALVINGS": 6,
        **shards.constants(spec.dcp),
        **constants,
    }
    return Kernel(kernel, SELECTED, {n: v for n, v in known.items() if n in kernel.arg_names}, ROWS, warps)


def kernels(backend: str, arch: str) -> dict[str, Kernel]:
    """Return what the portable implementations launch on one target."""
    name = ARCHITECTURES.get(arch, arch)
    queries = {"q": "*bf16", "weights": "*bf16", "q_out": "*u8", "scale_out": "*u8", "weights_out": "*fp32"}
    sizes: dict[str, Any] = {"D": 128, "ROWS": 16}
    plain = IndexerTopKSpec(index=FP8, return_selected=True)
    slots = IndexerTopKSpec(index=FP8, emit="slot", score="bfloat16")
    found = {
        "decode": scores(FP8, name, 1, dcp=DCP(world=8, rank=3)),
        "verify": scores(FP8, name, HEADS // 32),
        "shuffled": scores(SHUFFLED, name, 1),
        "mxfp4": scores(MXFP4, name, 1),
        "quantize": Kernel(
            index_quantisation.quantize,
            queries | {"weight_scale": "fp32"},
            sizes | {"ELEMENT": "e4m3fn", "HADAMARD": True, "STAGES": 7},
            ROWS,
        ),
        "quantize mxfp4": Kernel(
            index_quantisation.quantize,
            queries | {"weight_scale": "fp32"},
            sizes | {"ELEMENT": "e2m1", "HADAMARD": False, "STAGES": 7},
            ROWS,
        ),
        "short": select(selection.select_short, 8, plain, BLOCK=8192, HALVINGS=8),
        "maxima": select(selection.group_maxima, 4, plain, GROUPS=128, STEPS=32),
        "threshold": select(selection.group_threshold, 4, plain),
        "collect": select(selection.collect, 8, plain, BLOCK=16384, HALVINGS=9, SINGLE=True),
        "long": select(selection.select_long, 8, plain, BLOCK=4096, HALVINGS=7),
    }
    for layout in (FP8, GFX950):
        types = {"k": "*bf16", "slots": "*i64", "cache": "*u8", "capacity": "i64"}
        constants = index_pages.constants(formats.index(layout))
        found[f"store {layout}"] = Kernel(index_quantisation.store, types, constants | sizes, ROWS)
    if name in WIDE:
        found["prefill"] = scores(FP8, name, WIDE_HEADS // 32)
    if arch == "90":  # the variants of which one target tells enough
        found["short slots"] = select(selection.select_short, 16, slots, BLOCK=32768, HALVINGS=10)
        found["long slots"] = select(selection.select_long, 8, slots, BLOCK=4096, HALVINGS=7)
        window = {"start": True, "BLOCK": 16384, "HALVINGS": 9, "SINGLE": False}
        found["collect windows"] = select(selection.collect, 8, plain, **window)
    return found
