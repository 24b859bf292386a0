"""The Pallas kernels as they are compiled without a TPU: sizes of a decode and of a prefill on one device of TP8."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel, Target
from kimi_hal.ops.moe import MoESpec
from kimi_hal_tpu import generations
from kimi_hal_tpu.pallas import aot, attention, gather, moe, scores, selection
from kimi_hal_tpu.pallas.expert_blocks import Blocks
from kimi_hal_tpu.pallas.latents import LAYOUTS, LINE, Scaled
from kimi_hal_tpu.pallas.mode import Mode

MODE = Mode()
#: Rows of a decode and of a piece of a prefill, keys of a request, slots of a cache: 1 GB of index pages.
DECODE, PREFILL, CONTEXT, PAGES, SLOTS = 64, 512, 65536, 16384, 1 << 18
HEADS, INDEX_HEADS, TOPK = 12, 32, 2048
EXPERTS = MoESpec(num_local=28)
#: Latent formats and what their kernels' names end in.
LATENTS = {"latent.fp8.e4m3fn.tensor": "", "latent.nvfp4.352": "-nvfp4", "latent.bf16": "-bf16"}
TENSOR_CORE = Instruction("tpu_custom_call", "the kernel is Mosaic's code and not a composition of XLA")
SPARSE_CORE = Instruction("sparsecore", "the kernel runs on SparseCore")


def indexer_logits(target: Target) -> list[Kernel]:
    """Return the scores of a decode and of a prefill."""
    return [_scores(target, "decode", DECODE), _scores(target, "prefill", PREFILL)]


def topk_select(target: Target) -> list[Kernel]:
    """Return the selection of the top 2,048 of 65,536."""
    operands = [((DECODE, CONTEXT), jnp.float32), ((DECODE,), jnp.int32), ((DECODE,), jnp.int32)]
    return [_kernel(target, "select", lambda *a: selection.select(*a, TOPK, MODE), operands, sparse=True)]


def indexer_topk(target: Target) -> list[Kernel]:
    """Return the fused program: scores on TensorCore, then the selection on SparseCore."""

    def program(*arrays: Any) -> Any:
        found = scores.score(*arrays, MODE)
        count = arrays[-1]
        return selection.select(found, jnp.zeros_like(count), count, TOPK, MODE)

    return [_kernel(target, "decode", program, _scored(DECODE), sparse=True)]


def sparse_mla(target: Target) -> list[Kernel]:
    """Return the gather of latents, and attention over what was gathered in a decode and in a prefill, by format."""
    found = []
    for latent, suffix in LATENTS.items():
        layout = LAYOUTS[latent]
        table = [((SLOTS, layout.words), jnp.int32), ((DECODE * TOPK,), jnp.int32)]
        found += [
            _kernel(target, f"gather{suffix}", lambda *a: gather.rows(*a, MODE), table, sparse=True),
            _attention(target, f"decode{suffix}", DECODE, layout),
            _attention(target, f"prefill{suffix}", PREFILL, layout),
        ]
    return found


def moe_experts(target: Target) -> list[Kernel]:
    """Return the experts of one of 32 ranks, 28 of 896, in a decode and in a prefill."""
    return [_experts(target, "decode", DECODE), _experts(target, "prefill", PREFILL)]


def _experts(target: Target, name: str, rows: int) -> Kernel:
    mode = Mode(float4=generations.get(target.name).float4)
    operands = [
        ((rows, EXPERTS.hidden), jnp.bfloat16),
        ((rows, EXPERTS.topk), jnp.float32),
        ((rows, EXPERTS.topk), jnp.int32),
        *((shape, jnp.uint8) for shape in Blocks.of(EXPERTS).shapes(EXPERTS.num_local)),
    ]

    def program(x: Any, weights: Any, ids: Any, *blocks: Any) -> Any:
        given = {"x": x, "topk_weights": weights, "topk_ids": ids, "weights": blocks}
        return moe.moe_experts(EXPERTS, given, mode)

    return _kernel(target, name, program, operands)


def _scored(rows: int) -> list[aot.Operand]:
    return [
        ((rows, INDEX_HEADS, 128), jnp.float8_e4m3fn),
        ((rows, INDEX_HEADS), jnp.float32),
        ((PAGES, scores.PAGE_ROWS, scores.LANES), jnp.uint8),
        ((rows, CONTEXT // scores.PAGE), jnp.int32),
        ((rows,), jnp.int32),
        ((rows,), jnp.int32),
    ]


def _scores(target: Target, name: str, rows: int) -> Kernel:
    return _kernel(target, name, lambda *a: scores.score(*a, MODE), _scored(rows))


def _attention(target: Target, name: str, rows: int, layout: Scaled) -> Kernel:
    operands = [
        ((rows, HEADS, 576), jnp.bfloat16),
        ((layout.lines, rows * TOPK, LINE), jnp.int32),
        ((rows, TOPK), jnp.int32),
        ((2,), jnp.float32),
    ]
    out = jnp.dtype(jnp.bfloat16)
    return _kernel(target, name, lambda *a: attention.attend(*a, layout, out, MODE), operands)


def _kernel(
    target: Target,
    name: str,
    program: Callable[..., Any],
    operands: Sequence[aot.Operand],
    *,
    sparse: bool = False,
) -> Kernel:
    needs = ("sparse_core",) if sparse else ()
    expected = (TENSOR_CORE, SPARSE_CORE) if sparse else (TENSOR_CORE,)
    return Kernel(name, lambda: compiled(aot.compile_for(target.name, program, operands, needs)), expected)


def compiled(code: aot.Code) -> Compiled:
    """Return what the suite looks at: the operations of the optimised program, custom calls by their target."""
    found = set(re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", code.text))
    found |= set(re.findall(r'custom_call_target="(\w+)"', code.text))
    if code.on_sparse_core:
        found.add("sparsecore")
    return Compiled(
        target=code.kind,
        size=code.size,
        instructions=tuple(sorted(found)),
        further={"kernels": code.kernels, "temporary_hbm_bytes": code.temporary},
    )
