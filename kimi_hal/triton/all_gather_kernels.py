"""The code of the portable gather, for rows of an FP8 latent and for heads side by side."""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal.triton import instructions
from kimi_hal.triton.all_gather import lay_out
from kimi_hal.triton.compiling import Launch, described

TYPES = {"parts": "*i64", "out": "*i64"}
HOME: dict[str, Any] = {"WORLD": 8, "INTERLEAVE": 1}
#: Name -> constants.
LAUNCHES: dict[str, dict[str, Any]] = {
    "token-order": HOME | {"TOKENS": True, "ROWS": 32, "COLUMNS": 128},
    "last-dim": HOME | {"TOKENS": False, "ROWS": 4, "COLUMNS": 1024},
}


def all_gather(target: Target) -> tuple[Kernel, ...]:
    """Return the copy of received bytes into both layouts that are not the message's own."""
    return tuple(
        described(
            name, Launch(lay_out, TYPES, constants, ("width", "out_stride")), target, expected=[wide(target)]
        )
        for name, constants in LAUNCHES.items()
    )


def wide(target: Target) -> Instruction:
    """Return loads of sixteen bytes a thread, of two words of eight."""
    ptx = r"ld\.global(\.\w+)*\.v2\.b64"
    return Instruction(
        ptx if instructions.cuda(target) else r"(global|buffer)_load_dwordx4",
        "rows are moved sixteen bytes a thread at a time",
    )
