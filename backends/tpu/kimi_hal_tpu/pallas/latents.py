"""Rows of the latent cache as attention on TensorCore reads them: every value exact in bfloat16.

A row stands in a dense buffer as it was gathered, packed, in lines of 128 words: one, two or three. Bytes of a word
lie in one lane, so a key comes out in planes: first bytes of all words, second ones, and so on. A query is brought into
that order and a result out of it by XLA, once a row and not once a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kimi_hal_tpu.pallas.mode import Array, Ref

#: Elements of a latent: those that are values too, and the shared part of the key.
RANK, PE = 512, 64
#: Words of a line of the dense buffer: a whole row of a TPU's tile.
LINE = 128
#: Words of a row that hold e2m1 codes, eight each.
CODES = RANK // 8
#: Bits of four e2m1 codes in the low halves of a word's bytes: magnitudes and signs.
MAGNITUDES, SIGNS, HIGH_SIGNS = 0x07070707, 0x08080808, -0x7F7F7F80
#: An e2m1 code that is read as e4m3fn, two places further left, is a 64th of its value, subnormals too.
RAISE = 64.0


@dataclass(frozen=True)
class Scaled:
    """576 codes of e4m3fn, relative to one scale of the cache: four planes, the shared part in the second line."""

    row_bytes: int = 576
    planes: int = 4
    needs_scale: bool = True

    @property
    def words(self) -> int:
        """Return the 32-bit words of a row."""
        return self.row_bytes // 4

    @property
    def lines(self) -> int:
        """Return the lines of a row in the dense buffer."""
        return -(-self.words // LINE)

    @property
    def rest(self) -> int:
        """Return the columns of a plane's share of what is no value."""
        return PE // self.planes

    def query(self, q: Array) -> tuple[Array, Array]:
        """Return what ``[T, H, 576]`` has for values, ``[T, H, 512]``, and for the rest, a line a plane."""
        values = by_plane(q[..., :RANK], self.planes).reshape(*q.shape[:2], RANK)
        return values, lined(by_plane(q[..., RANK:], self.planes))

    def result(self, out: Array) -> Array:
        """Bring ``[T, H, 512]`` out of the stored order."""
        return by_plane(out, RANK // self.planes).reshape(out.shape)

    def keys(self, words: Ref, counts: Array) -> tuple[Array, list[Array]]:
        """Return a block's values ``[K, 512]`` and the rest of each plane ``[K, rest]``, bfloat16 in the stored order.

        What does not count is 0: 0 · NaN would be NaN.

        Args:
            words: ``[lines, K, 128]`` int32, a reference; lanes behind a row's words hold anything.
            counts: ``[1, K]`` int32, 1 where a key counts.
        """
        there = column(counts) != 0
        values = [where(there, e4m3(byte(words[0], plane))) for plane in range(4)]
        tail = words[1][:, : self.rest]
        return jnp.concatenate(values, axis=1), [where(there, e4m3(byte(tail, plane))) for plane in range(4)]


@dataclass(frozen=True)
class BFloat16(Scaled):
    """576 numbers of bfloat16: two planes of two lines, the shared part in the third."""

    row_bytes: int = 1152
    planes: int = 2
    needs_scale: bool = False

    def keys(self, words: Ref, counts: Array) -> tuple[Array, list[Array]]:
        """As ``Scaled.keys``."""
        there = column(counts) != 0
        values = [where(there, half(words[line], plane)) for plane in range(2) for line in range(2)]
        tail = words[2][:, : self.rest]
        return jnp.concatenate(values, axis=1), [where(there, half(tail, plane)) for plane in range(2)]


@dataclass(frozen=True)
class NVFP4(Scaled):
    """512 codes of e2m1, 64 of e4m3fn for the shared part and 32 scales in e4m3fn, of 16 elements each: one line.

    A plane's values are its 64 low codes, then its 64 high ones. A value times its scale has six significant bits.
    """

    row_bytes: int = 352
    needs_scale: bool = False

    def query(self, q: Array) -> tuple[Array, Array]:
        """As ``Scaled.query``: of a word's eight codes the plane's low one, then its high one."""
        codes = q[..., :RANK].reshape(*q.shape[:2], RANK // 8, 4, 2)
        values = jnp.transpose(codes, (0, 1, 3, 4, 2)).reshape(*q.shape[:2], RANK)
        return values, lined(by_plane(q[..., RANK:], 4))

    def result(self, out: Array) -> Array:
        """As ``Scaled.result``."""
        codes = out.reshape(*out.shape[:2], 4, 2, RANK // 8)
        return jnp.transpose(codes, (0, 1, 4, 2, 3)).reshape(out.shape)

    def keys(self, words: Ref, counts: Array) -> tuple[Array, list[Array]]:
        """As ``Scaled.keys``: a key that does not count has scales of 0, and no e2m1 code is a NaN."""
        there, line = column(counts) != 0, words[0]
        tail, scales = line[:, CODES : CODES + self.rest], line[:, CODES + self.rest : self.words]
        spread = group_scales(where(there, e4m3(in_planes(scales))))
        both = jnp.concatenate([codes[:, :CODES] for codes in e2m1(line)], axis=1)
        values = [(e4m3(byte(both, plane)) * spread).astype(jnp.bfloat16) for plane in range(4)]
        return jnp.concatenate(values, axis=1), [where(there, e4m3(byte(tail, plane))) for plane in range(4)]


LAYOUTS: dict[str, Scaled] = {
    "latent.fp8.e4m3fn.tensor": Scaled(),
    "latent.nvfp4.352": NVFP4(),
    "latent.bf16": BFloat16(),
}


def as_words(rows: Array) -> Array:
    """Return rows of bytes as rows of 32-bit words, little end first: SparseCore's streams move words.

    Put together by hand: XLA's own conversion gives each four bytes a line of 128, 30 times the cache.
    """
    first, second, third, last = (rows[:, place::4].astype(jnp.int32) for place in range(4))
    return first | (second << 8) | (third << 16) | (last << 24)


def by_plane(x: Array, planes: int) -> Array:
    """Return ``[T, H, n]`` as ``[T, H, planes, n // planes]``: every ``planes``-th element next to each other."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, planes), 2, 3)


def lined(parts: Array) -> Array:
    """Begin a line of zeros with each plane's part: ``[T, H, planes · 128]``."""
    padding = ((0, 0), (0, 0), (0, 0), (0, LINE - parts.shape[3]))
    return jnp.pad(parts, padding).reshape(*parts.shape[:2], -1)


def column(counts: Array) -> Array:
    """Turn a row ``[1, K]`` into a column ``[K, 1]``, in whole tiles."""
    return jnp.transpose(jnp.broadcast_to(counts, (8, counts.shape[1])))[:, :1]


def where(there: Array, values: Array) -> Array:
    """Return float32 values in bfloat16, 0 where they do not count."""
    return jnp.where(there, values, 0.0).astype(jnp.bfloat16)


def byte(words: Array, plane: int) -> Array:
    """Return one byte of each word, uint8."""
    return (jax.lax.shift_right_logical(words, jnp.full_like(words, 8 * plane)) & 0xFF).astype(jnp.uint8)


def half(words: Array, plane: int) -> Array:
    """Return the lower or the upper bfloat16 of each word in float32."""
    return jax.lax.bitcast_convert_type(words & -65536 if plane else words << 16, jnp.float32)


def e4m3(codes: Array) -> Array:
    """Return the float32 values of e4m3fn codes."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def e2m1(words: Array) -> tuple[Array, Array]:
    """Return the low and the high codes of each byte as e4m3fn, each a 64th of its value, four to a word.

    The sign goes to bit 7 of its byte, the three bits of the magnitude to bits 2 to 4.
    """
    upper = jax.lax.shift_right_logical(words, jnp.full_like(words, 4))
    low = ((words & MAGNITUDES) << 2) | ((words & SIGNS) << 4)
    high = ((upper & MAGNITUDES) << 2) | (words & HIGH_SIGNS)
    return low, high


def scale_place(group: Array) -> Array:
    """Return where the scale of a group of 16 elements stands among the 32: lane by lane, four a step."""
    return 8 * (group & 3) + (group >> 2)


def in_planes(words: Array) -> Array:
    """Return the bytes of ``[K, n]`` words as ``[K, 4 · n]`` uint8, plane after plane."""
    planes = [jax.lax.shift_right_logical(words, jnp.full_like(words, 8 * p)) & 0xFF for p in range(4)]
    return jnp.concatenate(planes, axis=1).astype(jnp.uint8)


def group_scales(scales: Array) -> Array:
    """Spread the scales ``[K, 32]`` of a key, in planes, over a plane's codes ``[K, 128]``, ``RAISE`` times each.

    Two words hold a group, so all planes have the same scales. An exact product with a matrix of one ``RAISE`` a
    column: of a word's scale and nothing else. One scale that is NaN makes all of the key's so, which its dot
    product is anyway.
    """
    count = scales.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (count, LINE), 0)
    code = jax.lax.broadcasted_iota(jnp.int32, (count, LINE), 1)
    place = scale_place(code % CODES // 2)
    mine = lane == place % 4 * (count // 4) + place // 4
    matrix = jnp.where(mine, RAISE, 0.0).astype(jnp.bfloat16)
    return jax.lax.dot_general(scales, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
