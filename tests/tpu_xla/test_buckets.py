"""Calls on torch-xla's device in sizes of one bucket: the program is compiled once, and a size's padding once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla
import torch_xla.debug.metrics as metrics
from empty_cases import (
    INDEX,
    PLAIN,
    attended,
    attention,
    copied,
    indexed,
    prefilled,
    rows_of_scores,
    tensors,
    verified,
)

import kimi_hal as hal
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_tpu.xla.bridge import XLA

pytestmark = pytest.mark.usefixtures("tpu")
LIMITS = Limits(max_rows=8, max_reqs=8, rows_per_req=4, max_context=512, uniform=False, row_buckets=(8,))


def _verified(plan: Any, N: int) -> dict[str, Any]:
    given = verified(plan, N=N)
    return given | {"records": torch.zeros(8, given["records"].shape[1], dtype=torch.uint8)}


#: By what varies: an operator, its Spec, its operands of a size, sizes, and how often each call cuts its trace.
CASES: dict[str, tuple[str, Spec, Any, tuple[int, ...], list[int]]] = {
    "L": (
        "topk_select",
        TopKSpec(topk=4),
        lambda plan, n: rows_of_scores(8, n),
        (100, 101, 128, 100),
        [1, 1, 0, 1],
    ),
    "R": (
        "sparse_mla",
        attention("latent.bf16", "local"),
        lambda plan, n: attended("latent.bf16", R=n),
        (3, 4, 3),
        [1, 1, 1],
    ),
    "columns": (
        "indexer_logits",
        IndexerSpec(index=INDEX, num_heads=1),
        lambda plan, n: indexed(columns=n),
        (2, 3, 16, 3),
        [2, 2, 1, 2],
    ),
    "N": ("kda_prefill", PLAIN, lambda plan, n: prefilled(PLAIN, N=n), (3, 4, 3), [1, 0, 1]),
    "records": ("kda_verify", PLAIN, _verified, (5, 6, 8, 5), [2, 2, 0, 2]),
}


def compilations() -> int:
    torch_xla.sync(wait=True)
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


@pytest.mark.parametrize("what", sorted(CASES))
def test_sizes_of_one_bucket_share_a_program(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, spec, operands, sizes, expected_cuts = CASES[what]
    cuts: list[int] = []
    own = XLA.cut
    monkeypatch.setattr(XLA, "cut", lambda machine: (cuts.append(1), own(machine)))

    def called(size: int, place: str, implementation: str) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(size)
        plan = plans[implementation]
        given = copied_all(operands(lambda *_: plan, size), place)
        before = compilations()
        returned = plan.run(**given)
        count = compilations() - before
        written = [given[name] for name in get(operator).mutated if name != "records"]
        return tensors(returned) + tensors(written), count

    plans = {
        "tpu.xla": hal.plan(operator, spec, LIMITS, device="xla", implementation="tpu.xla"),
        "reference.torch": hal.plan(operator, spec, LIMITS, device="cpu", implementation="reference.torch"),
    }
    counts = []
    for size in sizes:
        mine, count = called(size, "xla", "tpu.xla")
        his, _ = called(size, "cpu", "reference.torch")
        for found, expected in zip(mine, his, strict=True):
            if operator == "indexer_logits":  # a row has 100 keys, and what is behind them may be anything
                found, expected = found[:, :100], expected[:, :100]
            torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=1e-4, equal_nan=True)
        counts.append((count, len(cuts)))
        cuts.clear()
    assert [cut for _, cut in counts] == expected_cuts
    first, *later = counts
    assert first[0] <= 1 + first[1]  # the program, and what its sizes alone need before and behind it
    assert all(
        count <= max(1, cut) for count, cut in later
    )  # a call that cuts nothing has what it writes in it
    assert later[-1][0] == 0


def copied_all(given: dict[str, Any], place: str) -> dict[str, Any]:
    return {name: copied(value, place) for name, value in given.items()}
