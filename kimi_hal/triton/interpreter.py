"""Repairs of Triton's CPU interpreter, without which a bfloat16 or FP8 test on a CPU means nothing.

As of Triton 3.9 the interpreter keeps bfloat16 as 16-bit integers and multiplies those in ``tl.dot``,
truncates float32 to bfloat16 instead of rounding, converts FP8 without NaN and with a wrong saturation,
turns a comparison of scalars into floats where it meets a block, keeps a launch's grid in globals, which ranks
that are threads would share, and patches the language anew at every call of a function, which takes half of its
time. Triton 3.6 cannot end a loop at a loaded number under NumPy 2.4 or later.
Conversions here go through torch's types, which round to nearest even; FP8 saturates as the hardware's do.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
}
LAUNCH, run_grid = threading.RLock(), interpreter.GridExecutor.__call__
patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
#: The modules, by their globals, whose language this launch has patched.
PATCHED: set[int] = set()
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def repair() -> None:
    """Replace the interpreter's conversions and dot product; calling it again changes nothing."""
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_splat = splat
    interpreter.GridExecutor.__call__ = launch
    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = patched_lang


def patched_tensor(tensor: Any, scope: Any) -> None:
    """Let a tensor of one number stand for it, as a loop's end does."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.ravel(self.handle.data)[0]))


def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a grid, one at a time in this process."""
    with LAUNCH:
        PATCHED.clear()
        return run_grid(self, *args, **kwargs)


def patched_lang(fn: Any) -> Any:
    """Patch the language that a function sees once a launch, not at each of its calls."""
    seen = id(fn.__globals__)
    if seen in PATCHED:
        return interpreter._LangPatchScope()
    PATCHED.add(seen)
    return patch_lang(fn)


def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Convert an array between floating types; returns the target's bits as unsigned integers."""
    bits = np.ascontiguousarray(data).view(BITS[source.primitive_bitwidth])
    values = torch.from_numpy(bits.copy()).view(TYPES[source])
    wanted = TYPES[target]
    if target.primitive_bitwidth == 8:
        limit = torch.finfo(wanted).max
        values = values.float().clamp(-limit, limit)  # clamp keeps NaN
    raw = values.to(wanted).view(
        {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[target.primitive_bitwidth]
    )
    return raw.numpy().view(BITS[target.primitive_bitwidth]).reshape(np.shape(data))


def widen(handle: Any) -> Any:
    """Return a tensor handle's values as an array that numpy can multiply."""
    kind = handle.dtype.scalar
    if kind in TYPES and kind.primitive_bitwidth <= 16 and kind != tl.float16:
        return convert(handle.data, kind, tl.float32, None).view(np.float32)
    return handle.data


def splat(self: Any, result: Any, scalar: Any) -> Any:
    """Repeat a scalar over a block as what it is; a comparison's handle still has its operands' type."""
    value = np.ravel(scalar.data)
    return interpreter.TensorHandle(np.full(result.shape, value[0], dtype=value.dtype), scalar.dtype.scalar)


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Multiply in the accumulator's type, whatever the operands' storage."""
    product = np.matmul(widen(a).astype(d.data.dtype), widen(b).astype(d.data.dtype))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
