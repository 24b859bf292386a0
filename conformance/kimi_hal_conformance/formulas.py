"""Other float32 formulas of the same function, where kernels compute by them and not as the reference does.

A prefill by chunks decays by differences of a running sum of logarithms. The sum reaches 5 a token, and its last bit
is an error of every decay that is formed from it: no float32 kernel that works by chunks is without it.
"""

from __future__ import annotations

from functools import partial

import torch

from kimi_hal_conformance.classes import chunked, recurrence
from kimi_hal_conformance.oracle import Answer, Question

#: Tokens of a chunk: what kernels take.
CHUNK = 64


def others(question: Question) -> list[Answer]:
    """Return the answer by each other formula, in float32; none for most operators."""
    if question.op.name != "kda_prefill":
        return []
    by_chunks = partial(chunked.kda_prefill, dtype=torch.float32, chunk=CHUNK)
    return list(recurrence.of(by_chunks, torch.float32)["kda_prefill"](question))
