"""Attention on TensorCore over a dense buffer of gathered latents: softmax over blocks, with its LSE.

Latents are unpacked in VMEM to bfloat16, in which they are exact, so both products run on the MXU in bfloat16 and lose
nothing of the keys. The probabilities are split into two or three bfloat16 terms whose sum is the float32 number to 16
or 24 bits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.latents import LINE, RANK, Scaled
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Keys of one step of the grid, at most.
BLOCK = 512


def attend(
    q: Array, keys: Array, valid: Array, scales: Array, layout: Scaled, out_dtype: jnp.dtype, mode: Mode
) -> tuple[Array, Array]:
    """Attend from each row's heads to the row's own keys.

    Args:
        q: ``[T, H, 576]`` bfloat16.
        keys: ``[lines, T · K, 128]`` int32, rows in lines of words; K a multiple of 128.
        valid: ``[T, K]`` int32, 1 where a key counts. What does not count is never multiplied.
        scales: ``[2]`` float32: what a dot product and what a value is multiplied with.
        layout: of the rows.
        out_dtype: of the result: bfloat16 or float32.
        mode: compiled or interpreted.

    Returns:
        ``[T, H, 512]`` and the natural LSE ``[T, H]`` float32.
    """
    q_values, q_rest = layout.query(q)
    (rows, heads, _), count = q.shape, valid.shape[1]
    block = next(size for size in (BLOCK, 256, 128) if count % size == 0)
    terms = 2 if out_dtype == jnp.bfloat16 else 3
    out, lse = pl.pallas_call(
        functools.partial(_kernel, layout=layout, terms=terms),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, RANK), out_dtype),
            jax.ShapeDtypeStruct((rows, heads, 1), jnp.float32),
        ),
        grid=(rows, count // block),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((1, heads, RANK), lambda t, j: (t, 0, 0)),
            pl.BlockSpec((1, heads, q_rest.shape[2]), lambda t, j: (t, 0, 0)),
            pl.BlockSpec((layout.lines, block, LINE), lambda t, j: (0, t * (count // block) + j, 0)),
            pl.BlockSpec((1, 1, block), lambda t, j: (t, 0, j)),
        ],
        out_specs=(
            pl.BlockSpec((1, heads, RANK), lambda t, j: (t, 0, 0)),
            pl.BlockSpec((1, heads, 1), lambda t, j: (t, 0, 0)),
        ),
        scratch_shapes=[
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, RANK), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=mode.interpret,
        name="sparse_mla",
    )(scales, q_values, q_rest, keys, valid[:, None, :])
    some = jnp.any(valid != 0, axis=1)[:, None, None]  # what has no key is 0, whatever the cache's scale is
    return jnp.where(some, layout.result(out), 0), lse[..., 0]


def _kernel(
    scales: Ref,
    q_values: Ref,
    q_rest: Ref,
    keys: Ref,
    valid: Ref,
    out: Ref,
    lse: Ref,
    top: Ref,
    total: Ref,
    sums: Ref,
    *,
    layout: Scaled,
    terms: int,
) -> None:
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _clear() -> None:
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    counts = valid[0]
    values, rest = layout.keys(keys, counts)
    dots = against(q_values[0], values)
    for plane, tail in enumerate(rest):
        dots = dots + against(q_rest[0, :, pl.ds(plane * LINE, layout.rest)], tail)
    logits = jnp.where(counts != 0, dots * scales[0], -jnp.inf)
    new_top = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
    # Nothing yet, or a logit of +inf: whatever is subtracted, the exponential says the right thing of it.
    base = jnp.where(jnp.abs(new_top) < jnp.inf, new_top, 0.0)
    # What does not count weighs 0 even where a NaN or an infinity among the others makes the base no number.
    weights = jnp.where(counts != 0, jnp.exp(logits - base), 0.0)
    kept = jnp.exp(top[...] - base)
    total[...] = total[...] * kept + jnp.sum(weights, axis=1, keepdims=True)
    sums[...] = sums[...] * kept + product(weights, values, terms)
    top[...] = new_top

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish() -> None:
        whole, high = total[...], top[...]
        # A maximum may hide a NaN behind +inf; the sum of weights does not.
        share = jnp.where(high == jnp.inf, jnp.nan, scales[1] / jnp.where(whole == 0, 1.0, whole))
        out[0] = (sums[...] * share).astype(out.dtype)
        lse[0] = jnp.where(high == jnp.inf, whole, high + jnp.log(whole))


def against(q: Array, keys: Array) -> Array:
    """Return the dot products ``[H, K]`` of queries ``[H, n]`` and keys ``[K, n]``, in float32."""
    return jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def product(weights: Array, values: Array, terms: int) -> Array:
    """Return ``weights @ values`` in float32, float32 weights split into bfloat16 terms."""
    result = None
    for _ in range(terms):
        part = weights.astype(jnp.bfloat16)
        weights = weights - part.astype(jnp.float32)
        term = jax.lax.dot_general(part, values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        result = term if result is None else result + term
    assert result is not None
    return result
