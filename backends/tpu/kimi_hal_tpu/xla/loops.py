"""A loop in the trace that runs as often as data say: torch-xla's own ``scan`` runs as often as a shape says.

The step is traced apart, on placeholders, and called by an XLA ``While``; what it uses beside its arguments is a
further operand of the loop. All shapes are static.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as builder
from torch import Tensor

#: The number of a step, what changes, what stays -> what changes, in the same shapes.
Step = Callable[[Tensor, list[Tensor], list[Tensor]], Sequence[Tensor]]


def repeat(step: Step, count: Tensor, changing: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
    """Run steps 0 … ``count`` − 1; returns what changed.

    Args:
        step: one of them, of traced operations alone.
        count: int64 without dimensions.
        changing: what each step returns anew.
        fixed: what all steps read.
    """
    start = torch.zeros((), dtype=torch.int64, device=count.device)
    operands = [start, *changing, *fixed]
    called, hoisted, order = _traced(step, operands, len(changing))
    operands += [*hoisted, count]
    module = builder.create_builder("kimi_hal_repeat")
    shapes = builder.tensor_shape(tuple(operands))
    params = tuple(builder.mkparam(module, i, shape) for i, shape in enumerate(shapes))

    def before(number: Any, *rest: Any) -> Any:
        return number < rest[-1]

    def body(number: Any, *rest: Any) -> tuple[Any, ...]:
        given = (number, *rest)
        results = builder.Op.call(called, [given[place] for place in order])
        made = [results.get_tuple_element(i) for i in range(len(changing))]
        one = builder.Op.scalar(number.builder(), 1, dtype=builder.Type.S64)
        return (number + one, *made, *rest[len(changing) :])

    loop = builder.Op.mkwhile(params, before, body).build("kimi_hal_repeat")
    results = torch_xla._XLAC._xla_user_computation("xla::kimi_hal_repeat", tuple(operands), loop)
    return list(results[1 : 1 + len(changing)])


def _traced(step: Step, operands: Sequence[Tensor], changing: int) -> tuple[Any, list[Tensor], list[int]]:
    """Return a step's computation, what it uses beside its operands, and which of all these each parameter is."""
    stand_ins = [builder.create_placeholder_tensor(t.shape, t.dtype) for t in operands]
    number, rest = stand_ins[0], stand_ins[1:]
    results = step(number, rest[:changing], rest[changing:])
    context = torch_xla._XLAC.lowering.LoweringContext("kimi_hal_step")
    context.set_name_string("kimi_hal_step")
    context.build(list(results))
    computation = builder.computation_from_module_proto("kimi_hal_step", context.hlo())
    places = {context.tensor_parameter_id(t): place for place, t in enumerate(stand_ins)}
    places.pop(-1, None)  # what the step does not read is no parameter
    hoisted: list[Tensor] = []
    for parameter, tensor in context.device_parameter_id_tensor_mapping().items():
        if parameter not in places:
            places[parameter] = len(operands) + len(hoisted)
            hoisted.append(tensor.to(operands[0].device))
    return computation, hoisted, [places[parameter] for parameter in range(len(places))]
