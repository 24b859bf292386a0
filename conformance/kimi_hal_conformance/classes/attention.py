"""What is rounded around a product, or in its sum, in sparse attention and in the step that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import minifloat
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.reference import composites, sparse_mla
from kimi_hal_conformance.classes import experts, sums
from kimi_hal_conformance.oracle import Answer, Question

F64 = torch.float64
#: Kernels differ in what they subtract before the exponential (a row's maximum, a block's, a running one), and so
#: in where on the grid of the narrow type a probability falls.
FACTORS = (1.0, 1.2, 1.45, 1.7)
Narrow = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


def bf16(p: Tensor, factor: float) -> Tensor:
    """Round probabilities to bfloat16, relative to a maximum that is ``factor`` smaller."""
    return (p * factor).to(torch.bfloat16).to(F64) / factor


def exact(x: Tensor) -> Tensor:
    """Round nothing."""
    return x


def fp8(p: Tensor, factor: float) -> Tensor:
    """Round probabilities to e4m3fn as they are, the largest near 1: small ones vanish."""
    codes = minifloat.encode((p * factor).float(), minifloat.E4M3FN)
    return minifloat.decode(codes, minifloat.E4M3FN, F64) / factor


BF16: Sequence[Narrow] = tuple(partial(bf16, factor=f) for f in FACTORS)
FP8: Sequence[Narrow] = tuple(partial(fp8, factor=f) for f in FACTORS)


def attended(
    spec: SparseMLASpec,
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    index_len: Tensor | None = None,
    block_table: Tensor | None = None,
    row_req: Tensor | None = None,
    *,
    narrow: Narrow = exact,
    key: Narrow = exact,
    query: Narrow = exact,
    product: Product = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """Return ``sparse_mla`` in float64, probabilities narrowed for the value product alone, keys for both.

    ``query`` narrows the latent part of queries, ``product`` makes both products.
    """
    out = q.new_zeros((q.shape[0], spec.num_heads, spec.kv_rank), dtype=F64)
    lse = q.new_full((q.shape[0], spec.num_heads), -torch.inf, dtype=F64)
    scale = spec.softmax_scale * (1.0 if q_scale is None else float(q_scale))
    index = sparse_mla.live_indices(indices, index_len)
    slots = sparse_mla.physical_slots(spec, cache, index, block_table, row_req)
    for row, chosen in enumerate(slots):
        chosen = chosen[chosen >= 0]
        if not chosen.numel():
            continue
        keys = formats.latent(spec.latent).read(cache, spec.page, chosen, k_scale, dtype=F64)
        if key is not exact:
            keys = key(keys * scales_narrowed(spec, cache, chosen, k_scale, key))
        wide = q[row].to(F64)
        wide = torch.cat((query(wide[:, : spec.kv_rank]), wide[:, spec.kv_rank :]), dim=1)
        logits = product(wide, keys.T) * scale
        top = sparse_mla.finite_base(logits.amax(dim=1))
        weights = torch.exp(logits - top[:, None])
        total = weights.sum(dim=1)
        values = product(narrow(weights), keys[:, : spec.kv_rank])
        out[row] = values / sparse_mla.denominator(total)[:, None]
        lse[row] = sparse_mla.log_sum(logits.amax(dim=1), total)
    return out, lse if spec.return_lse else lse[:, :0]


def scales_narrowed(
    spec: SparseMLASpec, cache: Tensor, slots: Tensor, k_scale: Tensor | None, key: Narrow
) -> Tensor:
    """Return what narrowing each key's scales multiplies its elements by, ``[n, 576]`` or ``[1]``."""
    if k_scale is not None:
        return key(k_scale.to(F64)) / k_scale.to(F64)
    scale = formats.latent(spec.latent).scales(cache, spec.page, slots).to(F64)
    narrow = torch.where(scale.isfinite() & (scale != 0), key(scale) / scale, 1.0)
    factor = torch.ones(slots.shape[0], spec.kv_rank + spec.pe_dim, dtype=F64)
    factor[:, : spec.kv_rank] = narrow.repeat_interleave(spec.kv_rank // scale.shape[1], dim=1)
    return factor


def of(
    ways: Sequence[Callable[..., Tensor]], what: str = "narrow"
) -> Mapping[str, Callable[[Question], Sequence[Answer]]]:
    """Return the derivations of a class that does one of these to ``what``, a keyword of ``attended``."""
    return {
        "sparse_mla": lambda question: [_sparse_mla(question, **{what: way}) for way in ways],
        "dsa_decode": lambda question: [_dsa_decode(question, **{what: way}) for way in ways],
    }


def _sparse_mla(question: Question, **way: Any) -> Answer:
    spec: Any = question.spec
    out, lse = attended(spec, **question.operands, **way)
    return Answer({"out": out, "lse_out": lse}, {})


def _dsa_decode(question: Question, **way: Any) -> Answer:
    spec: Any = question.spec
    parts = dict(composites.reference_parts("dsa_decode", spec, F64, question.group))
    parts["sparse_mla"] = partial(attended, spec.attn, **way)
    group = question.group if spec.dcp.world > 1 else None
    out, lse = composites.compose_dsa_decode(spec, parts, group)(**question.operands)
    return Answer({"out": out, "lse_out": lse}, {})


def cut_product(a: Tensor, b: Tensor, bits: int = sums.BITS) -> Tensor:
    """Return ``a @ b`` with sums of few bits."""
    return sums.cut_dots(a, b.T.contiguous(), bits)


#: Keys rounded: there is one way.
KEYS = of((partial(bf16, factor=1.0),), "key")
#: Queries in blocks of 128, with the scale ``amax / 448``.
QUERIES = of((experts.fp8_block,), "query")
PRODUCTS = of((cut_product,), "product")
