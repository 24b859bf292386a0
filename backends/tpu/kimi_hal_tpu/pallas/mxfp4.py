"""MXFP4 weights in VMEM: bytes of two codes and their scales to bfloat16, in which every value is exact.

A TPU takes subnormal numbers for 0. So groups under small scales are decoded apart, 2^64 times as large as they are; a
product beyond bfloat16's largest number is infinite, and a scale of 255 NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.mode import Array
from kimi_hal_tpu.scales import SMALL

#: Elements that share a scale.
GROUP = 32
NAN = 0x7FC00000


def decode(data: Array, scale: Array, float4: bool) -> Array:
    """Return weights ``[K, N]`` bfloat16.

    Args:
        data: ``[K / 2, N]`` uint8, the even row's code in the low nibble.
        scale: ``[K / 32, N]`` float32.
        float4: whether the chip has the type; the bits are the same with and without it.
    """
    codes = pltpu.bitcast(data, jnp.float4_e2m1fn).astype(jnp.bfloat16) if float4 else elements(data)
    groups, columns = scale.shape
    spread = jnp.broadcast_to(scale[:, None, :], (groups, GROUP, columns)).reshape(groups * GROUP, columns)
    return codes * spread.astype(jnp.bfloat16)


def elements(data: Array) -> Array:
    """Return the e2m1 values ``[K, N]`` bfloat16 of bytes, both of a byte at once in the halves of an integer.

    With n = 1 for codes that are not 0 and u = 1 for those from 2 on, bfloat16's bits are 0x3EC0 · n + (code + u) · 64.
    """
    byte = data.astype(jnp.int32)
    pair = (byte & 0xF) | ((byte & 0xF0) << 12)
    size = pair & 0x00070007
    above = ((size >> 1) | (size >> 2)) & 0x00010001
    some = (size | above) & 0x00010001
    bits = some * 0x3EC0 + ((size + above) << 6)
    return pltpu.bitcast(bits | ((pair & 0x00080008) << 12), jnp.bfloat16)


def scales(codes: Array) -> Array:
    """Return ``2^(code − 127)`` float32 of uint8 codes, 0 of small ones, NaN of 255."""
    wide = codes.astype(jnp.int32)
    bits = jnp.where(wide == 255, NAN, jnp.where(wide < SMALL, 0, wide << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def small_scales(codes: Array) -> Array:
    """Return ``2^(code − 63)`` float32 of small codes, 0 of others."""
    wide = codes.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.where(wide < SMALL, (wide + 64) << 23, 0), jnp.float32)


def any_small(codes: Array) -> Array:
    """Tell whether there is a small code."""
    return jnp.max(jnp.where(codes.astype(jnp.int32) < SMALL, 1.0, 0.0)) > 0
