"""Where a byte of an index key stands in its page, inside kernels, for every index format."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kimi_hal.formats.index_keys import IndexFormat


@triton.jit
def element_offset(token, byte, BYTES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the offset inside a page of element byte ``byte`` of ``token``."""
    if TILE == 1:
        offset = token * BYTES + byte
    else:
        in_run = (byte // CHUNK * TILE + token % TILE) * CHUNK + byte % CHUNK
        offset = token // TILE * (TILE * BYTES) + in_run
    return offset


@triton.jit
def scale_offset(
    token, byte, PAGE: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr
):
    """Return the offset inside a page of scale byte ``byte`` (0 to 3) of ``token``."""
    in_run = (byte % LANES * TILE + token % TILE) * (4 // LANES) + byte // LANES
    return PAGE * BYTES + token // TILE * (TILE * 4) + in_run


def constants(fmt: IndexFormat) -> dict[str, Any]:
    """Return the kernels' constants of a format."""
    return {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "PAGE": fmt.page,
        "BYTES": fmt.element_bytes,
        "TILE": fmt.tile_tokens,
        "CHUNK": fmt.tile_bytes or fmt.element_bytes,
        "LANES": fmt.scale_lanes,
    }
