"""The process that compiles: orders come in on standard input, messages go out on a descriptor of their own.

What it does not survive (a compiler that aborts, or never ends) is noticed by whoever gave the order, and the next
process goes on with the next kernel.
"""

from __future__ import annotations

import faulthandler
import sys
import time
import traceback

import msgspec

from kimi_hal.dispatch.contract import Kernel
from kimi_hal.dispatch.loader import resolve
from kimi_hal.errors import ToolMissingError
from kimi_hal_conformance.compiling import checks
from kimi_hal_conformance.compiling.order import ALL, Order, case_id, said
from kimi_hal_conformance.messages import Done, Ended, Listed, send
from kimi_hal_conformance.raised import described
from kimi_hal_conformance.turn import plain
from kimi_hal_conformance.verdict import FAILED, NOT_RUN, PASSED, Verdict


def main() -> None:
    """Serve orders until standard input ends."""
    faulthandler.enable()
    answers = int(sys.argv[1])
    for line in sys.stdin.buffer:
        serve(msgspec.json.decode(line, type=Order), answers)
        send(answers, Ended(code=0))


def serve(order: Order, answers: int) -> None:
    """Compile an order's kernels, sending each verdict when it is there."""
    kernels = listed(order)
    if isinstance(kernels, Verdict):
        send(answers, Done(verdict=plain(kernels)))
        return
    left = [k for k in kernels if k.name not in order.done and (not order.only or k.name in order.only)]
    send(answers, Listed(kernels=tuple(k.name for k in left)))
    for kernel in left:
        sys.stdin.buffer.readline()  # GO
        found = verdict(order, kernel)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(answers, Done(verdict=plain(found)))


def listed(order: Order) -> list[Kernel] | Verdict:
    """Return the kernels that the plugin describes, or what is wrong with them all."""
    try:
        found = resolve(order.function)(order.target)
    except Exception as error:
        return raised(order, ALL, order.function, error)
    wrong = [f"{order.function}: {problem}" for problem in checks.description_problems(found)]
    if wrong:
        return said(order, ALL, FAILED, *wrong)
    names = [k.name for k in found]
    if order.only and not {*order.only} & {*names}:
        problem = (
            f"it has no kernel {', '.join(order.only)} for {order.target.name}; it has {', '.join(names)}"
        )
        return said(order, ALL, NOT_RUN, problem)
    return list(found)


def verdict(order: Order, kernel: Kernel) -> Verdict:
    """Compile a kernel and judge its code."""
    start = time.perf_counter()
    try:
        compiled = kernel.compile()
    except Exception as error:
        found = raised(order, kernel.name, "compiling", error)
        return msgspec.structs.replace(found, seconds=time.perf_counter() - start)
    code = checks.code(kernel, order.target, compiled)
    problems = tuple(checks.problems(code, order.target))
    missing = FAILED if order.strict else NOT_RUN
    return Verdict(
        case=case_id(order.operator, kernel.name, order.target.name),
        operator=order.operator,
        implementation=order.implementation,
        status=FAILED if problems else missing if compiled.unknown else PASSED,
        problems=(*problems, *compiled.unknown),
        seconds=time.perf_counter() - start,
        code=code,
    )


def raised(order: Order, kernel: str, what: str, error: Exception) -> Verdict:
    """Return the verdict on an exception: a missing tool is no fault of the kernel's."""
    if reason := absent(order, error):
        return said(order, kernel, FAILED if order.strict else NOT_RUN, reason)
    output = "".join(traceback.format_exception(error))  # whole: a compiler says much
    return said(order, kernel, FAILED, f"{what} raised {described(error)}", output=output)


def absent(order: Order, error: Exception) -> str:
    """Say which tool is missing, or return an empty string. A missing module of the plugin's own is a fault."""
    if isinstance(error, ToolMissingError):
        return str(error)
    own = {"kimi_hal", order.function.partition(":")[0].partition(".")[0]}
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in own:
        return f"{error}: {order.implementation} is compiled with it"
    return ""


if __name__ == "__main__":
    main()
