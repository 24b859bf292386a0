"""Compare version numbers, for ``Capability.requires``.

A subset of PEP 440 that needs no library: releases of any length, ``a``/``b``/``rc`` pre-releases, ``.post``
and ``.dev``; a local part (``+cu130``) is ignored. Specifiers are ``==``, ``!=``, ``>=``, ``<=``, ``>``,
``<`` and ``~=``, joined by commas that mean "and". Wildcards and epochs are refused when a plugin is loaded.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

VERSION = re.compile(
    r"v?(?P<release>\d+(\.\d+)*)"
    r"([-_.]?(?P<pre>alpha|a|beta|b|rc|c)[-_.]?(?P<pre_n>\d*))?"
    r"(\.post(?P<post>\d*))?"
    r"(\.dev(?P<dev>\d*))?"
    r"(\+[0-9A-Za-z.\-_]+)?"
)
CLAUSE = re.compile(r"(?P<sign>==|!=|>=|<=|~=|>|<)\s*(?P<version>\S+)")
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2}
FINAL = 3

Key = tuple[tuple[int, ...], int, int, int, float]


def key(version: str) -> Key:
    """Return what versions are ordered by: release, pre-release, its number, post, dev.

    Raises:
        ValueError: the text is not a version of the subset.
    """
    match = _match(version)
    release = _release(version)
    while release and release[-1] == 0:  # 3.6 and 3.6.0 are one version
        release = release[:-1]
    post = -1 if match["post"] is None else int(match["post"] or 0)
    dev = float("inf") if match["dev"] is None else int(match["dev"] or 0)
    pre, number = FINAL, 0
    if match["pre"]:
        pre, number = PRE[match["pre"]], int(match["pre_n"] or 0)
    elif match["dev"] is not None and post < 0:  # 3.7.dev1 comes before 3.7a1
        pre = -1
    return release, pre, number, post, dev


def satisfies(version: str, specifier: str) -> bool:
    """Tell whether a version is within a specifier such as ``">=3.6,<4"``."""
    return all(_holds(version, sign, bound) for sign, bound in _clauses(specifier))


def problem(specifier: str) -> str | None:
    """Return why a specifier cannot be read, or ``None``."""
    try:
        for _, bound in _clauses(specifier):
            key(bound)
    except ValueError as error:
        return str(error)
    return None


def _clauses(specifier: str) -> Iterator[tuple[str, str]]:
    for text in specifier.split(","):
        match = CLAUSE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{specifier!r} is not a version specifier; write '>=3.6' or '>=3.6,<4'")
        yield match["sign"], match["version"]


def _holds(version: str, sign: str, bound: str) -> bool:
    if sign != "~=":
        return SIGNS[sign](key(version), key(bound))
    series = _release(bound)[:-1]  # ~=3.6.1 means >=3.6.1 within 3.6
    return key(version) >= key(bound) and (*_release(version), *[0] * len(series))[: len(series)] == series


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _match(version)["release"].split("."))


def _match(version: str) -> re.Match[str]:
    match = VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is not a version number")
    return match
