"""Calls with dimensions of size 0: which of them do nothing at all, and what the others run on.

XLA's gathers and slices need one entry at least, so a dimension of size 0 becomes the smallest that is compiled, and
what is in it is named by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_hal.ops.operator import Operator, OutputShape, bind_dims
from kimi_hal_tpu import staging


def idle(op: Operator, spec: Any, given: Mapping[str, Any], shapes: Sequence[OutputShape]) -> bool:
    """Tell whether a call returns no element and writes nothing, so that it needs no program.

    A call on no rows may still store checkpoints: those in front of a sequence's first row. Operands of any shape
    (``all_gather``) say nothing here, since their ranks must meet.
    """
    bound = bind_dims(op, spec, given).bound
    if not bound or any(math.prod(shape.shape) for shape in shapes):
        return False
    if bound.get("N") == 0 or (bound.get("T") == 0 and given.get("checkpoint_ids") is None):
        return True
    return all(not staging.first(given[name]).shape[0] for name in op.mutated)


def unnamed(op: Operator, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return operands in which a pool without a page or slot is named by nothing: every name becomes −1."""
    pools, names = staging.CACHES.get(op.name, ((), ()))
    if not pools or staging.first(operands[pools[0]]).shape[0]:
        return dict(operands)
    none = {n: operands[n].new_full(operands[n].shape, -1) for n in names if operands.get(n) is not None}
    return {**operands, **none}
