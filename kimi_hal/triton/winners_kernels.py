"""The code of the portable merge: each kernel as it is launched for the model's own sizes over eight ranks."""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import candidates
from kimi_hal.triton import shards, winners
from kimi_hal.triton.compiling import Launch, described
from kimi_hal.triton.protocols import BLOCK, PLACED, SHORT, STEP

DIMS = DCP(world=8, rank=3)
OWNER = {"WORLD": 8, "RANK": 3, "INTERLEAVE": 1}
HOME = {"WORLD": 8, "INTERLEAVE": 1}
CONTEXT, SEGMENTS = candidates.CONTEXT, candidates.segments(DIMS)
NAMES = ("indices", "row_len", "ordinals", "positions", "cut", "bound", "wanted", "needed", "listed", "keys")
TYPES = dict.fromkeys((*NAMES, "number", "message", "messages", "again", "out"), "*i32") | {"scores": "*bf16"}
NARROW = TYPES | {"ordinals": "*i16"}
STRIDES = (
    "scores_row",
    "indices_row",
    "ordinals_row",
    "ordinals_rank",
    "positions_row",
    "positions_rank",
    "listed_row",
    "plane_row",
    "plane_rank",
    "out_row",
)
OFFER: dict[str, Any] = {"LOW": 16, "BLOCK": 1024, **shards.constants(DIMS)}
CUT: dict[str, Any] = {"FLIPPED": False, "BOUND": True, "NARROW": False, "LOW": 16}
TIES: dict[str, Any] = CUT | {"FLIPPED": True, "LOW": 0}
LIST: dict[str, Any] = {
    "EVERY": False,
    "TIED": False,
    "KEYS": False,
    "OWNED": False,
    "NARROW": False,
    **OWNER,
}
ORDER: dict[str, Any] = {"SORTED": False, "BLOCK": PLACED, "STEP": STEP}
#: Name -> kernel, warps, and its constants.
LAUNCHES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "offer": (winners.offer, 4, OFFER | {"CONTEXT": 0, "GLOBAL": True, "NARROW": False}),
    "offer-scores": (winners.offer, 4, OFFER | {"CONTEXT": 0, "GLOBAL": True, "NARROW": True}),
    "offer-compact": (winners.offer, 4, OFFER | {"CONTEXT": CONTEXT, "GLOBAL": False, "NARROW": False}),
    "cut": (winners.cut_short, 16, CUT | {"BLOCK": SHORT}),
    "cut-compact": (winners.cut_short, 8, CUT | {"BLOCK": 4096}),
    "cut-float32": (winners.cut_short, 16, CUT | {"BLOCK": SHORT, "LOW": 0}),
    "cut-scores": (winners.cut_short, 16, CUT | {"BLOCK": SHORT, "BOUND": False, "NARROW": True}),
    "cut-ties": (winners.cut_short, 4, TIES | {"BLOCK": 1024}),
    "cut-long": (winners.cut_long, 8, CUT | {"BLOCK": BLOCK}),
    "cut-long-ties": (winners.cut_long, 8, TIES | {"BLOCK": BLOCK}),
    "ties": (winners.ties, 4, {"NARROW": True, "BLOCK": 2048}),
    "list": (winners.list_winners, 4, LIST | {"BLOCK": BLOCK}),
    "list-best": (winners.list_winners, 4, LIST | {"KEYS": True, "BLOCK": 2048}),
    "list-scores": (winners.list_winners, 4, LIST | {"NARROW": True, "BLOCK": 2048}),
    "ascend": (winners.ascend, 4, ORDER | HOME | {"LOCAL": True}),
    "pack": (winners.pack, 4, ORDER | {"SEGMENTS": SEGMENTS}),
    "unpack": (winners.unpack, 4, HOME | {"SEGMENTS": SEGMENTS, "BLOCK": 512}),
    "undecided": (winners.undecided, 4, {"CONTEXT": CONTEXT, "SEGMENTS": SEGMENTS, "BLOCK": 512}),
}
#: AMD divides integers by a float32 reciprocal and corrects the quotient: hence its products and conversions.
NO_FLOATS = Instruction(
    r"(add|sub|mul|fma)\S*\.f(16|32|64)|cvt\S*\.f32\.[su]|v_(pk_)?(add|sub|fma|fmac|mac)_f|v_cvt_f32_i",
    "scores become integers by their bits: a position beyond 2^24 is no float32",
)


def topk_merge(target: Target) -> tuple[Kernel, ...]:
    """Return everything that the three protocols launch."""
    return tuple(
        described(name, _launch(kernel, warps, constants), target, forbidden=[NO_FLOATS])
        for name, (kernel, warps, constants) in LAUNCHES.items()
    )


def _launch(kernel: Any, warps: int, constants: dict[str, Any]) -> Launch:
    types = NARROW if constants.get("NARROW") or kernel is winners.ties else TYPES
    return Launch(kernel, types, constants, tuple(n for n in STRIDES if n in kernel.arg_names), warps)
