"""The run function under ``KIMI_HAL_CHECK=args``: every call's values are looked at before anything runs.

It is another function around the builder's, made where the plan is made, so that the fast one has no branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kimi_hal.dispatch import capture, signatures
from kimi_hal.errors import ContractError
from kimi_hal.ops import check
from kimi_hal.ops.check import Terms
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Spec

Run = Callable[..., Any]


def checked(op: Operator, spec: Spec, terms: Terms, run: Run) -> Run:
    """Return ``run`` behind ``validate``; the signature is the operator's."""

    def call(given: dict[str, Any]) -> Any:
        capture.refuse(op.name, given, "KIMI_HAL_CHECK=args reads values")
        validate(op, spec, terms, given)
        return signatures.apply(op, run, given)

    return signatures.around(op, "checked", run, call)


def validate(op: Operator, spec: Spec, terms: Terms, given: Mapping[str, Any]) -> None:
    """Check metadata, and where that is right, every value. Reads the device.

    Raises:
        ContractError: all reasons together.
    """
    reasons = check.problems(op, spec, given, terms)
    if not reasons and op.values is not None:
        reasons = list(op.values(spec, terms.limits, given))
    if reasons:
        raise ContractError(op.name, reasons)
