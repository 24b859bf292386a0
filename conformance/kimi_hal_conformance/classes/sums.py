"""Index scores whose products are added as Hopper's matrix units add FP8: with few bits, none of them rounded.

Thirty-two products and the sum so far are brought to the exponent of the largest, cut to 13 fraction bits and added
(DeepSeek-V3's report, arXiv:2412.19437, measured about 14 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.reference import indexer
from kimi_hal_conformance.oracle import Answer, Question, answer

F64 = torch.float64
#: Products added at once, and fraction bits that are kept of each.
TOGETHER, BITS = 32, 13
#: Products held at once.
PRODUCTS = 1 << 22


def cut_dots(query: Tensor, keys: Tensor, bits: int = BITS) -> Tensor:
    """Return ``query [H, D] @ keys [n, D].T`` with sums of few bits; a NaN or an infinity stays one."""
    total = query.new_zeros((query.shape[0], keys.shape[0]))
    for first in range(0, query.shape[1], TOGETHER):
        some = slice(first, first + TOGETHER)
        terms = torch.cat((total[..., None], query[:, None, some] * keys[None, :, some]), dim=2)
        unit = torch.ldexp(torch.ones_like(total), torch.frexp(terms.abs().amax(2))[1] - 1 - bits)[..., None]
        cut = torch.where(terms.isfinite(), (terms / unit).trunc() * unit, terms)
        total = cut.sum(dim=2)
    return total


def scored(question: Question, bits: int = BITS) -> Sequence[Answer]:
    """Return ``indexer_logits`` in float64 with sums of few bits."""
    spec: Any = question.spec
    given = question.operands
    out = answer(question, F64).outputs["out"].clone()
    fmt = formats.index(spec.index)
    for part in indexer.parts(spec, given["block_table"], given["row_req"], given["row_len"], out.shape[1]):
        for row, count in zip(part.rows, part.counts, strict=True):
            query = fmt.decode_query(given["q"].view(torch.uint8)[[row]], given["q_scale"][[row]], F64)[0]
            step = max(1, PRODUCTS // query.numel())
            for first in range(0, count, step):
                last = min(first + step, count)
                keys, missing = indexer.read_keys(fmt, part.pages, first, last, given["cache"])
                dots = cut_dots(query, keys[: last - first], bits)
                scores = indexer.weighted(dots, given["weights"][row].to(F64))
                out[row, first:last] = scores.masked_fill(missing, -torch.inf)
    return [Answer({"out": out}, {})]


DERIVED: Mapping[str, Callable[[Question], Sequence[Answer]]] = {"indexer_logits": scored}
