"""This project's CUDA attention over latents on an H200, beside FlashMLA and the gather floor.

Predictions, written before the first run of this form (warpgroups that take tiles by themselves, keys asked for by
warps of their own). A tile of 64 keys is 1,070 instructions a warp over FP8 for 16 heads, four warps; two tiles are
computed at a time, so .6 µs a tile and multiprocessor, half of what the gather takes: memory is all that is left, with
3 µs before the first tile and 3 after the last. FP8, 12 heads: 12, 15, 26, 38, 56 and 135 µs at 1, 8, 32, 64, 128 and
320 rows; NVFP4 11.5, 14, 22, 30, 44 and 100. 96 heads are three blocks of 32 that decode the same keys: 70, 120 and
290 µs at 64, 128 and 320 rows. Prefill of 4,096 rows: 1.3 ms for 12 heads, 2.3 for 96.

``python -m benchmarks nvidia_sparse_mla`` needs an H200. FlashMLA is timed where sgl-flash-mla 1.0.0 is installed, or
where ``FLASH_MLA`` names its folder: it takes 64 or 128 heads and the 656-byte record, so 12 heads are padded to 64,
and 96 to 128; its prefill reads a bf16 cache. vLLM's build of it also has a prefill of 16 heads: ``VLLM_FLASH_MLA``
names its ``_flashmla_C.abi3.so``.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kimi_hal as hal
from benchmarks import sparse_mla as portable
from benchmarks.indexer import copy_rate, microseconds
from benchmarks.nvidia_indexer import cell
from benchmarks.record import keep, keep_cells
from benchmarks.sparse_mla import CONTEXT, DECODES, DEVICE, FP8, NVFP4, PAGE, SCALE, TOKENS, TOPK
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import sparse_mla as reference

PREFILLS = (1024, 4096, 16384)


def built(spec: SparseMLASpec, rows: int, way: dict[str, int] | None = None) -> Callable[..., Any]:
    """Return the run function of the CUDA implementation: as it is planned, or cut in a given way."""
    from kimi_hal_nvidia import sizes
    from kimi_hal_nvidia.sparse_mla import build_sparse_mla

    limits = Limits(max_rows=rows, max_reqs=rows)
    if way is None:
        return hal.plan("sparse_mla", spec, limits, device=DEVICE, implementation="nvidia.cuda").run
    asked = sizes.sparse_mla(spec, limits, "sm_90")
    context = BuildContext(
        operator="sparse_mla",
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch="sm_90",
        sizes=asked,
        group=None,
        persistent=torch.zeros(asked.persistent, dtype=torch.uint8, device=DEVICE),
        check=check.compiled(OPERATORS["sparse_mla"], spec, limits, device=DEVICE),
        settings={},
        configuration=way,
    )
    return build_sparse_mla(context)


def chosen(rows: int) -> Tensor:
    """Return physical slots: a decode's requests have their own tokens, a prefill's rows share theirs."""
    if rows not in PREFILLS:
        return portable.selection(rows)
    return torch.randint(0, CONTEXT, (rows, TOPK), dtype=torch.int32, device=DEVICE)


def attend(name: str, heads: int, rows: int, way: dict[str, int] | None = None) -> dict[str, Any]:
    """Time attention of a plan for ``rows`` rows, compared with the reference in float64 on two of them."""
    spec = SparseMLASpec(num_heads=heads, latent=name, page=PAGE, topk=TOPK)
    run = built(spec, rows, way)
    q, cache, indices = portable.queries(rows, heads), portable.cache_of(name), chosen(rows)
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
        self.narrow = os.environ.get("VLLM_FLASH_MLA")
        if self.narrow:
            torch.ops.load_library(self.narrow)
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

        def run() -> Any:
            given = (q, keys, indices, 192**-0.5, 512, None, None)
            if heads < 64:
                return torch.ops._flashmla_C.sparse_prefill_fwd(*given, None)
            return self.ops.sparse_prefill_fwd(*given, False, True)

        return round(microseconds(run, 7), 1)


def peer(ask: Callable[[], float]) -> float | None:
    """Return a peer's time, or None and the reason on the terminal."""
    try:
        return ask()
    except Exception as error:
        print(f"FlashMLA: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def shares(figures: dict[str, Any], rate: float) -> Iterator[dict[str, Any]]:
    """Return the cells of what was measured."""

    def one(
        ours: str, what: str, size: int, theirs: str, other: str, goal: float
    ) -> Iterator[dict[str, Any]]:
        if ours in figures and figures.get(theirs):
            rows, mine, its = int(ours.split()[-1]), figures[ours]["us"], figures[theirs]
            beside = (other, its["us"] if isinstance(its, dict) else its)
            yield cell("sparse_mla", what, mine, beside, goal, rows * TOPK * size / mine * 1e6 / rate)

    for r in DECODES:
        fp8, nvfp4, many = (f"decode {k} heads {r}" for k in ("fp8 12", "nvfp4 12", "fp8 96"))
        goal = 2.5 if r == 1 else 2.2
        padded = "FlashMLA, padded to"
        yield from one(fp8, f"12 heads FP8, {r} rows", 576, f"flashmla 64 heads {r}", f"{padded} 64", goal)
        if r >= 64:
            what = f"12 heads FP8, {r} rows, share of the gather floor"
            yield from one(fp8, what, 576, f"floor fp8 {r}", "gather floor", 0.65)
        yield from one(nvfp4, f"12 heads NVFP4, {r} rows", 352, fp8, "our FP8", 1.0)
        yield from one(many, f"96 heads FP8, {r} rows", 576, f"flashmla 128 heads {r}", f"{padded} 128", 1.2)
    for r in PREFILLS:
        for heads, wide, goal in ((12, 64, 1.8), (12, 16, 1.8), (96, 128, 1.1)):
            beside = ", beside 16 heads" if wide == 16 else ""
            what = f"prefill {heads} heads FP8, {r} rows × 128K{beside}"
            peer = f"flashmla prefill {wide} heads {r}"
            yield from one(
                f"prefill fp8 {heads} heads {r}", what, 576, peer, f"FlashMLA, bf16, padded to {wide}", goal
            )


def sweep(note: Callable[[str, Any], None]) -> None:
    """Time the ways of cutting that a table of measurements would choose from."""
    from kimi_hal_nvidia.attention_plan import configurations

    for heads in (12, 96):
        for rows in DECODES:
            spec = SparseMLASpec(num_heads=heads, latent=FP8, page=PAGE, topk=TOPK)
            for way in configurations(spec, Limits(max_rows=rows, max_reqs=rows), "sm_90"):
                note(f"sweep fp8 {heads} heads {rows} {way}", attend(FP8, heads, rows, way)["us"])


def main() -> None:
    """Measure and keep the figures."""
    rate = copy_rate()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_bytes_a_second": round(rate)}

    def note(what: str, found: Any) -> None:
        figures[what] = found
        print(what, found, flush=True)

    flash = FlashMLA() if os.environ.get("FLASH_MLA") or importlib.util.find_spec("flash_mla") else None
    for rows in DECODES:
        for name, label in ((FP8, "fp8"), (NVFP4, "nvfp4")):
            note(f"decode {label} 12 heads {rows}", attend(name, 12, rows))
            note(f"floor {label} {rows}", portable.floor(name, rows))
            note(f"decode {label} 96 heads {rows}", attend(name, 96, rows))
        if flash:
            for heads in (64, 128):
                note(f"flashmla {heads} heads {rows}", peer(lambda h=heads, r=rows: flash.decode(h, r)))
    for rows in PREFILLS:
        note(f"prefill fp8 12 heads {rows}", attend(FP8, 12, rows))
        note(f"prefill nvfp4 12 heads {rows}", attend(NVFP4, 12, rows))
        note(f"prefill fp8 96 heads {rows}", attend(FP8, 96, rows))
        if flash:
            for heads in (16, 64, 128) if flash.narrow else (64, 128):
                asked = f"flashmla prefill {heads} heads {rows}"
                note(asked, peer(lambda h=heads, r=rows: flash.prefill(h, r)))
    if os.environ.get("SWEEP"):
        sweep(note)
    keep("h200/sparse_mla", figures)
    keep_cells(list(shares(figures, rate)))


if __name__ == "__main__":
    main()
