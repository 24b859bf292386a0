"""From torch to the Pallas kernels and back, whatever holds the tensors.

* On the CPU the kernels run interpreted; arrays go to jax and back through dlpack.
* On torch-xla's device a program is a computation in the trace (``custom_call``).
* On torch_tpu's device it is one of its operators (``jax_op``).

Each of the three is imported where a plan needs it, after its versions are checked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import PlanError
from kimi_hal.ops.operator import Operator
from kimi_hal_tpu import requirements
from kimi_hal_tpu.pallas.operands import Program
from kimi_hal_tpu.pallas_claims import BY_TORCH_XLA, ON_SPARSE_CORE
from kimi_hal_tpu.static import Machine, StaticCall, apart, kind, on_host, operator, place, refuse_dynamic

#: What becomes of a program on a kind of device: its versions checked, then what runs it.
Machines = Callable[[BuildContext, Operator, str], Machine]


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Build any operator whose program stands in ``pallas/<family>.py`` under the operator's name.

    Raises:
        ImportError: jax, or what drives the device, is not installed.
        ToolMissingError: their versions do not belong together, or cannot compile this operator's kernels.
        PlanError: torch-xla drives no TPU.
    """
    op = operator(ctx)
    machine = MACHINES[kind(ctx)]

    def call(name: str) -> StaticCall:
        device = not on_host(ctx)
        return StaticCall(op, ctx, machine(ctx, op, name), coded=device)

    run = call(op.name).function()
    if op.tested:
        run.return_scores = _test_entry(op, run, call("all_scores"))  # type: ignore[attr-defined]
    return run


def program(op: Operator, name: str) -> Program:
    """Return an operator's program."""
    found: Program = getattr(import_module(f"kimi_hal_tpu.pallas.{op.family}"), name)
    return found


def interpreted(ctx: BuildContext, op: Operator, name: str) -> Machine:
    """Return the simulator."""
    requirements.check_jax()
    check_simulator(op.name)
    return JaxCPU(program(op, name), ctx.spec, op)


def check_simulator(operator: str) -> None:
    """Refuse an environment in which jax has no CPU to play a TPU on.

    Raises:
        PlanError: ``JAX_PLATFORMS`` names others alone.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        raise PlanError(
            f"{operator}: the TPU simulator runs on jax's CPU, and JAX_PLATFORMS={platforms} leaves it out: "
            "JAX_PLATFORMS=cpu before jax is used"
        )


def in_torch_xla(ctx: BuildContext, op: Operator, name: str) -> Machine:
    """Return torch-xla's trace."""
    requirements.check_torch_xla()
    requirements.check_custom_call()
    if op.name in ON_SPARSE_CORE:
        raise requirements.without_sparse_core(f"{op.name}: a part of tpu.pallas")
    if op.name not in BY_TORCH_XLA:
        raise requirements.without_part_tiles(op.name)
    from kimi_hal_tpu.pallas import custom_call

    if not custom_call.on_tpu():
        raise PlanError(
            f"{op.name}: torch-xla drives no TPU here (an importable libtpu is none), and Mosaic's kernels run on "
            f"nothing else; KIMI_HAL_OPS={op.name}=tpu.xla takes the program that torch-xla traces"
        )
    return custom_call.CustomCall(program(op, name), ctx.spec, op, ctx.arch)


def in_torch_tpu(ctx: BuildContext, op: Operator, name: str) -> Machine:
    """Return torch_tpu's operator."""
    requirements.check_jax_op()
    from kimi_hal_tpu.pallas.jax_op import JaxOp

    return JaxOp(program(op, name), ctx.spec, op, ctx.arch)


#: Held while a program is interpreted and its races are read: jax's simulator has one memory a process.
SIMULATOR = threading.Lock()
#: By torch's name of the device.
MACHINES: Mapping[str, Machines] = {"cpu": interpreted, "xla": in_torch_xla, "tpu": in_torch_tpu}


class JaxCPU:
    """Runs a program in the TPU simulator, one traced program a shape; threads take turns."""

    def __init__(self, program: Program, spec: Any, op: Any) -> None:
        import jax

        from kimi_hal_tpu.pallas.mode import Mode

        self.op, self.narrow = op, jax.enable_x64  # the programs are written for integers of 32 bits
        mode = Mode(simulated=True)
        self.jitted = jax.jit(lambda arrays: tuple(program(spec, arrays, mode)))

    def cut(self) -> None:
        """Do nothing: each call is a program of its own."""

    def run(self, operands: dict[str, Any], rows: int | None = None) -> list[Tensor]:
        """Run on torch tensors on the CPU; returns torch tensors. No ranks meet in a program, whatever ``rows``."""
        arrays = {}
        for name, value in operands.items():
            tensors = value if isinstance(value, list) else [value]
            refuse_dynamic(self.op, {f"{name}.shape": size for t in tensors for size in t.shape})
            found = [to_jax(tensor) for tensor in tensors]
            arrays[name] = found if isinstance(value, list) else found[0]
        with SIMULATOR, self.narrow(False):
            results = [to_torch(array.block_until_ready()) for array in self.jitted(arrays)]
            raced = races_found()
        if raced:
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
        return jnp.zeros(
            tuple(tensor.shape), jnp.from_dlpack(torch.zeros(1, dtype=tensor.dtype, device="cpu")).dtype
        )
    if tensor.dtype == torch.int64:  # jax has 32-bit integers here; no place in a cache needs more
        tensor = tensor.clamp(-(1 << 31), (1 << 31) - 1).int()
    return jnp.from_dlpack(tensor.clone(memory_format=torch.contiguous_format))


def to_torch(array: Any) -> Tensor:
    """Return a jax array as a torch tensor."""
    if not array.size:
        return torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype)), device="cpu")
    return torch.from_dlpack(array)


def _test_entry(op: Operator, run: Callable[..., Any], scores: StaticCall) -> Callable[..., Any]:
    """Return the run function of ``indexer_topk`` that also writes all scores."""

    def entry(*args: Any, **keywords: Any) -> Any:
        buffer = keywords.pop("all_scores_out")
        results = run(*args, **keywords)
        bound = op.signature.bind(*args, **keywords)
        bound.apply_defaults()
        given: Mapping[str, Any] = bound.arguments
        (found,) = scores.staged(given)
        place(buffer, found)
        return (*results, buffer)

    return apart(entry)
