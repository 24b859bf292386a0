"""A call of any size as a call of a compiled size: operands are padded by the contract's sentinels, results cut.

The program between works on static shapes alone. A plan keeps one program a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from kimi_hal.dispatch import signatures
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import ContractError
from kimi_hal.ops.all_gather import total_problem
from kimi_hal.ops.operator import Arg, Operator, OutputShape, bind_dims, get, output_shapes, torch_dtype
from kimi_hal_tpu import buckets, empty, staging

#: What an operand is padded with where 0 is not its padding marker.
SENTINELS = {"slots": -1, "indices": -1, "block_table": -1, "topk_ids": -1, "state_ids": -1, "row_req": -1}
#: Dimension letters that come in any size, and the smallest size that they are padded to.
FREE = {"R": 1, "N": 1, "columns": 16, "blocks": 16, "L": 128}
#: Why torch.compile runs a call between its graphs.
APART = "a plan's run is a TPU program of its own and is never traced; plan.op is one node of a graph"
#: Types that not every machine moves; their bytes are moved.
BYTES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")

Operands = Mapping[str, Any]


class Machine(Protocol):
    """Where programs run."""

    def run(self, operands: dict[str, Any], rows: int | None = None) -> list[Tensor]:
        """Run the program on padded operands; returns outputs, then mutated operands.

        ``rows`` are those before padding, where ranks meet: all that they send each other.
        """

    def cut(self) -> None:
        """Begin another program on the device: what comes next is compiled without what was traced before."""


@dataclass(frozen=True)
class StaticCall:
    """An operator's run function around a program of static shapes.

    Args:
        op: the operator.
        ctx: what it is built for.
        machine: runs the program.
        sizes: dimension letters that this program wants in a certain size.
        coded: whether the program takes FP8 as it is, instead of its bytes.
    """

    op: Operator
    ctx: BuildContext
    machine: Machine
    sizes: Mapping[str, int] = field(default_factory=dict)
    coded: bool = False

    def function(self) -> Callable[..., Any]:
        """Return a plain function with the operator's signature."""
        return signatures.function(self.op, self.op.name, apart(self, views=kind(self.ctx) == "xla"))

    def __call__(self, given: dict[str, Any]) -> Any:
        """Run on operands by name; returns what the operator returns. No operator has a backward."""
        refuse_tracers(self.op, given)
        self.ctx.check(**given)
        self._check_total(given)
        shapes = output_shapes(self.op, self.ctx.spec, self.ctx.limits, given)
        buffers = [self._buffer(shape, given) for shape in shapes]
        if not empty.idle(self.op, self.ctx.spec, given, shapes):
            self._fill(buffers, given)
        return None if not buffers else buffers[0] if len(buffers) == 1 else tuple(buffers)

    def _check_total(self, given: Operands) -> None:
        """Refuse a ``total`` of ``all_gather`` that no ranks can have, before a result of as many rows is made."""
        if self.op.name != "all_gather":
            return
        if problem := total_problem(self.ctx.spec, given["x"].shape[0], given.get("total")):
            raise ContractError(self.op.name, [problem])

    def _fill(self, buffers: list[Tensor], given: Operands) -> None:
        """Run the program, and write its results into the buffers and into what the call mutates."""
        moved = self._moved(given)
        results = self.compute(moved.operands if moved else self._operands(given), given)
        if moved and len(moved.kept) and getattr(self.ctx.spec, "emit", "") == "slot":
            results[0] = moved.original(results[0], self.ctx.spec.page)
        changed = dict(zip(self.op.mutated, self._grouped(results[len(buffers) :], given), strict=True))
        pools = moved.pools if moved else ()
        self._cut_behind(buffers, results, given)
        for buffer, result in zip(buffers, results, strict=False):
            place(buffer, result)
        for name, result in changed.items():
            if moved and name in pools:
                moved.give_back(name, given[name], result)
            else:
                place(self._written(name, given), result)

    def _operands(self, given: Operands) -> dict[str, Any]:
        """Return a call's operands on the device; a pool without a page or slot becomes one that nothing names."""
        return empty.unnamed(self.op, {name: given[name] for name in self.op.args})

    def _moved(self, given: Operands) -> staging.Moved | None:
        """Return a call's operands, of its pools only what they name; ``None`` on the device, or without a pool."""
        if not self.on_host:
            return None
        return staging.move(self.op.name, self.ctx.spec, {name: given[name] for name in self.op.args})

    def _written(self, name: str, given: Operands) -> Any:
        """Return what a call writes of an operand: of one with room for more sequences, those that there are."""
        value = given[name]
        if not self.op.args[name].shape.startswith(">=N"):
            return value
        return value[: bind_dims(self.op, self.ctx.spec, given).bound["N"]]

    @property
    def on_host(self) -> bool:
        """Tell whether operands come from the CPU, and go back to it."""
        return on_host(self.ctx)

    def _grouped(self, results: list[Tensor], given: Operands) -> list[Any]:
        """Return the mutated operands' results, those of a list of tensors as a list."""
        rest, found = list(results), []
        for name in self.op.mutated:
            count = len(given[name]) if self.op.args[name].many else 0
            found.append([rest.pop(0) for _ in range(count)] if count else rest.pop(0))
        return found

    def staged(self, given: Operands) -> list[Tensor]:
        """Run a program that mutates nothing on a call's operands."""
        moved = self._moved(given)
        return self.compute(moved.operands if moved else self._operands(given), given)

    def compute(self, operands: Operands, given: Operands) -> list[Tensor]:
        """Pad, run, and return the program's results in its own static shapes."""
        targets = self.targets(given)
        padded = {
            name: pad(name, self.op.args[name], value, targets, coded=self.coded)
            for name, value in operands.items()
            if value is not None
        }
        if not self.on_host and any(_shapes(operands[name]) != _shapes(padded[name]) for name in padded):
            self.machine.cut()
        scalars = {name: given[name] for name in self.op.scalars if given[name] is not None}
        sizes = real_sizes(self.op, self.ctx.spec, given)
        rows = bind_dims(self.op, self.ctx.spec, given).bound.get("T") if self.op.grouped else None
        return self.machine.run(padded | scalars | sizes, rows=rows)

    def _cut_behind(self, buffers: list[Tensor], results: list[Tensor], given: Operands) -> None:
        """Keep a call's own shapes out of a bucket's program on the device, which torch-xla keys by all of its trace.

        Nothing of those shapes may be traced before: a view of the caller's tensor would be a result of the program.
        """
        if self.on_host:
            return
        count = bind_dims(self.op, self.ctx.spec, given).bound.get("N", 1)
        some = any(self.op.args[name].shape.startswith(">=N") for name in self.op.mutated)
        if (some and count != buckets.power(count)) or _shapes(buffers) != _shapes(results[: len(buffers)]):
            self.machine.cut()

    def targets(self, given: Operands) -> dict[str, int]:
        """Return the static size of each free dimension letter, 1 at least; on the device T must be a bucket."""
        bound = bind_dims(self.op, self.ctx.spec, given).bound
        found = {n: 1 for n, size in bound.items() if not size}
        found |= {n: buckets.power(bound[n], least) for n, least in FREE.items() if n in bound}
        rows = buckets.of_rows(self.ctx.limits) if self.on_host else buckets.on_device(self.ctx.limits)
        if "T" in bound and (self.on_host or not bound["T"]):
            found["T"] = buckets.fit(self.op.name, "T", bound["T"], rows)
        elif "T" in bound:
            buckets.exact(self.op.name, "T", bound["T"], rows)
        return found | dict(self.sizes)

    def _buffer(self, shape: OutputShape, given: Operands) -> Tensor:
        buffer = given.get(shape.keyword)
        if buffer is not None:
            return buffer  # type: ignore[no-any-return]
        device = next(v.device for v in given.values() if isinstance(v, Tensor))
        made = torch.zeros(
            shape.shape,
            dtype=torch.uint8 if shape.dtype in BYTES else torch_dtype(shape.dtype),
            device="cpu",
        )
        return made.view(torch_dtype(shape.dtype)).to(device)


