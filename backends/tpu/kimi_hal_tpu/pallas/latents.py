"""Rows of the latent cache as attention on TensorCore reads them: every value exact in bfloat16.

A row stands in a dense buffer as it was gathered, packed. Its elements come out in an order that is cheap on a TPU, the
stored order; a query is brought into it and a result out of it by XLA, once a row and not once a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.mode import Array

#: Elements of a latent: those that are values too, and the shared part of the key.
RANK, PE = 512, 64
#: Bits of four e2m1 codes in the low halves of a word's bytes: magnitudes and signs.
MAGNITUDES, SIGNS, HIGH_SIGNS = 0x07070707, 0x08080808, -0x7F7F7F80
#: An e2m1 code that is read as e4m3fn, two places further left, is a 64th of its value, subnormals too.
RAISE = 64.0


@dataclass(frozen=True)
class Scaled:
    """576 codes of e4m3fn, relative to one scale of the cache."""

    row_bytes: int = 576
    width: int = RANK + PE
    needs_scale: bool = True

    def dense(self, words: Array) -> Array:
        """View gathered words ``[n, row_bytes // 4]`` as what ``keys`` reads: ``[n, 576]`` uint8."""
        return as_bytes(words)

    def query(self, q: Array) -> Array:
        """Bring ``[T, H, 576]`` into the stored order."""
        return q

    def result(self, out: Array) -> Array:
        """Bring ``[T, H, 512]`` out of the stored order."""
        return out

    def keys(self, rows: Array, counts: Array) -> Array:
        """Return the keys of a block ``[K, width]`` bfloat16, 0 where one does not count: 0 · NaN would be NaN.

        Args:
            rows: ``[K, …]`` as ``dense`` gives them.
            counts: ``[1, K]`` int32, 1 where a key counts.
        """
        return e4m3(rows, column(counts)).astype(jnp.bfloat16)


@dataclass(frozen=True)
class BFloat16(Scaled):
    """576 numbers of bfloat16."""

    row_bytes: int = 1152
    needs_scale: bool = False

    def dense(self, words: Array) -> Array:
        """View gathered words as ``[n, 576]`` bfloat16."""
        return jax.lax.bitcast_convert_type(words, jnp.bfloat16).reshape(words.shape[0], -1)

    def keys(self, rows: Array, counts: Array) -> Array:
        """As ``Scaled.keys``."""
        return jnp.where(column(counts) != 0, rows.astype(jnp.float32), 0.0).astype(jnp.bfloat16)


@dataclass(frozen=True)
class NVFP4(Scaled):
    """512 codes of e2m1, 64 of e4m3fn for the shared part and 32 scales in e4m3fn, of 16 elements each.

    Stored order: elements with an even number, those with an odd one, the shared part, 32 columns that a query meets
    with 0. A value times its scale has six significant bits.
    """

    row_bytes: int = 352
    width: int = RANK + PE + 32
    needs_scale: bool = False

    def query(self, q: Array) -> Array:
        """Even elements, odd ones, the shared part, zeros."""
        parts = (q[..., 0:RANK:2], q[..., 1:RANK:2], q[..., RANK:], jnp.zeros_like(q[..., :32]))
        return jnp.concatenate(parts, axis=-1)

    def result(self, out: Array) -> Array:
        """Interleave the even and the odd elements."""
        halves = jnp.stack([out[..., : RANK // 2], out[..., RANK // 2 :]], axis=-1)
        return halves.reshape(out.shape)

    def keys(self, rows: Array, counts: Array) -> Array:
        """As ``Scaled.keys``: a key that does not count has scales of 0, and no e2m1 code is a NaN."""
        tail = e4m3(rows[:, RANK // 2 :], column(counts)).astype(jnp.bfloat16)
        scale = group_scales(tail)
        halves = [
            (code.astype(jnp.float32) * scale).astype(jnp.bfloat16) for code in e2m1(rows[:, : RANK // 2])
        ]
        return jnp.concatenate([*halves, tail], axis=1)


LAYOUTS: dict[str, Scaled] = {
    "latent.fp8.e4m3fn.tensor": Scaled(),
    "latent.nvfp4.352": NVFP4(),
    "latent.bf16": BFloat16(),
}


def as_words(rows: Array) -> Array:
    """View rows of bytes as rows of 32-bit words: SparseCore's streams move words."""
    return jax.lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 4), jnp.int32)


def as_bytes(words: Array) -> Array:
    """Undo ``as_words``."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)


def column(counts: Array) -> Array:
    """Turn a row ``[1, K]`` into a column ``[K, 1]``, in whole tiles."""
    return jnp.transpose(jnp.broadcast_to(counts, (8, counts.shape[1])))[:, :1]


def e4m3(codes: Array, counts: Array) -> Array:
    """Return the float32 values of e4m3fn codes, 0 in rows that do not count."""
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return jnp.where(counts != 0, values, 0.0)


def e2m1(packed: Array) -> tuple[Array, Array]:
    """Return the low and the high codes of bytes ``[K, n]`` as e4m3fn, each a 64th of its value.

    Four codes to a word: sign to bit 7, the three bits of the magnitude to bits 2 to 4.
    """
    words = pltpu.bitcast(packed, jnp.int32)
    upper = jax.lax.shift_right_logical(words, jnp.full_like(words, 4))
    low = ((words & MAGNITUDES) << 2) | ((words & SIGNS) << 4)
    high = ((upper & MAGNITUDES) << 2) | (words & HIGH_SIGNS)
    return pltpu.bitcast(low, jnp.float8_e4m3fn), pltpu.bitcast(high, jnp.float8_e4m3fn)


def scale_place(group: Array) -> Array:
    """Return where the scale of a group of 16 elements stands among the 32: lane by lane, four a step."""
    return 8 * (group & 3) + (group >> 2)


def group_scales(tail: Array) -> Array:
    """Spread the scales behind the shared part over the 256 bytes of codes, ``RAISE`` times each.

    An exact product with a matrix of one ``RAISE`` a column: of a byte's scale and nothing else. A NaN anywhere in
    the tail makes all of the key's scales NaN, which its dot product is anyway.
    """
    source = jax.lax.broadcasted_iota(jnp.int32, (PE + 32, RANK // 2), 0)
    byte = jax.lax.broadcasted_iota(jnp.int32, (PE + 32, RANK // 2), 1)
    matrix = jnp.where(source - PE == scale_place(byte // 8), RAISE, 0.0).astype(jnp.bfloat16)
    return jax.lax.dot_general(tail, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
