"""The delta recurrence by chunks, as prefill kernels compute it: the same function, other products.

Inside a chunk of C tokens, with G the running sum of the log decays and S the state before it:

``A[t, j] = Σ k_t k_j exp(G_t − G_j)`` for j < t, ``B[t, j] = Σ q_t k_j exp(G_t − G_j)`` for j ≤ t,
``u_t = beta_t (v_t − (k_t exp G_t)ᵀ S − Σ_j A[t, j] u_j)``, ``o_t = (q_t exp G_t)ᵀ S + Σ_j B[t, j] u_j``,
``S ← exp(G_C) S + Σ_j (k_j exp(G_C − G_j)) u_jᵀ``. Formulas: flash-linear-attention ``fla/ops/kda/naive.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference import recurrence
from kimi_hal.reference.recurrence import Tokens, load, save
from kimi_hal.reference.sequences import Sequences

Narrow = Callable[[Tensor], Tensor]
CHUNK = 16


def kda_prefill(
    spec: KDASpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    narrow: Narrow = lambda x: x,
    chunk: int = CHUNK,
) -> Tensor:
    """Run ``kda_prefill`` by chunks of ``chunk`` tokens in ``dtype``; the other operands are the operator's.

    ``narrow`` is made of decayed queries and keys, of the products A and B, and of the corrections u.
    """
    tokens = Tokens(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias)
    runs = Sequences.cut(cu_seqlens, state_ids, q.shape[0], state.shape[0])
    saved, count = runs.stops(state.shape[0], checkpoint_ids, checkpoint_offsets)
    o = v.new_zeros(v.shape, dtype=dtype)
    for n in (runs.slot >= 0).nonzero().flatten().tolist():
        fresh = None if has_initial_state is None else ~has_initial_state[n : n + 1]
        states = load(state, runs.slot[n : n + 1], dtype, fresh)
        first, length, stop = int(runs.start[n]), int(runs.length[n]), int(count[n])
        for begin, end in _pieces(length, chunk, [stop, *_broken(tokens, first, length)]):
            rows = torch.arange(first + begin, first + end)
            if begin < end:
                o[rows], states = _chunk(tokens, rows, states, dtype, narrow)
            if end == stop:
                save(state, saved[n : n + 1], states)
        if length:
            save(state, runs.slot[n : n + 1], states)
    return o


def _broken(tokens: Tokens, first: int, length: int) -> list[int]:
    """Return the row that is the first of a sequence with a number that is not finite, and the one behind it.

    It is a chunk by itself: products of it with 0 would be NaN in rows before it.
    """
    rows = torch.arange(first, first + length)
    given = [x[rows].flatten(1) for x in (tokens.q, tokens.k, tokens.v, tokens.raw_g, tokens.raw_beta)]
    found = ~torch.cat([x.isfinite() for x in given], dim=1).all(dim=1)
    return [at + behind for at in found.nonzero().flatten().tolist()[:1] for behind in (0, 1)]


def _pieces(length: int, chunk: int, stops: Iterable[int]) -> list[tuple[int, int]]:
    """Return where chunks begin and end; one ends at each of ``stops``, which may stand before the first token."""
    ends = sorted({*range(chunk, length, chunk), length, *(stop for stop in stops if 0 <= stop <= length)})
    return list(pairwise((0, *ends)))


def _chunk(
    tokens: Tokens, rows: Tensor, states: Tensor, dtype: torch.dtype, narrow: Narrow
) -> tuple[Tensor, Tensor]:
    """Return o ``[C, H, V]`` and the state ``[1, H, K, V]`` after some rows of one sequence."""
    q, k, v, _, beta = tokens.at(rows, dtype)
    total = _log_decay(tokens, rows, dtype).cumsum(0)
    size = rows.numel()
    before = torch.ones(size, size, dtype=torch.bool).tril()
    apart = (total[:, None] - total[None]).masked_fill(~before[..., None, None], -torch.inf).exp()
    A = narrow(torch.einsum("thk,jhk,tjhk->htj", k, k, apart)).tril(-1)
    B = narrow(torch.einsum("thk,jhk,tjhk->htj", q, k, apart)).tril()
    S = states[0]
    decayed = total.exp()
    free = v - torch.einsum("thk,hkv->thv", narrow(k * decayed), S)
    lower = beta.T[..., None] * A + torch.eye(size, dtype=dtype)
    given = (beta[..., None] * free).transpose(0, 1)
    u = narrow(torch.linalg.solve_triangular(lower, given, upper=False, unitriangular=True).transpose(0, 1))
    o = torch.einsum("thk,hkv->thv", narrow(q * decayed), S) + torch.einsum("htj,jhv->thv", B, u)
    last = narrow(k * (total[-1] - total).exp())
    S = decayed[-1][..., None] * S + torch.einsum("jhk,jhv->hkv", last, u)
    return o, S[None]


def _log_decay(tokens: Tokens, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if tokens.A_log is None or tokens.dt_bias is None:
        return tokens.raw_g[rows].to(dtype)
    return recurrence.gate(tokens.spec, tokens.raw_g[rows], tokens.A_log, tokens.dt_bias, dtype)
