"""This project's CUDA attention over latents on an H200, beside FlashMLA, the portable kernels and the gather floor.

Predictions, written before the first run. A tile of 64 keys is about 900 instructions a warp over FP8 and 1,500 over
NVFP4, two blocks of four warps a multiprocessor; 15.5 tiles a multiprocessor at 64 rows. Arithmetic alone: 8 and 13 µs;
the gather alone 24 and 20. FP8, 12 heads: 8, 12, 22, 35, 60 and 140 µs at 1, 8, 32, 64, 128 and 320 rows; NVFP4 the
same within a tenth. 96 heads are six blocks that gather the same rows: 64 rows in 110 µs. Prefill of 4,096 rows and 12
heads in 1.2 ms.

``python -m benchmarks nvidia_sparse_mla`` needs an H200. FlashMLA is timed where sgl-flash-mla 1.0.0 is installed: it
takes 64 or 128 heads and the 656-byte record, so 12 heads are padded to 64, and 96 to 128.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import sparse_mla as portable
from benchmarks.indexer import copy_rate, microseconds
from benchmarks.record import keep
from benchmarks.sparse_mla import CONTEXT, DECODES, DEVICE, FP8, NVFP4, PAGE, SCALE, TOKENS, TOPK
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import sparse_mla as reference

PREFILLS = (1024, 4096)


def built(spec: SparseMLASpec, rows: int) -> Callable[..., Any]:
    """Return the run function of the CUDA implementation."""
    from kimi_hal_nvidia.sparse_mla import build_sparse_mla

    limits = Limits(max_rows=rows, max_reqs=rows)
    context = BuildContext(
        operator="sparse_mla",
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch="sm_90",
        sizes=Sizes(),
        group=None,
        persistent=None,
        check=check.compiled(OPERATORS["sparse_mla"], spec, limits, device=DEVICE),
        settings={},
    )
    return build_sparse_mla(context)


def attend(name: str, heads: int, rows: int, parts: int = 0) -> dict[str, Any]:
    """Time attention of a plan for ``rows`` rows, compared with the reference in float64 on two of them."""
    import kimi_hal_nvidia.sparse_mla as own

    spec = SparseMLASpec(num_heads=heads, latent=name, page=PAGE, topk=TOPK)
    chosen = own.parts_of
    if parts:
        own.parts_of = lambda spec, limits: parts
    try:
        run = built(spec, rows)
    finally:
        own.parts_of = chosen
    q, cache, indices = portable.queries(rows, heads), portable.cache_of(name), portable.selection(rows)
    scale = torch.tensor([SCALE], device=DEVICE) if name == FP8 else None
    out, lse = run(q, cache, indices, scale)
    few = min(2, rows)
    exact, exact_lse = reference.sparse_mla(spec, q[:few], cache, indices[:few], scale, dtype=torch.float64)
    wrong = portable.relative(out[:few], exact) / portable.relative(exact.bfloat16(), exact)
    off = float((lse[:few] - exact_lse).abs().max())
    took = microseconds(lambda: run(q, cache, indices, scale, out=out, lse_out=lse), 25 if rows < 1024 else 7)
    return {"us": round(took, 1), "error": round(wrong, 3), "lse": off}


class FlashMLA:
    """FlashMLA's kernels of sgl-flash-mla 1.0.0 over the same tokens as 656-byte records and as bf16."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("flash_mla")
        folder = os.environ.get("FLASH_MLA") or (
            str(Path(spec.origin).parent) if spec and spec.origin else ""
        )
        for path in sorted(glob.glob(f"{folder}/*.so")):
            torch.ops.load_library(path)
        self.ops = torch.ops.flash_mla_legacy
        pages = TOKENS // 64
        record = torch.randint(0, 256, (pages, 64, 1, 656), dtype=torch.uint8, device=DEVICE)
        codes = record[..., :512]
        codes.masked_fill_((codes & 0x7F) == 0x7F, 0)
        record[..., 512:528] = torch.full((4,), SCALE, device=DEVICE).view(torch.uint8)
        record[..., 528:] = torch.randn(pages, 64, 1, 64, device=DEVICE).bfloat16().view(torch.uint8)
        self.record = record.view(torch.float8_e4m3fn)

    def decode(self, heads: int, rows: int) -> float:
        """Return the time of a decode with one row a request."""
        q = torch.randn(rows, 1, heads, 576, device=DEVICE).bfloat16()
        indices = portable.selection(rows)[:, None]
        state: list[Any] = [None, None]

        def run() -> Tensor:
            out, _, *state[:] = self.ops.sparse_decode_fwd(
                q, self.record, indices, None, None, *state, None, None, None, 512, 192**-0.5, None
            )
            return out  # type: ignore[no-any-return]

        run()
        return round(microseconds(run, 25), 1)

    def prefill(self, heads: int, rows: int) -> float:
        """Return the time of a prefill over the bf16 cache."""
        q = torch.randn(rows, heads, 576, device=DEVICE).bfloat16()
        keys = torch.randn(CONTEXT, 1, 576, device=DEVICE).bfloat16()
        indices = torch.randint(0, CONTEXT, (rows, 1, TOPK), dtype=torch.int32, device=DEVICE)
        return round(
            microseconds(
                lambda: self.ops.sparse_prefill_fwd(
                    q, keys, indices, 192**-0.5, 512, None, None, False, True
                ),
                7,
            ),
            1,
        )


def peer(ask: Callable[[], float]) -> float | None:
    """Return a peer's time, or None and the reason on the terminal."""
    try:
        return ask()
    except Exception as error:
        print(f"FlashMLA: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def main() -> None:
    """Measure and keep the figures."""
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_a_second": round(copy_rate()),
    }

    def note(what: str, found: Any) -> None:
        figures[what] = found
        print(what, found, flush=True)

    flash = FlashMLA() if os.environ.get("FLASH_MLA") or importlib.util.find_spec("flash_mla") else None
    for rows in DECODES:
        for name, label in ((FP8, "fp8"), (NVFP4, "nvfp4")):
            note(f"decode {label} 12 heads {rows}", attend(name, 12, rows))
            note(f"floor {label} {rows}", portable.floor(name, rows))
        note(f"decode fp8 96 heads {rows}", attend(FP8, 96, rows))
        note(f"portable fp8 12 heads {rows}", portable.attend(FP8, 12, rows))
        if flash:
            for heads in (64, 128):
                note(f"flashmla {heads} heads {rows}", peer(lambda h=heads, r=rows: flash.decode(h, r)))
    for rows in PREFILLS:
        note(f"prefill fp8 12 heads {rows}", attend(FP8, 12, rows))
        note(f"prefill nvfp4 12 heads {rows}", attend(NVFP4, 12, rows))
        note(f"prefill fp8 96 heads {rows}", attend(FP8, 96, rows))
        if flash:
            for heads in (64, 128):
                note(
                    f"flashmla prefill {heads} heads {rows}",
                    peer(lambda h=heads, r=rows: flash.prefill(h, r)),
                )
    if os.environ.get("SWEEP"):
        for rows in DECODES:
            for parts in (1, 2, 4, 8, 16):
                note(f"sweep fp8 12 heads {rows} parts {parts}", attend(FP8, 12, rows, parts)["us"])
    keep("h200/sparse_mla", figures)


if __name__ == "__main__":
    main()
