"""Index scores that are rounded to bfloat16 although the Spec says float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kimi_hal.reference import composites
from kimi_hal_conformance.oracle import Answer, Question, answer

F64 = torch.float64


def _logits(question: Question) -> Sequence[Answer]:
    out = answer(question, F64).outputs["out"]
    return [Answer({"out": out.float().to(torch.bfloat16).to(F64)}, {})]


def _dsa_decode(question: Question) -> Sequence[Answer]:
    """Select over rounded scores, and attend to what that selects."""
    spec: Any = question.spec
    merge = spec.merge and dataclasses.replace(spec.merge, score="bfloat16")
    narrow = dataclasses.replace(
        spec, indexer=dataclasses.replace(spec.indexer, score="bfloat16"), merge=merge
    )
    parts = composites.reference_parts("dsa_decode", narrow, F64, question.group)
    group = question.group if spec.dcp.world > 1 else None
    out, lse = composites.compose_dsa_decode(narrow, parts, group)(**question.operands)
    return [Answer({"out": out, "lse_out": lse}, {})]


#: ``indexer_topk`` is judged by its scores: those of ``indexer_logits`` (``selections.py``).
DERIVED: Mapping[str, Callable[[Question], Sequence[Answer]]] = {
    "indexer_logits": _logits,
    "dsa_decode": _dsa_decode,
}
