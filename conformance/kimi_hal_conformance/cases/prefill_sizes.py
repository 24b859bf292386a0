"""Sizes that a prefill has and no step of decode: long sequences, many rows, an expert's tokens, keys behind 2^17.

Widths are tiny, so that what is computed stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.cases.indexer import score_operands
from kimi_hal_conformance.cases.kda import conv_operands, prefill_operands
from kimi_hal_conformance.cases.moe import expert_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands

#: Tokens of one sequence: 4,096, which many kernels are tuned for, and three more.
SEQUENCE = 4099
#: Rows of one call, more than 1,024 and no multiple of 8.
ROWS = 1030
#: Tokens of one expert.
TOKENS = 1100
#: Keys of one row: one more than 2^17, on a page that holds nothing else.
KEYS = (1 << 17) + 1
LIMITS = Limits(max_rows=1 << 13, max_reqs=8, max_context=1 << 18)
INDEX = "index.fp8.e4m3fn.pow2.page64"


def last_keys_best(make: Make) -> Make:
    """Return the operands with positive weights: some of the best scores then stand among the last keys."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        return operands | {"weights": operands["weights"].abs()}

    return wrapped


def case(operator: str, label: str, spec: Any, make: Make, why: str) -> Case:
    """Return a case of the standard profile."""
    return Case(f"{operator}/prefill/{label}", operator, spec, LIMITS, make, since=STANDARD, fault=9, why=why)


def cases() -> Iterator[Case]:
    """One of each size for every operator that it is an operator's own size of."""
    kda = KDASpec(num_heads=1, head_dim=4)
    long = "A sequence longer than 4,096 tokens: its last chunk goes on from all the ones before."
    yield case("kda_prefill", "sequence4099", kda, prefill_operands(kda, (SEQUENCE,)), long)
    yield case("kda_conv", "sequence4099", kda, conv_operands(kda, (SEQUENCE,)), long)
    attend = SparseMLASpec(num_heads=1, latent="latent.fp8.e4m3fn.tensor", topk=4, index_space="position")
    many = "More than 1,024 rows in one call: the last are like the first."
    yield case("sparse_mla", "rows1030", attend, attention_operands(attend, ROWS, 4, 200), many)
    experts = MoESpec(num_experts=2, num_local=2, topk=1, hidden=32, intermediate=32)
    crowded = "More than 1,024 tokens of one expert, and none of another: several tiles of rows."
    yield case("moe_experts", "one-expert1100", experts, expert_operands(experts, TOKENS, only=(1,)), crowded)
    far = "A row of more than 131,072 keys: positions behind 17 bits count, and are selected."
    scored, chosen = IndexerSpec(index=INDEX, num_heads=1), IndexerTopKSpec(index=INDEX, num_heads=1, topk=64)
    yield case("indexer_logits", "keys131073", scored, score_operands(scored, (KEYS,), 1), far)
    yield case("indexer_topk", "keys131073", chosen, last_keys_best(score_operands(chosen, (KEYS,), 1)), far)


add(cases())