def on_host(ctx: BuildContext) -> bool:
    """Tell whether a plan is for operands on the CPU, ``"cpu"`` or ``"cpu:0"``: its programs are interpreted."""
    return kind(ctx) == "cpu"


def kind(ctx: BuildContext) -> str:
    """Return torch's name of a plan's device, without its index."""
    return ctx.device.partition(":")[0]


def apart(call: Callable[..., Any], *, views: bool = False) -> Callable[..., Any]:
    """Return a function that records no gradient and that ``torch.compile`` runs between its graphs.

    It imports ``torch._dynamo``, which a process that plans nothing here is spared; torch-xla does so itself.

    Args:
        call: the function.
        views: it makes views of tensors on the device, which torch-xla 2.9 cannot in inference mode.
    """
    inner = torch.no_grad()(call)
    inner = torch.inference_mode(False)(inner) if views else inner
    made: Callable[..., Any] = torch.compiler.disable(inner, reason=APART)  # type: ignore[no-untyped-call]
    return made


def real_sizes(op: Operator, spec: Any, given: Operands) -> dict[str, Tensor]:
    """Return the sizes before padding as values, int32 ``[1]`` each: ``size_L`` and so on."""
    bound = bind_dims(op, spec, given).bound
    return {
        f"size_{n}": torch.tensor([bound[n]], dtype=torch.int32, device="cpu") for n in FREE if n in bound
    }


