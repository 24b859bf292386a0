"""What the process that compiles is told, and the verdicts on it."""

from __future__ import annotations

import msgspec

from kimi_hal.dispatch.contract import Target
from kimi_hal_conformance.verdict import Verdict

#: How the ids of these cases begin.
PREFIX = "compile"
#: In a case's place for the kernel: what is said of all of an implementation's kernels.
ALL = "*"
#: The next kernel is to be compiled: what the process prints from now on is of that kernel.
GO = b"go"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one implementation for one target.

    Args:
        operator: the abstract operator.
        implementation: full name.
        function: ``"module:function"``, from a target to the kernels.
        target: what they are compiled for.
        limit: seconds that a kernel may take.
        strict: a missing tool is a failure.
        only: these kernels alone; empty: all.
        done: kernels that have their verdict.
    """

    operator: str
    implementation: str
    function: str
    target: Target
    limit: float
    strict: bool = False
    only: tuple[str, ...] = ()
    done: tuple[str, ...] = ()


def case_id(operator: str, kernel: str, target: str) -> str:
    """Return a case's id: ``compile/indexer_logits/decode/sm_90a``."""
    return f"{PREFIX}/{operator}/{kernel}/{target}"


def said(order: Order, kernel: str, status: str, *problems: str, output: str = "") -> Verdict:
    """Return a verdict on a kernel without its code, or on all (``"*"``)."""
    return Verdict(
        case=case_id(order.operator, kernel, order.target.name),
        operator=order.operator,
        implementation=order.implementation,
        status=status,
        problems=problems,
        output=output,
    )
