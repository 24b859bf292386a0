"""A device without memory: what cannot allocate its results says so and returns none, what is given all needs none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graph_calls import calls, fitting, poisoned, same, scratch

from kimi_hal.dispatch.capture import tensors_of
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D = "cuda"
KERNELS = [
    pytest.param(i.operator, f"nvidia.{i.name}", id=f"{i.operator}-{i.name}")
    for i in IMPLEMENTATIONS
    if i.operator not in ("topk_merge", "all_gather") and "native" in i.execution and i not in ADAPTERS
]
COMPOSED = pytest.param("dsa_decode", "nvidia.composed", id="dsa_decode-composed")
#: What they write is an operand: there is nothing to allocate.
WRITERS = ("store_index_keys", "store_latent")
RESULTS = [*(p for p in KERNELS if p.values[0] not in WRITERS), COMPOSED]


@contextmanager
def no_memory() -> Iterator[None]:
    """Take all that torch's allocator has, and let it ask the device for no more."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(D).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken, size = [], 1 << 28
    while size >= 512:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=D))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def alike(operator: str, operands: dict[str, Any], one: Any, other: Any) -> bool:
    """Tell whether results have the same bits, where a call writes: scores behind a row's keys are what memory held."""
    pairs = [dict(enumerate(tensors_of([result]))) for result in (one, other)]
    if operator == "indexer_logits":
        for (scores,) in (found.values() for found in pairs):
            behind = torch.arange(scores.shape[1], device=D) >= operands["row_len"][:, None]
            scores.masked_fill_(behind, 0.0)
    return same(*({str(n): t for n, t in found.items()} for found in pairs))


@pytest.mark.parametrize(("operator", "implementation"), RESULTS)
def test_a_call_that_cannot_allocate_returns_nothing_and_the_next_one_is_right(
    operator: str, implementation: str
) -> None:
    case, plan = fitting(operator, implementation, D)
    first, operands = next(calls(case, D)), next(calls(case, D))
    wanted = plan.run(**first)
    with no_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        plan.run(**operands)
    assert alike(operator, operands, plan.run(**operands), wanted)
    assert same(operands, first)  # states, which a call that failed has not changed


@pytest.mark.parametrize(("operator", "implementation"), RESULTS)
def test_without_room_for_a_workspace_no_output_is_begun(operator: str, implementation: str) -> None:
    case, plan = fitting(operator, implementation, D)
    operands = next(calls(case, D))
    plan.run(**next(calls(case, D)))
    given, untouched = poisoned(plan, operands), poisoned(plan, operands)
    if plan.workspace_bytes or operator == "dsa_decode":  # what stands between its parts is allocated too
        with no_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            plan.run(**operands, **given)
        assert same(given, untouched)
    else:
        with no_memory():
            plan.run(**operands, **given)
        assert not same(given, untouched)


@pytest.mark.parametrize(("operator", "implementation"), KERNELS)
def test_a_call_that_is_given_all_needs_no_memory(operator: str, implementation: str) -> None:
    case, plan = fitting(operator, implementation, D)
    operands, again = (next(calls(case, D)) for _ in range(2))
    given, wanted, room = poisoned(plan, operands), poisoned(plan, operands), scratch(plan)
    plan.run(**operands, **wanted, **room)
    with no_memory():
        plan.run(**again, **given, **room)
    torch.cuda.synchronize()
    assert same(given, wanted)
    assert same(operands, again)
