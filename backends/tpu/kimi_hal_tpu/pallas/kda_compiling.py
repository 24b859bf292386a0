"""The KDA kernels as they are compiled without a TPU, with 12 heads (TP8) and, in a verify, 8 rows a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kimi_hal.dispatch.contract import Kernel, Target
from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.pallas import aot, chunks, recurrence
from kimi_hal_tpu.pallas.compiling import DECODE, HEADS, MODE, PREFILL, TENSOR_CORE, compiled
from kimi_hal_tpu.pallas.recurrence import Work

SPEC = KDASpec(num_heads=HEADS, checkpoints=True)
#: Rows of a verify, and state slots.
DRAFTS, STATES = 8, 256
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
POOL: aot.Operand = ((STATES, HEADS, SPEC.head_dim, SPEC.head_dim), F32)
PARAMETERS = ("rate", "bias")


def kda_decode(target: Target) -> list[Kernel]:
    """Return a decode: one row a sequence."""
    return [_recurrence(target, "decode", 1, ("q", "k", "v"), ("out",))]


def kda_verify(target: Target) -> list[Kernel]:
    """Return a verify, which convolves and stores no state."""
    return [_recurrence(target, "verify", DRAFTS, ("x", "weight"), ("out", "k", "v"), stores=False)]


def kda_commit(target: Target) -> list[Kernel]:
    """Return one layer of a commit, with checkpoints."""
    return [_recurrence(target, "commit", DRAFTS, ("k", "v"), ())]


def kda_prefill(target: Target) -> list[Kernel]:
    """Return a piece of a prefill of one sequence, in chunks of 64 rows."""
    count, size = PREFILL // chunks.CHUNK, SPEC.head_dim
    rows = dict.fromkeys("qkvg", ((HEADS, count, chunks.CHUNK, size), BF16))
    rows["beta"] = ((HEADS, count, 1, chunks.CHUNK), F32)
    rows |= dict.fromkeys(PARAMETERS, ((HEADS, 1, size), F32))
    work = [((count,), I32)] * len(chunks.Chunks._fields)

    def program(*arrays: Any) -> Any:
        scalars, states = chunks.Chunks(*arrays[: len(work)]), arrays[-1]
        given = dict(zip(rows, arrays[len(work) : -1], strict=True))
        return chunks.advance(SPEC, scalars, given, states, MODE)

    return [kernel(target, "prefill", program, [*work, *rows.values(), POOL])]


def _operands(rows: int, names: Sequence[str]) -> dict[str, aot.Operand]:
    heads = (HEADS, SPEC.head_dim)
    known = {
        "x": ((DECODE, 3 + rows, 3, *heads), BF16),
        "weight": ((4, 3, *heads), F32),
        "beta": ((DECODE, rows, HEADS, 1), F32),
        **dict.fromkeys(PARAMETERS, (heads, F32)),
    }
    one = ((DECODE, rows, *heads), BF16)
    return {name: known.get(name, one) for name in (*names, "g", "beta", *PARAMETERS)}


def _recurrence(
    target: Target, name: str, rows: int, names: Sequence[str], results: Sequence[str], *, stores: bool = True
) -> Kernel:
    operands = _operands(rows, names)
    work = [((DECODE,), I32)] * len(Work._fields)

    def program(*arrays: Any) -> Any:
        scalars, states = Work(*arrays[: len(work)]), arrays[-1]
        given = dict(zip(operands, arrays[len(work) : -1], strict=True))
        return recurrence.advance(SPEC, scalars, given, states, MODE, results=results, stores=stores)

    return kernel(target, name, program, [*work, *operands.values(), POOL])


def kernel(target: Target, name: str, program: Any, operands: Sequence[aot.Operand]) -> Kernel:
    """Return a TensorCore kernel that any generation compiles."""
    return Kernel(name, lambda: compiled(aot.compile_for(target.name, program, operands)), (TENSOR_CORE,))
