"""Portable sparse attention over latents on a GPU, beside a textbook kernel and the gather that none can do without.

Predictions for an H200, written before the run (an earlier form of the kernel, without tiles in flight, took 17, 25,
66, 105, 187 and 504 µs at 1, 8, 32, 64, 128 and 320 rows of 12 heads):

* FP8, 12 heads, top 2,048: a tile of 64 keys is 1,600 instructions a warp, two programs a multiprocessor. 14, 19, 45,
  70, 125 and 300 µs. NVFP4 moves 0.6 of the bytes with 1.4 times the arithmetic: about the same.
* 96 heads: three blocks of 32 heads decode the same keys; 64 rows in 300–350 µs.
* prefill of 1,024 rows: 12 heads 0.8 ms, 96 heads 4 ms, and four times that for 4,096 rows.
* probabilities rounded to bfloat16 save a third of the matrix instructions and 5 % of the time.
* merging 8 parts of 64 rows and 12 heads moves 7 MB: 4–5 µs. Storing 4,096 tokens moves 7 MB: 5–6 µs.

``python -m benchmarks sparse_mla`` needs a CUDA device. Times are medians of graph replays with cold caches. What is
timed is compared first with the reference in float64 on two rows. ``floor`` reads the selected rows and adds them,
nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.indexer import copy_rate, microseconds
from benchmarks.record import keep
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.reference import sparse_mla as reference
from kimi_hal.triton import attention, sparse_mla

DEVICE = "cuda"
FP8, NVFP4 = "latent.fp8.e4m3fn.tensor", "latent.nvfp4.352"
TOPK, PAGE, TOKENS = 2048, 64, 1 << 20
DECODES = (1, 8, 32, 64, 128, 320)
PREFILLS, CONTEXT = (1024, 4096), 128 * 1024
SCALE = 0.01
#: Splits and tiles tried for the textbook kernel; its best is kept.
TEXTBOOK = ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2))


@triton.jit
def gather(cache, indices, out, chunk, BYTES: tl.constexpr, KEYS: tl.constexpr):
    """Read a part of a row's keys and add their words."""
    part = tl.program_id(0).to(tl.int64)
    rest: tl.constexpr = 16 if BYTES == 576 else 32
    most: tl.constexpr = 128 if BYTES == 576 else 64
    a, b = tl.zeros((KEYS, most), tl.int32), tl.zeros((KEYS, rest), tl.int32)
    inside = most + tl.arange(0, rest) < BYTES // 4
    for start in range(0, chunk, KEYS):
        index = tl.load(indices + part * chunk + start + tl.arange(0, KEYS)).to(tl.int64)
        at = (cache + index * (BYTES // 4))[:, None]
        a += tl.load(at + tl.arange(0, most)[None, :])
        b += tl.load(at + most + tl.arange(0, rest)[None, :], mask=inside[None, :], other=0)
    tl.store(out + part * most + tl.arange(0, most), tl.sum(a, 0) + tl.sum(b))


@triton.jit
def textbook(
    q,
    cache,
    indices,
    k_scale,
    out,
    lse_out,
    scale,
    heads,
    chunk,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend as one would write it first: 16 queries by keys converted to bfloat16, probabilities rounded to it."""
    part = tl.program_id(0).to(tl.int64)
    row = part // (2048 // chunk)
    head, latent, shared = tl.arange(0, 16), tl.arange(0, 512), tl.arange(0, 64)
    inside = (head < heads)[:, None]
    q_at = q + (row * heads + head[:, None]) * 576
    qa = tl.load(q_at + latent[None, :], mask=inside, other=0.0)
    qb = tl.load(q_at + 512 + shared[None, :], mask=inside, other=0.0)
    top, total = tl.full((16,), -float("inf"), tl.float32), tl.zeros((16,), tl.float32)
    o = tl.zeros((16, 512), tl.float32)
    unit = tl.load(k_scale)
    for start in tl.range(0, chunk, KEYS, num_stages=STAGES):
        index = tl.load(indices + part * chunk + start + tl.arange(0, KEYS)).to(tl.int64)
        at = (cache + index * 576)[:, None]
        k = tl.load(at + latent[None, :]).to(tl.bfloat16)
        s = tl.dot(qa, tl.trans(k))
        s = tl.dot(qb, tl.trans(tl.load(at + 512 + shared[None, :]).to(tl.bfloat16)), s) * (scale * unit)
        higher = tl.maximum(top, tl.max(s, 1))
        p, kept = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        total = total * kept + tl.sum(p, 1)
        o = tl.dot(p.to(tl.bfloat16), k, o * kept[:, None])
        top = higher
    to = (part * heads + head)[:, None] * 512 + latent[None, :]
    tl.store(out + to, o / total[:, None] * unit, mask=inside)
    tl.store(lse_out + part * heads + head, top + tl.log(total), mask=head < heads)


def built(operator: str, spec: Spec, limits: Limits, variant: str = "") -> Callable[..., Any]:
    """Return the run function of a portable implementation."""
    major, minor = torch.cuda.get_device_capability()
    context = BuildContext(
        operator=operator,
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch=f"sm_{major}{minor}",
        sizes=Sizes(),
        group=None,
        persistent=None,
        check=check.compiled(OPERATORS[operator], spec, limits, device=DEVICE),
        settings={},
    )
    run: Callable[..., Any] = getattr(sparse_mla, f"build_{operator}{variant}")(context)
    return run


@functools.cache
def cache_of(name: str) -> Tensor:
    """Return a cache of a million tokens: random codes, none of them NaN."""
    fmt = formats.latent(name)
    cache = torch.randint(0, 256, (TOKENS // PAGE, PAGE * fmt.row_bytes), dtype=torch.uint8, device=DEVICE)
    rows = cache.view(TOKENS // PAGE, PAGE, fmt.row_bytes)
    codes = rows if name == FP8 else rows[..., 256:]
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0)
    if name == NVFP4:  # scales between 2^-2 and 2^-1, the key part below 2
        rows[..., 320:] = 0x28 | (rows[..., 320:] & 7)
        rows[..., 256:320] &= 0xBF
    return cache


def selection(rows: int) -> Tensor:
    """Return physical slots: each request of a decode has its own tokens, a prefill's rows share theirs."""
    own = CONTEXT if rows in PREFILLS else min(CONTEXT, TOKENS // rows)
    first = 0 if rows in PREFILLS else own
    chosen = torch.randint(0, own, (rows, TOPK), dtype=torch.int32, device=DEVICE)
    return chosen + torch.arange(rows, dtype=torch.int32, device=DEVICE)[:, None] * first


def queries(rows: int, heads: int) -> Tensor:
    return torch.randn(rows, heads, 576, device=DEVICE).bfloat16()


def attend(name: str, heads: int, rows: int, variant: str = "") -> dict[str, Any]:
    """Time attention of a plan for ``rows`` rows."""
    spec = SparseMLASpec(num_heads=heads, latent=name, page=PAGE, topk=TOPK)
    run = built("sparse_mla", spec, Limits(max_rows=rows, max_reqs=rows), variant)
    q, cache, indices = queries(rows, heads), cache_of(name), selection(rows)
    scale = torch.tensor([SCALE], device=DEVICE) if name == FP8 else None
    out, lse = run(q, cache, indices, scale)
    few = min(2, rows)
    exact, exact_lse = reference.sparse_mla(spec, q[:few], cache, indices[:few], scale, dtype=torch.float64)
    wrong = relative(out[:few], exact) / relative(exact.bfloat16(), exact)
    assert wrong < 1.5, (name, heads, rows, variant, wrong)
    assert (lse[:few] - exact_lse).abs().max() < 1e-4
    again = run(q[:few].flip(0), cache, indices[:few].flip(0), scale)[0].flip(0)
    assert torch.equal(again, out[:few]), "a row's bits depend on its batch"
    buffers = {"out": out, "lse_out": lse, "workspace": workspace(spec, rows)}
    took = microseconds(lambda: run(q, cache, indices, scale, **buffers), 25 if rows < 1024 else 7)
    return {"us": round(took, 1), "error": round(wrong, 3)}


def workspace(spec: SparseMLASpec, rows: int) -> Tensor:
    """Return bytes enough for any number of parts."""
    return torch.empty(4 * 32 * min(rows, 320) * spec.num_heads * 513, dtype=torch.uint8, device=DEVICE)


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the error of a tensor relative to its norm."""
    return float((x.double() - exact).norm() / exact.norm())


def floor(name: str, rows: int) -> float:
    """Return the best time of reading the selected rows."""
    size = formats.latent(name).row_bytes
    indices, cache = selection(rows), cache_of(name).view(torch.int32)
    times = []
    for chunk in (64, 256, 1024):
        for keys in (16, 32):
            out = torch.empty(rows * TOPK // chunk * 128, dtype=torch.int32, device=DEVICE)
            grid = (rows * TOPK // chunk,)
            launch = functools.partial(gather[grid], cache, indices, out, chunk, BYTES=size, KEYS=keys)
            times.append(microseconds(launch, 11))
    return round(min(times), 1)


def plain(rows: int, heads: int = 12) -> dict[str, Any]:
    """Return the best time of the textbook kernel over FP8 latents, parts added by the same kernel as ours."""
    q, indices = queries(rows, heads), selection(rows)
    cache = cache_of(FP8).view(torch.float8_e4m3fn)
    scale, out = torch.tensor([SCALE], device=DEVICE), torch.empty(rows, heads, 512, device=DEVICE).bfloat16()
    lse = torch.empty(rows, heads, device=DEVICE)
    best: dict[str, Any] = {"us": float("inf")}
    for keys, warps, stages in TEXTBOOK:
        for splits in (s for s in (32, 16, 8, 4, 2) if 64 <= rows * s <= 1280 or (rows == 1 and s > 8)):
            parts = torch.empty(rows * splits, heads, 512, device=DEVICE)
            part_lse = torch.empty(rows * splits, heads, device=DEVICE)

            def launch(
                keys: int = keys,
                warps: int = warps,
                stages: int = stages,
                splits: int = splits,
                parts: Tensor = parts,
                part_lse: Tensor = part_lse,
            ) -> None:
                textbook[(rows * splits,)](
                    q, cache, indices, scale, parts, part_lse, 192**-0.5, heads, TOPK // splits,
                    KEYS=keys, STAGES=stages, num_warps=warps,
                )  # fmt: skip
                attention.combine[(rows * heads * 4,)](
                    parts, part_lse, out, lse, heads * 512, 512, heads, heads,
                    D=512, BLOCK=128, SPLITS=splits, LSE=True,
                )  # fmt: skip

            took = round(microseconds(launch, 15), 1)
            if took < best["us"]:
                best = {"us": took, "keys": keys, "warps": warps, "stages": stages, "splits": splits}
    return best


def merge(rows: int, heads: int) -> float:
    """Return the time of merging the states of 8 ranks."""
    spec = MergeSpec(parts=8, num_heads=heads, return_lse=True)
    run = built("merge_attn_states", spec, Limits(max_rows=rows, max_reqs=rows))
    outs, lses = (
        torch.randn(8, rows, heads, 512, device=DEVICE).bfloat16(),
        torch.randn(8, rows, heads, device=DEVICE),
    )
    out, lse = run(outs, lses)
    exact, _ = reference.merge_attn_states(spec, outs, lses, dtype=torch.float64)
    assert relative(out, exact) < 1.5 * relative(exact.bfloat16(), exact)
    return round(microseconds(lambda: run(outs, lses, out=out, lse_out=lse)), 1)


def store(name: str, rows: int) -> float:
    """Return the time of storing ``rows`` tokens."""
    spec = StoreLatentSpec(latent=name, page=PAGE)
    run = built("store_latent", spec, Limits(max_rows=rows, max_reqs=rows))
    kv_c, k_pe = (
        torch.randn(rows, 512, device=DEVICE).bfloat16(),
        torch.randn(rows, 64, device=DEVICE).bfloat16(),
    )
    slots = torch.randperm(TOKENS, device=DEVICE)[:rows]
    scale = torch.tensor([SCALE], device=DEVICE) if name == FP8 else None
    cache, expected = torch.zeros_like(cache_of(name)), torch.zeros_like(cache_of(name))
    run(kv_c, k_pe, slots, cache, scale)
    reference.store_latent(spec, kv_c, k_pe, slots, expected, scale)
    assert torch.equal(cache, expected), name
    return round(microseconds(lambda: run(kv_c, k_pe, slots, cache, scale)), 1)


def main() -> None:
    """Measure and keep the figures."""
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "copy_bytes_a_second": round(copy_rate()),
    }

    def note(what: str, found: Any) -> None:
        figures[what] = found
        print(what, found, flush=True)

    for rows in DECODES:
        for name, label in ((FP8, "fp8"), (NVFP4, "nvfp4")):
            note(f"floor {label} {rows}", floor(name, rows))
            note(f"decode {label} 12 heads {rows}", attend(name, 12, rows))
            note(f"decode {label} 12 heads {rows} p16", attend(name, 12, rows, "_p16"))
        note(f"textbook fp8 12 heads {rows}", plain(rows))
    for rows in (1, 8, 64, 128):
        note(f"decode fp8 96 heads {rows}", attend(FP8, 96, rows))
    for rows in PREFILLS:
        note(f"floor fp8 {rows}", floor(FP8, rows))
        note(f"prefill fp8 12 heads {rows}", attend(FP8, 12, rows))
        note(f"prefill nvfp4 12 heads {rows}", attend(NVFP4, 12, rows))
    note(f"prefill fp8 96 heads {PREFILLS[0]}", attend(FP8, 96, PREFILLS[0]))
    for rows, heads in ((1, 96), (64, 12), (64, 96), (320, 12)):
        note(f"merge 8 parts {heads} heads {rows}", merge(rows, heads))
    for rows in (1, 64, 4096):
        for name, label in ((FP8, "fp8"), (NVFP4, "nvfp4")):
            note(f"store {label} {rows}", store(name, rows))
    keep("h200_sparse_mla", figures)
