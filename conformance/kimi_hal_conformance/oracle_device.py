"""Where the oracle runs: on the device on trial where that computes in float64, and then checked against the host."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kimi_hal_conformance.case import hash_text
from kimi_hal_conformance.oracle import HOST, Question, answer

#: One question in so many is also answered on the host.
ONE_IN = 8
#: What sums of float64 in another order may differ by, as a share of the largest entry.
SLACK = 1e-9


@lru_cache(maxsize=8)
def place(device: str) -> str:
    """Return the device itself if it computes in float64 as the host does, else the host."""
    if torch.device(device).type == HOST:
        return HOST
    try:
        ones = torch.full((3, 3), 1.0 + 2.0**-40, dtype=torch.float64, device=device)
        right = torch.equal((ones @ ones).cpu(), ones.cpu() @ ones.cpu())
    except Exception:  # a device without float64 raises as it likes
        return HOST
    return device if right else HOST


def disagreement(question: Question) -> list[str]:
    """Say where the oracle's answer on a device is not the host's, for a sample of the questions."""
    name = f"{question.op.name} {question.spec.key()}"
    if question.oracle == HOST or hash_text(name) % ONE_IN:
        return []
    there, here = (
        answer(replace(question, oracle=where), torch.float64) for where in (question.oracle, HOST)
    )
    pairs = [(n, there.outputs[n], t) for n, t in here.outputs.items()]
    pairs += [(n, there.mutated[n], t) for n, t in here.mutated.items()]
    told = f"the oracle on {question.oracle} is not the host's"
    return [f"{n}: {told}" for n, got, wanted in pairs if not _alike(got, wanted)]


def _alike(got: Tensor, wanted: Tensor) -> bool:
    """Compare discrete tensors exactly and float64 within what another order of summation gives."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.is_floating_point() or not got.numel() or got.element_size() == 1:
        return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)) if got.numel() else True
    finite = wanted.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(wanted.isnan(), got.isnan()):
        return False
    if not bool(finite.any()):
        return True
    close = (got[finite] - wanted[finite]).abs().max() <= SLACK * wanted[finite].abs().max()
    return bool(close)
