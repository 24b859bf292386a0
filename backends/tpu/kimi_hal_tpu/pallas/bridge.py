"""From torch to the Pallas kernels and back, through dlpack: the kernels run interpreted, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import PlanError
from kimi_hal_tpu import requirements
from kimi_hal_tpu.static import StaticCall, operator, refuse_dynamic

#: A program: Spec, arrays by name, mode -> outputs, then mutated operands.
Program = Callable[..., Sequence[Any]]


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Build any operator whose program stands in ``pallas/<family>.py`` under the operator's name.

    Raises:
        PlanError: jax or libtpu is not the pinned one, or the plan is not for the CPU.
    """
    requirements.check_jax()
    if ctx.device != "cpu":
        raise PlanError(
            f"{ctx.operator}: tpu.pallas runs interpreted on the CPU so far, not on {ctx.device}; "
            f"KIMI_HAL_OPS={ctx.operator}=tpu.xla takes the program that torch-xla traces"
        )
    op = operator(ctx)
    family = import_module(f"kimi_hal_tpu.pallas.{op.family}")
    run = StaticCall(op, ctx, JaxCPU(getattr(family, op.name), ctx.spec, op)).function()
    if op.tested:
        run.return_scores = _test_entry(ctx, run, family)  # type: ignore[attr-defined]
    return run


class JaxCPU:
    """Runs a program in the TPU simulator, one traced program a shape."""

    def __init__(self, program: Program, spec: Any, op: Any) -> None:
        import jax

        from kimi_hal_tpu.pallas.mode import Mode

        self.op = op
        mode = Mode(simulated=True)
        self.jitted = jax.jit(lambda arrays: tuple(program(spec, arrays, mode)))

    def run(self, operands: dict[str, Any]) -> list[Tensor]:
        """Run on torch tensors on the CPU; returns torch tensors."""
        refuse_dynamic(self.op, {f"{n}.shape": s for n, t in operands.items() for s in t.shape})
        arrays = {name: to_jax(tensor) for name, tensor in operands.items()}
        results = [to_torch(array) for array in self.jitted(arrays)]
        if races_found():
            raise PlanError(
                f"{self.op.name}: the TPU simulator found a race in tpu.pallas; its results mean nothing"
            )
        return results


def races_found() -> bool:
    """Tell whether the simulator saw a race in the kernel that it ran last."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # it has no public name

    return bool(interpret_pallas_call.races and interpret_pallas_call.races.races_found)


def to_jax(tensor: Tensor) -> Any:
    """Return a tensor's bytes as a jax array; no memory is shared, so that neither sees the other's writes."""
    import jax.numpy as jnp

    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    if not tensor.numel():
        return jnp.zeros(tuple(tensor.shape), jnp.from_dlpack(torch.zeros(1, dtype=tensor.dtype)).dtype)
    if tensor.dtype == torch.int64:  # jax has 32-bit integers here; no place in a cache needs more
        tensor = tensor.clamp(-(1 << 31), (1 << 31) - 1).int()
    return jnp.from_dlpack(tensor.clone(memory_format=torch.contiguous_format))


def to_torch(array: Any) -> Tensor:
    """Return a jax array as a torch tensor."""
    if not array.size:
        return torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype)))
    return torch.from_dlpack(array)


def _test_entry(ctx: BuildContext, run: Callable[..., Any], family: Any) -> Callable[..., Any]:
    """Return the run function of ``indexer_topk`` that also writes all scores."""
    op = operator(ctx)
    scores = JaxCPU(family.all_scores, ctx.spec, op)
    call = StaticCall(op, ctx, scores)

    def entry(*args: Any, **keywords: Any) -> Any:
        buffer = keywords.pop("all_scores_out")
        results = run(*args, **keywords)
        bound = op.signature.bind(*args, **keywords)
        bound.apply_defaults()
        given: Mapping[str, Any] = bound.arguments
        (found,) = call.staged(given)
        from kimi_hal_tpu.static import place

        place(buffer, found)
        return (*results, buffer)

    return entry
