"""Signatures of run functions: compared with the operator's, and given to the functions that we make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from kimi_hal.errors import ContractError
from kimi_hal.ops.operator import Operator, bare_signature

Parameter = inspect.Parameter


def mismatches(op: Operator, run: Any) -> Iterator[str]:
    """Yield each way in which a run function's signature is not the operator's: names, kinds, defaults."""
    if not callable(run):
        yield f"it is a {type(run).__name__}, not a function"
        return
    theirs = list(bare_signature(run).parameters.values())
    ours = list(op.signature.parameters.values())
    for i, (their, our) in enumerate(zip_longest(theirs, ours), start=1):
        if our is None:
            yield f"parameter {i}, {their.name!r}, is one too many"
        elif their is None:
            yield f"parameter {i}, {our.name!r}, is missing"
        elif their != our:
            yield f"parameter {i} is {_described(their)}, it must be {_described(our)}"


def _described(parameter: Parameter) -> str:
    kinds: dict[Any, str] = {
        Parameter.POSITIONAL_ONLY: "positional-only ",
        Parameter.KEYWORD_ONLY: "keyword-only ",
        Parameter.VAR_POSITIONAL: "*",
        Parameter.VAR_KEYWORD: "**",
    }
    kind = kinds.get(parameter.kind, "")
    default = "" if parameter.default is Parameter.empty else f"={parameter.default!r}"
    return f"{kind}{parameter.name}{default}"


def function(op: Operator, name: str, call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a plain function with exactly the operator's signature, that gives ``call`` its arguments by name."""
    given = ", ".join(f"{p!r}: {p}" for p in op.signature.parameters)
    source = f"def {name}{op.signature}:\n    return call({{{given}}})\n"
    namespace: dict[str, Any] = {"call": call}
    exec(compile(source, f"<{name} of {op.name}>", "exec"), namespace)
    made: Callable[..., Any] = namespace[name]
    return made


def around(
    op: Operator, prefix: str, run: Callable[..., Any], call: Callable[[dict[str, Any]], Any]
) -> Callable[..., Any]:
    """Return ``call`` in the place of ``run``: as ``function``, with the test entries that ``run`` carries."""
    made = function(op, f"{prefix}_{op.name}", call)
    made.__dict__.update(getattr(run, "__dict__", {}))
    return made


def bound(op: Operator, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, defaults filled in.

    Raises:
        ContractError: one is missing, too many or not the operator's; the signature is told.
    """
    try:
        given = op.signature.bind(*args, **keywords)
    except TypeError as error:
        raise ContractError(op.name, [f"{error}; its operands are {op.signature}"]) from None
    given.apply_defaults()
    return dict(given.arguments)


def apply(op: Operator, run: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a run function with arguments by name, each passed as the operator's signature has it."""
    args, kwargs = [], {}
    for name, parameter in op.signature.parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            kwargs[name] = given[name]
        else:
            args.append(given[name])
    return run(*args, **kwargs)
