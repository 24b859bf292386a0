"""One plan in two threads at once: each call has its own operands, buffers and scratch, and so its own result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, BrokenBarrierError, Lock

import torch

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.raised import described
from kimi_hal_conformance.relations.ground import Ground, UntriedError, unequal
from kimi_hal_conformance.rig import OnePlan, Rig
from kimi_hal_conformance.scripts import call

#: Calls of each thread: what two threads share is seldom in the way of one pair of calls.
ROUNDS = 6


def concurrent(ground: Ground) -> Iterator[str]:
    """Make calls of other data at the same time: every result must be that of the call alone.

    Raises:
        UntriedError: the calls are interpreted; what two of those share is the interpreter's.
    """
    plan = OnePlan.of(ground.subject)
    first = Rig(ground.question, plan)
    if first.ready.plan.settings.execution == "interpreted":
        raise UntriedError("an interpreter makes one call after another")
    rigs = (first, Rig(ground.again, plan))
    ground.subject.hooks.synchronize()  # what was placed stands there before another stream writes over it
    turns, one = Barrier(len(rigs)), Lock()
    with ThreadPoolExecutor(len(rigs)) as threads:
        begun = [threads.submit(_calls, rig, turns, one) for rig in rigs]
    failed = [error for error in (own.exception() for own in begun) if error is not None]
    failed.sort(
        key=lambda error: isinstance(error, BrokenBarrierError)
    )  # of which says only that the other failed
    yield from (f"one plan in two threads: {described(error)}" for error in failed[:1])
    for rig, own in zip(rigs, () if failed else begun, strict=False):
        yield from _wrong(ground, rig.question, own.result())


def _calls(rig: Rig, turns: Barrier, one: Lock) -> list[Called]:
    """Return what the calls of one thread give, each made together with one of the other thread.

    What leads up to a call, and what is read after it, is no part of the promise: one thread at a time does it. A
    thread that fails lets the other one go.
    """
    found = []
    try:
        with _stream(rig.subject.device):
            for _ in range(ROUNDS):
                with one:
                    rig.fill(rig.question)
                turns.wait()
                rig.run()
                turns.wait()
                with one:
                    found.append(rig.collected())
    except Exception:
        turns.abort()
        raise
    return found


def _wrong(ground: Ground, question: Question, calls: Sequence[Called]) -> Iterator[str]:
    """Yield what is wrong with the first call that is not right: other bits than alone where bits are promised."""
    alone = call(question, ground.subject, given=True) if ground.promises_bits else None
    for number, got in enumerate(calls, 1):
        if got.answer is None or got.problems or alone is None:
            told = list(objections(question, got))
        else:
            told = [f"{name} has other bits than alone" for name in unequal(got, alone, question)]
        yield from (f"call {number} of one plan in two threads: {problem}" for problem in told)
        if told:
            return


def _stream(device: str) -> AbstractContextManager[object]:
    """Return a stream of the thread's own where the device has streams."""
    accelerator = torch.accelerator.current_accelerator()
    kind = torch.device(device).type
    return torch.Stream(device) if accelerator is not None and accelerator.type == kind else nullcontext()
