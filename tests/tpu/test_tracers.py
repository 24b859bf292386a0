"""Tracers that are not ``torch.compile``: a call is refused before anything reads what an operand has not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from static_calls import Recorded, called
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kimi_hal.errors import ContractError
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec

SCORES, LENGTHS = torch.zeros(3, 8), torch.full((3,), 8, dtype=torch.int32)
SYMBOL = (
    " is a dynamic shape, and a TPU program is compiled for one shape: pass sizes that are numbers, padded to "
    "Limits.row_buckets; or trace plan.op"
)
NO_NUMBERS = (
    "of a tracer and holds no numbers, on which a TPU program runs: "
    "call it outside of the tracer; or trace plan.op"
)


def run(scores: Tensor, lengths: Tensor) -> Any:
    machine = Recorded(torch.zeros(8, 4, dtype=torch.int32), torch.zeros(8, 0))
    return called("topk_select", TopKSpec(topk=4), Limits(max_rows=8, max_reqs=2), "cpu", machine).function()(
        scores, lengths
    )


class Module(torch.nn.Module):
    def forward(self, scores: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = run(scores + 0, lengths)[0]
        return found


def exported(dynamic: bool) -> None:
    rows = torch.export.Dim("T", min=2, max=8)
    shapes = {"scores": {0: rows}, "lengths": {0: rows}} if dynamic else None
    torch.export.export(Module(), (SCORES, LENGTHS), dynamic_shapes=shapes, strict=False)


def symbolic() -> None:
    make_fx(lambda s, n: run(s, n)[0], tracing_mode="symbolic")(SCORES, LENGTHS)


def fake() -> None:
    mode = FakeTensorMode()
    run(mode.from_tensor(SCORES), mode.from_tensor(LENGTHS))


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (fake, f"scores is a FakeTensor {NO_NUMBERS}"),
        (lambda: exported(False), f"scores is a FakeTensor {NO_NUMBERS}"),
        (lambda: exported(True), f"scores.shape[0]=s, row_len.shape[0]=s{SYMBOL}"),
        (symbolic, f"scores.shape[0]=s, scores.shape[1]=s, row_len.shape[0]=s{SYMBOL}"),
        (
            lambda: torch.vmap(lambda s: run(s[None], LENGTHS[:1])[0])(SCORES),
            "scores is one row of torch.vmap's batch: call it on the whole batch",
        ),
    ],
    ids=["fake", "export", "export-dynamic", "make_fx", "vmap"],
)
def test_a_tracers_operands_are_refused_by_name(trace: Any, said: str) -> None:
    with pytest.raises(ContractError) as error:
        trace()
    words = re.sub(r"=s\d+", "=s", str(error.value))
    assert words == f"topk_select: {said}"


def test_jits_tracer_is_told_too() -> None:
    with pytest.raises(ContractError) as error:
        torch.jit.trace(Module(), (SCORES, LENGTHS), check_trace=False)
    assert str(error.value) == (
        "topk_select: scores.shape[0]=3, scores.shape[1]=8, row_len.shape[0]=3" + SYMBOL
    )
