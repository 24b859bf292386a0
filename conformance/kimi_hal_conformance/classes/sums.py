"""Index scores whose products are added as Hopper's matrix units add FP8: with few bits, none of them rounded.

Thirty-two products and the sum so far are brought to the exponent of the largest, cut to 13 fraction bits and added;
the sum is cut to 13 fraction bits of its own. A product's exponent is the sum of its factors' exponents. On an H200
that is so bit for bit (``benchmarks/results/h200/fp8_sums.json``); DeepSeek-V3's report, arXiv:2412.19437, measured
about 14 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.reference import indexer
from kimi_hal_conformance.oracle import HOST, Answer, Question, answer, moved

F64 = torch.float64
#: Products added at once, and fraction bits that are kept of each.
TOGETHER, BITS = 32, 13
#: Products held at once.
PRODUCTS = 1 << 22
#: Below the exponent of anything but 0, and the least to which anything is cut.
NOTHING, LEAST = -(1 << 20), -900
#: Where the exponent stands in a float64, its bias, and that of what is no number.
PLACE, BIAS, ALL = 52, 1023, 0x7FF
#: 1 as an FP8 element, and what a page's scales are where each is 1.
ONE = {"e4m3fn": 0x38, "e4m3fnuz": 0x40}
UNIT = {"f32": (0, 0, 128, 63), "pow2": (0, 0, 128, 63), "ue8m0x4": (127,) * 4}


def exponents(x: Tensor) -> Tensor:
    """Return ``⌊log₂|x|⌋`` of float64 numbers, of 0 and of what is no number less than any."""
    field = (x.view(torch.int64) >> PLACE) & ALL
    return torch.where((field == 0) | (field == ALL), NOTHING, field - BIAS)


def cut(x: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Cut numbers to some fraction bits of an exponent, towards 0; a NaN or an infinity stays one."""
    last = exponent.clamp(min=LEAST) - bits
    return (x * power(-last)).trunc_().mul_(power(last))


def power(exponent: Tensor) -> Tensor:
    """Return 2 to an exponent of a normal float64, exactly on any device."""
    return ((exponent + BIAS) << PLACE).view(F64)


def cut_dots(query: Tensor, keys: Tensor, bits: int = BITS) -> Tensor:
    """Return ``query [H, D] @ keys [n, D].T`` with sums of few bits; a NaN or an infinity stays one."""
    total = query.new_zeros((query.shape[0], keys.shape[0]))
    of_query, of_keys = exponents(query), exponents(keys)
    for first in range(0, query.shape[1], TOGETHER):
        some = slice(first, first + TOGETHER)
        terms = torch.cat((total[..., None], query[:, None, some] * keys[None, :, some]), dim=2)
        largest = (of_query[:, None, some] + of_keys[None, :, some]).amax(2).maximum(exponents(total))
        total = cut(terms, largest[..., None], bits).sum(dim=2)
        total = cut(total, exponents(total), bits)
    return total


def apart(fmt: formats.IndexFormat, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages of the same elements with scales of 1, and of the same scales with elements of 1.

    A unit that scales inside the product (MXFP4) has the elements as they are decoded, and no scale behind it.
    """
    elements, scales = cache.clone(), cache.clone()
    if fmt.element in ONE:
        begin = fmt.page * fmt.element_bytes
        unit = torch.tensor(UNIT[fmt.scale], dtype=torch.uint8, device=cache.device)
        elements[:, begin : fmt.page_bytes] = unit.repeat(fmt.page)
        scales[:, :begin] = ONE[fmt.element]
    return elements, scales


def scored(question: Question, bits: int = BITS) -> Sequence[Answer]:
    """Return ``indexer_logits`` in float64 with sums of few bits, computed where the oracle is."""
    spec: Any = question.spec
    given = moved(question.operands, question.oracle)
    out = answer(question, F64).outputs["out"].to(question.oracle, copy=True)
    fmt = formats.index(spec.index)
    elements, scales = apart(fmt, given["cache"])
    for part in indexer.parts(spec, given["block_table"], given["row_req"], given["row_len"], out.shape[1]):
        for row, count in zip(part.rows, part.counts, strict=True):
            query = fmt.decode_query(given["q"].view(torch.uint8)[[row]], given["q_scale"][[row]], F64)[0]
            step = max(1, PRODUCTS // query.numel())
            for first in range(0, count, step):
                last = min(first + step, count)
                keys, missing = indexer.read_keys(fmt, part.pages, first, last, elements)
                dots = cut_dots(query, keys[: last - first], bits)
                scores = indexer.weighted(dots, given["weights"][row].to(F64))
                if fmt.element in ONE:
                    scores *= indexer.read_keys(fmt, part.pages, first, last, scales)[0][: last - first, 0]
                out[row, first:last] = scores.masked_fill(missing, -torch.inf)
    return [Answer({"out": out.to(HOST)}, {})]


DERIVED: Mapping[str, Callable[[Question], Sequence[Answer]]] = {"indexer_logits": scored}