def pad(name: str, arg: Arg, value: Any, targets: Mapping[str, int], *, coded: bool = False) -> Any:
    """Return an operand in its static shape, FP8 as bytes unless it is to stay ``coded``."""
    if isinstance(value, (list, tuple)):
        return [pad(name, arg, item, targets, coded=coded) for item in value]
    if not coded and str(value.dtype).removeprefix("torch.") in BYTES:
        value = value.view(torch.uint8)
    if arg.shape == "*":
        return value
    shape = tuple(
        size if arg.mutated and size else target(word, size, targets)
        for word, size in zip(arg.shape.split(), value.shape, strict=True)
    )
    if shape == tuple(value.shape):
        return value
    padded = value.new_full(shape, SENTINELS.get(name, 0))
    place(padded, value)
    return padded


def target(word: str, size: int, targets: Mapping[str, int]) -> int:
    """Return the static size of one dimension; one that may be shorter than a bound becomes a power of two."""
    if word.startswith("<=") and (targets or not size):
        return buckets.power(size)
    bare = word.removeprefix(">=").removeprefix("<=")
    base, plus, extra = bare.partition("+")
    found = targets.get(base, size)
    return found + int(extra) if plus and base in targets else found


def place(buffer: Any, result: Any) -> None:
    """Copy what two shapes, or those of two lists, have in common; a result's type becomes the buffer's."""
    if isinstance(buffer, (list, tuple)):
        for own, one in zip(buffer, result, strict=True):
            place(own, one)
        return
    if buffer.dtype != result.dtype and str(buffer.dtype).removeprefix("torch.") in BYTES:
        buffer = buffer.view(torch.uint8)
    sizes = [min(a, b) for a, b in zip(buffer.shape, result.shape, strict=True)]
    if all(sizes):
        common = tuple(slice(0, size) for size in sizes)
        buffer[common].copy_(result[common])


def refuse_dynamic(op: Operator, sizes: Mapping[str, Any]) -> None:
    """Refuse symbolic sizes, which a compiler with dynamic shapes passes.

    Raises:
        ContractError: a size is no number yet.
    """
    symbolic = [f"{name}={size}" for name, size in sizes.items() if not isinstance(size, int)]
    if symbolic:
        raise ContractError(
            op.name,
            [
                f"{', '.join(symbolic)} is a dynamic shape, and a TPU program is compiled for one shape: "
                "pass sizes that are numbers, padded to Limits.row_buckets; or trace plan.op"
            ],
        )


def refuse_tracers(op: Operator, given: Operands) -> None:
    """Refuse operands of a tracer, which hold no numbers to run a program on, and those of ``torch.vmap``.

    Raises:
        ContractError: a size is a symbol, or an operand has no data of its own.
    """
    named = [(name, t) for name, value in given.items() for t in _tensors(value)]
    for name, tensor in named:
        if torch._C._functorch.is_batchedtensor(tensor):
            raise ContractError(
                op.name, [f"{name} is one row of torch.vmap's batch: call it on the whole batch"]
            )
    refuse_dynamic(op, {f"{name}.shape[{i}]": size for name, t in named for i, size in enumerate(t.shape)})
    for name, tensor in named:
        if isinstance(tensor, (FakeTensor, FunctionalTensor)):
            raise ContractError(
                op.name,
                [
                    f"{name} is a {type(tensor).__name__} of a tracer and holds no numbers, on which a TPU program "
                    "runs: call it outside of the tracer; or trace plan.op"
                ],
            )


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _tensors(value)]


def _tensors(value: Any) -> list[Tensor]:
    many = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in many if isinstance(item, Tensor)]


def operator(ctx: BuildContext) -> Operator:
    """Return the operator that a context is for."""
    return get(ctx.operator)
