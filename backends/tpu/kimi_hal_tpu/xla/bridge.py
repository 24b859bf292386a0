"""Runs traced programs on the device that torch-xla drives: a TPU, or its CPU device where operands are on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import PlanError
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import require
from kimi_hal_tpu import requirements
from kimi_hal_tpu.static import BYTES, StaticCall, apart, kind, on_host, operator, place, refuse_dynamic
from kimi_hal_tpu.xla.exchange import TRACE, Exchange

#: A program: Spec, tensors by name -> outputs, then mutated operands.
Program = Callable[..., Sequence[Tensor]]


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Build any operator whose program stands in ``xla/<family>.py`` under the operator's name.

    Raises:
        ImportError: torch-xla is not installed.
        ToolMissingError: it is not for this torch.
        PlanError: the plan is interpreted, and torch-xla drives another device than its CPU.
    """
    requirements.check_torch_xla()
    if on_host(ctx):
        check_interpreter(ctx.operator)
    op = operator(ctx)
    if op.listed:
        return prepared
    family = import_module(f"kimi_hal_tpu.xla.{op.family}")
    run = _call(ctx, getattr(family, op.name)).function()
    if op.tested:
        run.return_scores = _test_entry(ctx, run, family)  # type: ignore[attr-defined]
    return run


def check_interpreter(operator: str) -> None:
    """Have torch-xla drive its CPU, on which programs are interpreted, where nothing else is said.

    Raises:
        PlanError: ``PJRT_DEVICE`` says otherwise.
    """
    device = os.environ.setdefault("PJRT_DEVICE", "CPU")
    if device != "CPU":
        raise PlanError(
            f"{operator}: interpreted programs run on torch-xla's CPU device, and PJRT_DEVICE={device} has torch-xla "
            "drive another one in this process: PJRT_DEVICE=CPU before torch_xla is used"
        )


def _call(ctx: BuildContext, program: Program) -> StaticCall:
    """Return a program's call. On the device FP8 becomes bytes inside the trace, which a plain view would leave."""
    return StaticCall(operator(ctx), ctx, XLA(ctx, program), coded=not on_host(ctx))


def prepared(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *, donate: bool = False
) -> list[Tensor]:
    """Return the checkpoint's own bytes; copies unless they are donated."""
    tensors = [w13, w13_scale, w2, w2_scale]
    return tensors if donate else [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


class XLA:
    """Traces a program on padded operands, and runs it where they come from the host."""

    def __init__(self, ctx: BuildContext, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.op = operator(ctx)
        self.on_host = on_host(ctx)

    def run(self, operands: dict[str, Any], rows: int | None = None) -> list[Tensor]:
        """Return the program's results: on the CPU if the operands were, else traced."""
        import torch_xla

        from kimi_hal_tpu.xla.tracing import Traced

        for name, value in operands.items():
            tensors = [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
            refuse_dynamic(self.op, {f"{name}.shape": size for t in tensors for size in t.shape})
        device = torch_xla.device()
        context = {"group": self._exchange(rows)} if self.op.grouped else {}
        # torch-xla's scan differentiates what it traces, which inference mode forbids.
        with TRACE, torch.inference_mode(False), torch.no_grad(), on_the_cpu():
            with Traced():
                moved = {name: _moved(value, device) for name, value in operands.items()}
                results = list(self.program(self.ctx.spec, moved, **context))
            if not self.on_host:
                return results
            torch_xla.sync(wait=True)
            return [result.cpu() for result in results]

    def cut(self) -> None:
        """Run what is traced, without waiting for it."""
        import torch_xla

        with TRACE:
            torch_xla.sync()

    def _exchange(self, rows: int | None) -> Exchange | None:
        """Return the ranks that a program meets with its real rows; ``None`` where it is alone."""
        alone = ownership.of_keys(self.ctx.spec.dcp).world == 1
        if self.op.name == "all_gather":
            alone = self.ctx.spec.dcp.world == 1
        if alone:
            return None
        group = require(self.ctx.group, self.ctx.spec.dcp)
        return Exchange(group, self.on_host or group.device.type != "xla", rows)


def on_the_cpu() -> AbstractContextManager[Any]:
    """Return what keeps torch-xla's placeholders of steps where it expects them, whatever the default device is."""
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.view(torch.uint8) if str(value.dtype).removeprefix("torch.") in BYTES else value


def _test_entry(ctx: BuildContext, run: Callable[..., Any], family: Any) -> Callable[..., Any]:
    """Return the run function of ``indexer_topk`` that also writes all scores."""
    op = operator(ctx)
    call = _call(ctx, family.all_scores)

    def entry(*args: Any, **keywords: Any) -> Any:
        buffer = keywords.pop("all_scores_out")
        results = run(*args, **keywords)
        bound = op.signature.bind(*args, **keywords)
        bound.apply_defaults()
        given = dict(bound.arguments)
        (found,) = call.staged(given)
        place(buffer, found)
        return (*results, buffer)

    return apart(entry, views=kind(ctx) == "xla")
