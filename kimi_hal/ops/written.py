"""Functions that are written as source text: compiled once for equal text, since plans repeat and compiling is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any


def function(name: str, source: str, file: str, constants: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of a name that a text defines; it sees the constants and nothing else.

    Args:
        name: of the function in the text.
        source: the text.
        file: what tracebacks call it.
        constants: the globals of the function, its own from those of every other with the same text.
    """
    namespace = dict(constants)
    exec(_code(source, file), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


@lru_cache(maxsize=4096)
def _code(source: str, file: str) -> CodeType:
    return compile(source, file, "exec")
