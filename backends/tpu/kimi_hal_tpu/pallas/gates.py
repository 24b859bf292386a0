"""What every KDA kernel makes of its operands first, in float32: the decay, normalised keys and queries.

Formulas: ``kimi_hal/ops/kda.py``. The functions work on values inside a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.pallas.mode import Array

#: Above it softplus is the identity.
THRESHOLD = 20.0


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(−x)); exp overflows to infinity for large negative x, which gives 0."""
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Array) -> Array:
    """Return ln(1 + exp(x)), and x itself above the threshold."""
    return jnp.where(x > THRESHOLD, x, jnp.log1p(jnp.exp(jnp.minimum(x, THRESHOLD))))


def log_softplus(x: Array) -> Array:
    """Return ln ln(1 + exp(x)), which is x itself where exp(x) is nothing beside 1."""
    return jnp.where(x < -40.0, x, jnp.log(softplus(x)))


def log_decay(spec: KDASpec, g: Array, rate: Array | None, bias: Array | None) -> Array:
    """Return the natural-log decay, never positive: finished gates as they are where there is no rate.

    Args:
        spec: gives the bound.
        g: gates, raw or finished.
        rate: as ``parameters`` gives it, broadcast against ``g``.
        bias: dt_bias, likewise.
    """
    wide = g.astype(jnp.float32)
    if rate is None or bias is None:
        return wide
    if spec.lower_bound is None:
        # exp(A_log) · softplus as one exponential: either factor may be beyond float32 where the product is not.
        return -jnp.exp(rate + log_softplus(wide + bias))
    return spec.lower_bound * sigmoid(rate * (wide + bias))


def key(spec: KDASpec, k: Array) -> Array:
    """Return the key that enters the state."""
    wide = k.astype(jnp.float32)
    return unit(wide) if spec.qk_norm else wide


def query(spec: KDASpec, q: Array) -> Array:
    """Return the query that reads the state."""
    return key(spec, q) * spec.scale


def unit(x: Array) -> Array:
    """Divide by the root of the sum of squares over the last dimension, 1e-6 added to that sum."""
    return x * (1.0 / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6))


def parameters(spec: KDASpec, A_log: Array | None, dt_bias: Array | None) -> Mapping[str, Array]:
    """Return ``rate`` and ``bias`` as ``[H, K]`` float32 for a raw gate, nothing for a finished one.

    The rate is exp(A_log), finite, since 0 times infinity is no limit; of the gate without a bound A_log itself.
    """
    if A_log is None or dt_bias is None:
        return {}
    shape = (spec.num_heads, spec.head_dim)
    rate = A_log if spec.lower_bound is None else jnp.minimum(jnp.exp(A_log), jnp.finfo(jnp.float32).max)
    return {"rate": jnp.broadcast_to(rate[:, None], shape), "bias": dt_bias.reshape(shape)}


def beta(spec: KDASpec, raw: Array) -> Array:
    """Return the finished beta in float32."""
    return sigmoid(raw.astype(jnp.float32)) if spec.gate == "raw" else raw.astype(jnp.float32)
