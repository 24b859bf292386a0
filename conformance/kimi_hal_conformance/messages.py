"""What the suite and its worker say to each other, one JSON object a line."""

from __future__ import annotations

import os
from typing import TypeAlias

import msgspec

from kimi_hal_conformance.claims.made import Made
from kimi_hal_conformance.verdict import Speed, Verdict

#: Seconds in which a call must be timed.
TIMING = 60.0
#: Seconds in which a smaller part of a failed case is looked for.
SHRINKING = 10.0
#: Exit status of a process that ends itself because its device is of no more use to it.
UNUSABLE = 75


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Cases of one implementation, to be run one after another in a process of their own.

    Args:
        implementation: full name.
        device: the torch device that it is planned on.
        hooks: ``"module:Class"`` of the device hooks.
        cases: ids.
        seed: of the operands.
        limit: seconds that a case may take; the process ends itself long after, should nobody else.
        repeats: calls of a case that passed, beside the first, where determinism is declared.
        relations: of how many of these cases, the first ones to which they apply, relations and capture are tried.
        untimed: why nothing is timed; empty: a call of the operator is, once a case has passed.
        made: of the cases, those that claims make.
        undeclared: the implementation is planned whatever it claims.
    """

    implementation: str
    device: str
    hooks: str
    cases: tuple[str, ...]
    seed: int
    limit: float
    repeats: int = 0
    relations: int = 0
    untimed: str = ""
    made: tuple[Made, ...] = ()
    undeclared: bool = False


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process is ready to run a batch: its id, and the versions that its device's hooks name."""

    pid: int
    versions: dict[str, str]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One case was run; ``timing``: a call of its operator is timed next, which its verdict does not wait for."""

    verdict: Verdict
    timing: bool = False


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of the operator was timed after the case just done, or why it was not."""

    speed: Speed | None = None
    why: str = ""


class Shrunk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The smallest part of the case just done that still fails, and what it is."""

    smallest: str
    input: str


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The kernels that are compiled next, one after another."""

    kernels: tuple[str, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process of a batch is gone: its exit status, or the negative number of the signal that ended it."""

    code: int


Message: TypeAlias = Started | Listed | Done | Timed | Shrunk | Ended


def send(answers: int, message: Message) -> None:
    """Write a message. The line before it may have been cut short by a process that died."""
    os.write(answers, b"\n" + msgspec.json.encode(message) + b"\n")
