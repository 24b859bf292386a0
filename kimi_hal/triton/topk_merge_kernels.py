"""The code of the portable selection: each kernel as it is launched for the model's own sizes."""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import Kernel, Target
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.triton import instructions, selection, shards
from kimi_hal.triton.compiling import Launch, described

TYPES = {
    "scores": "*fp32",
    "row_len": "*i32",
    "row_start": "*i32",
    "row_req": "*i32",
    "out": "*i32",
    "scores_out": "*fp32",
    "block_table": "*i32",
    "scratch": "*i32",
}
STRIDES = ("out_row", "scores_row", "scratch_row", "span", "unit")
#: Name -> kernel, warps, constants of its own, and whether it reads whole rows of scores.
LAUNCHES: dict[str, tuple[Any, int, dict[str, Any], bool]] = {
    "short": (selection.select_short, 8, {"BLOCK": 8192, "HALVINGS": 8}, True),
    "maxima": (selection.group_maxima, 4, {"GROUPS": 128, "STEPS": 32}, True),
    "threshold": (selection.group_threshold, 4, {}, False),
    "collect": (selection.collect, 8, {"BLOCK": 16384, "HALVINGS": 9, "SINGLE": True}, True),
    "long": (selection.select_long, 8, {"BLOCK": 4096, "HALVINGS": 7}, False),
}
#: With windows of columns, rows of several programs.
WINDOWS = {"BLOCK": 16384, "HALVINGS": 9, "SINGLE": False, "HAS_START": True}


def topk_select(target: Target) -> tuple[Kernel, ...]:
    """Return the selection from a tensor of scores, by windows of columns too."""
    spec = TopKSpec(return_selected=True)
    windows = described("collect-windows", _launch(selection.collect, 8, spec, **WINDOWS), target)
    return (*selection_kernels(spec, target), windows)


def selection_kernels(spec: TopKSpec | IndexerTopKSpec, target: Target) -> tuple[Kernel, ...]:
    """Return the kernels that select under a Spec, from short and long rows."""
    return tuple(
        described(
            name,
            _launch(kernel, warps, spec, **constants),
            target,
            expected=[instructions.wide_loads(target)] if rows else [],
        )
        for name, (kernel, warps, constants, rows) in LAUNCHES.items()
    )


def _launch(kernel: Any, warps: int, spec: Any, **constants: Any) -> Launch:
    """Return a launch; constants that the kernel does not have are left out."""
    paged = isinstance(spec, IndexerTopKSpec)
    rounded = spec.score == "bfloat16"
    known = {
        "ROUND": rounded,
        "LOW": 16 if rounded else 0,
        "COARSE": 16 if rounded else 8,
        "HAS_START": False,
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
    return Launch(kernel, TYPES, {n: v for n, v in known.items() if n in kernel.arg_names}, STRIDES, warps)
