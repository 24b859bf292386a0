"""One plan in two threads at once: each call has its own operands, buffers and scratch, and so its own result."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, BrokenBarrierError

import torch

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.relations.ground import Ground, UntriedError, unequal
from kimi_hal_conformance.rig import OnePlan, Rig

#: Calls of each thread: what two threads share is seldom in the way of one pair of calls.
ROUNDS = 6


def concurrent(ground: Ground) -> Iterator[str]:
    """Make calls of other data at the same time: every result must be that of the call alone.

    Raises:
        UntriedError: the calls are interpreted; what two of those share is the interpreter's.
    """
    plan = OnePlan.of(ground.subject)
    asked = (ground.question, ground.again)
    rigs = [Rig(question, plan) for question in asked]
    if rigs[0].ready.plan.settings.execution == "interpreted":
        raise UntriedError("an interpreter makes one call after another")
    start = Barrier(len(rigs))
    ground.subject.hooks.synchronize()  # what was placed stands there before another stream writes over it
    with ThreadPoolExecutor(len(rigs)) as threads:
        begun = [threads.submit(_calls, *own, start) for own in zip(rigs, asked, strict=True)]
    failed = [error for error in (own.exception() for own in begun) if error is not None]
    for error in sorted(
        failed, key=lambda e: isinstance(e, BrokenBarrierError)
    ):  # which says only that the other failed
        raise error
    found = [own.result() for own in begun]
    for question, calls in zip(asked, found, strict=True):
        for number, got in enumerate(calls, 1):
            after = f"call {number} of one plan in two threads"
            told = list(ground.differs(question, got, after)) if number == 1 else []
            if number > 1 and (ground.promises_bits or got.problems):
                names = () if got.problems else unequal(got, calls[0], question)
                told = [f"{after}: {what}" for what in got.problems]
                told += [f"{after}: {name} has other bits than in call 1" for name in names]
            yield from told
            if told:
                return


def _calls(rig: Rig, question: Question, start: Barrier) -> list[Called]:
    """Return what the calls of one thread give, each begun together with one of the other thread.

    A thread whose call fails lets the other one go.
    """
    found = []
    try:
        with _stream(rig.subject.device):
            for _ in range(ROUNDS):
                rig.fill(question)
                start.wait()
                found.append(rig.finish())
    except Exception:
        start.abort()
        raise
    return found


def _stream(device: str) -> AbstractContextManager[object]:
    """Return a stream of the thread's own where the device has streams."""
    accelerator = torch.accelerator.current_accelerator()
    kind = torch.device(device).type
    return torch.Stream(device) if accelerator is not None and accelerator.type == kind else nullcontext()
