"""What stands around a call: inference mode, as engines call, and another default device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import empty_cases
from empty_cases import EXPERTS, KDA, PLAIN, Case, always, attended, attention, ran, some

from kimi_hal.ops.all_gather import GatherSpec

PREFILL: Case = ("kda_prefill", KDA, always(lambda: empty_cases.prefilled(KDA)))
CASES: dict[str, Case] = {
    "kda_prefill": PREFILL,
    "kda_commit": ("kda_commit", PLAIN, empty_cases.committed),
    "store_latent": (
        "store_latent",
        empty_cases._STORE_LATENT,
        always(lambda: empty_cases._stored_latent(8, 2)),
    ),
    "sparse_mla": (
        "sparse_mla",
        attention("latent.bf16", "local"),
        always(lambda: attended("latent.bf16", R=3)),
    ),
    "all_gather": (
        "all_gather",
        GatherSpec(layout="token_order", dtype="float32"),
        always(lambda: {"x": torch.randn(8, 3)}),
    ),
}
#: Operators with loops whose steps are traced apart.
LOOPS: dict[str, Case] = {
    "kda_prefill": PREFILL,
    "moe_experts": (
        "moe_experts",
        EXPERTS,
        lambda plan: (
            empty_cases.routed(plan)
            | {
                "x": some(8, 64),
                "topk_weights": torch.rand(8, 2),
                "topk_ids": torch.tensor([[0, 1], [1, 3]] * 4, dtype=torch.int32),
            }
        ),
    ),
}


def same(case: Case, device: str, around: Callable[[], AbstractContextManager[object]]) -> None:
    """Compare a call inside of a context with the reference outside of it."""
    operator, spec, operands = case

    def inside(plan: Callable[..., object]) -> dict[str, object]:
        found = operands(plan)
        stack.enter_context(around())
        return found

    with ExitStack() as stack:
        mine = ran((operator, spec, inside), "tpu.xla", device)
    his = ran(case, "reference.torch", "cpu")
    assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in his]
    for found, expected in zip(mine, his, strict=True):
        atol = 5e-3 * float(expected.float().abs().max())
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_call_in_inference_mode_gives_what_any_call_gives(name: str, device: str) -> None:
    same(CASES[name], device, torch.inference_mode)


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_another_default_device_changes_nothing(name: str, device: str) -> None:
    same(LOOPS[name], device, lambda: torch.device("meta"))
