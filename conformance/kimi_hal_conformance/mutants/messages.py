"""What ``prove`` and its workers say to each other, one JSON object a line."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A mutant and the tests that may kill it.

    Args:
        mutant: its id.
        tests: ids of cases and of properties.
        every: run them all; else stop at the first that kills.
        seed: of the operands.
        limit: seconds of one test.
    """

    mutant: str
    tests: tuple[str, ...]
    every: bool
    seed: int
    limit: int


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A test that killed a mutant.

    Args:
        test: its id.
        smallest: the smallest part of it that still kills: a row, a sequence, or all of it.
        input: what that is, by operand.
        problem: what was wrong.
    """

    test: str
    smallest: str
    input: str
    problem: str


class Trying(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process begins a test."""

    test: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A mutant's tests are done.

    Args:
        mutant: its id.
        kills: the tests that killed it, the smallest first; empty: it survived.
        tried: how many tests ran.
        refused: tests that the mutant refused; it may refuse none.
        untried: tests whose operands this machine cannot make -> why.
        seconds: of all of them.
    """

    mutant: str
    kills: tuple[Kill, ...]
    tried: int
    refused: tuple[str, ...] = ()
    untried: dict[str, str] = {}
    seconds: float = 0.0


class Died(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process of a mutant ended before its tests did: exit status, or the negative number of a signal."""

    code: int


Message: TypeAlias = Trying | Outcome | Died
