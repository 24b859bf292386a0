"""What the TPU's chunked KDA prefill errs by against float64, beside the recurrence row by row in float32.

Needs the environment of ``nox -s tpu_jax``. One head of 128 channels, 1,024 rows in chunks of 64, by the kernel's own
function, products of bfloat16 terms included, which XLA computes on the CPU; no TPU is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.record import keep

ROWS, DIM = 1024, 128
Numbers = np.ndarray[Any, Any]


def walked(rows: list[Numbers], state: Numbers, kind: type[np.floating[Any]]) -> tuple[Numbers, Numbers]:
    """Return outputs and the last state, row by row in one type."""
    q, k, v, g, beta = (x.astype(kind) for x in rows)
    state, out = state.astype(kind), []
    for t in range(len(q)):
        state = state * np.exp(g[t])
        state = state + np.outer(beta[t] * (v[t] - state @ k[t]), k[t])
        out.append(state @ q[t])
    return np.array(out), state


def chunked(rows: list[Numbers], state: Numbers) -> tuple[Numbers, Numbers]:
    """Return outputs and the last state by the kernel's function."""
    import jax
    import jax.numpy as jnp

    from kimi_hal_tpu.pallas import chunks

    spans = jnp.asarray(chunks.sums_of_decays(), jnp.bfloat16)
    step = jax.jit(lambda q, k, v, g, beta, state: chunks.chunk(q, k, v, g, beta[:, None], spans, state))
    out, now = [], jnp.asarray(state)
    for first in range(0, ROWS, chunks.CHUNK):
        made, now = step(*(x[first : first + chunks.CHUNK] for x in rows), now)
        out.append(np.asarray(made))
    return np.concatenate(out), np.asarray(now)


def apart(found: Numbers, expected: Numbers) -> float:
    """Return the root mean square error over that of what is expected."""
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


def drawn(rng: np.random.Generator) -> dict[str, tuple[list[Numbers], Numbers]]:
    """Return q, k, v, log decays and beta, and a state, by what is special about them."""
    shape = (ROWS, DIM)
    q, k = (rng.standard_normal(shape) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    v, beta, state = (
        rng.standard_normal(shape),
        rng.random(ROWS),
        0.1 * rng.standard_normal((DIM, DIM)),
    )
    bounded = -5.0 / (1.0 + np.exp(-2.0 * rng.standard_normal(shape)))
    rare, one = -300.0 * rng.random(shape) ** 6, np.repeat(k[:1], ROWS, axis=0)
    kinds = {
        "bounded gate": (k, bounded, beta),
        "gate at its bound of -5": (k, np.full(shape, -5.0), beta),
        "no decay": (k, np.zeros(shape), beta),
        "unbounded gate, down to -300": (k, rare, beta),
        "one key in every row, decay -0.01, beta 0.9": (one, np.full(shape, -0.01), np.full(ROWS, 0.9)),
    }
    return {
        name: ([x.astype(np.float32) for x in (q * DIM**-0.5, key, v, g, b)], state.astype(np.float32))
        for name, (key, g, b) in kinds.items()
    }


def main() -> None:
    """Measure and keep."""
    figures = {}
    for name, (rows, state) in drawn(np.random.default_rng(0)).items():
        exact = walked(rows, state, np.float64)
        ways = {"chunks": chunked(rows, state), "row by row, float32": walked(rows, state, np.float32)}
        figures[name] = {
            f"{what}, {way}": apart(found[i], exact[i])
            for way, found in ways.items()
            for i, what in enumerate(("outputs", "state"))
        }
        print(name, figures[name])
    keep("tpu_chunks", figures)


if __name__ == "__main__":
    main()
