"""The process that imports torch and the suite once, and forks one process for every implementation.

A fork before any device is touched costs milliseconds, an import of torch seconds; so each implementation has
a process of its own, with a device of its own, and what it does to that process ends with it. Batches come in
on standard input; messages go out on a descriptor of their own, which a kernel that prints cannot garble.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import traceback
from collections.abc import Set
from dataclasses import replace
from typing import NoReturn

import msgspec
import torch

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.loader import resolve
from kimi_hal.errors import KimiHalError
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.case import Case
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.claims.bypass import claim_everything
from kimi_hal_conformance.claims.made import case as made_case
from kimi_hal_conformance.execute import run_case
from kimi_hal_conformance.integrity import Integrity
from kimi_hal_conformance.levels import SPEED
from kimi_hal_conformance.messages import (
    SHRINKING,
    UNUSABLE,
    Batch,
    Done,
    Ended,
    Shrunk,
    Started,
    Timed,
    send,
)
from kimi_hal_conformance.poison import no_canaries
from kimi_hal_conformance.promises import Allowance, Effort, heavy, operand_names
from kimi_hal_conformance.raised import described
from kimi_hal_conformance.shrink import described as operands_of
from kimi_hal_conformance.shrink import smallest
from kimi_hal_conformance.speed.timing import UntimedError, timed
from kimi_hal_conformance.surroundings import Surroundings, own
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

#: How much later than the suite's own limit a forgotten process ends itself.
PATIENCE = 2


def main() -> None:
    """Serve batches until standard input ends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork: the first parallel loop would hang
    load()
    judge = Integrity.now()  # before any plugin is imported
    answers = int(sys.argv[1])
    for line in sys.stdin.buffer:
        batch = msgspec.json.decode(line, type=Batch)
        pid = os.fork()
        if not pid:
            torch.set_num_threads(threads)  # makes torch's pool anew, which two threads at once must not
            _serve(batch, answers, judge)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a kernel started and left
        _, status = os.waitpid(pid, 0)
        send(answers, Ended(code=os.waitstatus_to_exitcode(status)))


def _serve(batch: Batch, answers: int, judge: Integrity) -> NoReturn:
    """Run a batch in this fork, and end it without the clean-up of the process that it is a copy of."""
    status = 1
    try:
        os.setpgid(0, 0)  # what a kernel's compiler starts ends with it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        own()
        status = run(batch, answers, judge)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a kernel may have closed it
                stream.flush()
        os._exit(status)


def run(batch: Batch, answers: int, judge: Integrity) -> int:
    """Run the cases of a batch, sending each verdict when it is there; return the status to end with.

    A case that leaves the device unusable, as an illegal address does, is the process's last: the rest has a new one.
    """
    cases.MADE.update({made.id: made_case(made) for made in batch.made})
    hooks = _started(batch, answers)
    if hooks is None:
        return 0
    _freeze(batch)
    subject = Subject(batch.implementation, batch.device, hooks)
    left = Allowance(batch.relations, lasting=not batch.undeclared)
    waiting = (
        not batch.undeclared
    )  # for a case to be timed: the first that passes, where values are right at least
    for case_id in batch.cases:
        signal.alarm(math.ceil(PATIENCE * batch.limit) + 60)
        verdict, effort = tried(cases.get(case_id), batch, subject, left)
        if tampered := judge.problems():
            verdict = msgspec.structs.replace(verdict, status=FAILED, problems=tuple(tampered))
        first = waiting and verdict.status == PASSED
        waiting = waiting and not first
        tell(verdict, batch, answers, subject, first)
        if verdict.status == FAILED:
            if not usable(hooks):
                return UNUSABLE
            send(answers, shrunk(verdict, subject, replace(effort, relations=False)))
    return 0


def _started(batch: Batch, answers: int) -> DeviceHooks | None:
    """Make the device hooks and say that the process is ready; without them fail every case."""
    before = Surroundings.now()
    try:
        hooks: DeviceHooks = resolve(batch.hooks)()
        versions = dict(hooks.versions())
        unguarded = no_canaries(hooks)
    except Exception as error:
        _say_all(batch, answers, f"the device hooks {batch.hooks} raised {described(error)}")
        return None
    if changed := before.restored(f"making the device hooks {batch.hooks}"):
        _say_all(batch, answers, "; ".join(changed))
        return None
    if unguarded:
        _say_all(batch, answers, f"the device hooks {batch.hooks} give no canaries: {unguarded}")
        return None
    send(answers, Started(pid=os.getpid(), versions=versions))
    return hooks


def _freeze(batch: Batch) -> None:
    """Look for plugins once, as an engine does: to do so again costs more than a small case."""
    with contextlib.suppress(KimiHalError):  # else every case says so itself
        policy.freeze()
        if batch.undeclared:
            claim_everything(batch.implementation)


def tried(case: Case, batch: Batch, subject: Subject, left: Allowance) -> tuple[Verdict, Effort]:
    """Run a case, with as much effort as is left to be made; return how much that was too."""
    if case.id in cases.MADE:
        operands: Set[str] = frozenset()
        effort = Effort(min(batch.repeats, 1))
    else:
        operands = operand_names(case, batch.seed)
        effort = left.effort(batch.repeats, operands, heavy(case, subject, batch.seed))
    verdict = run_case(case, subject, batch.seed, effort)
    left.spend(verdict.promises, operands)
    return verdict, effort


def tell(verdict: Verdict, batch: Batch, answers: int, subject: Subject, first: bool) -> None:
    """Send a verdict; of the first that passed, time a call of its operator too, or say why none is timed."""
    if first and batch.untimed:
        verdict = msgspec.structs.replace(verdict, untried=verdict.untried | {SPEED: batch.untimed})
    timing = first and not batch.untimed
    send(answers, Done(verdict=verdict, timing=timing))
    if timing:
        send(answers, time_call(verdict.operator, subject))


def usable(hooks: DeviceHooks) -> bool:
    """Tell whether a device still answers: after some faults every later call raises, whatever it is."""
    try:
        hooks.synchronize()
    except Exception:
        return False
    return True


def shrunk(verdict: Verdict, subject: Subject, effort: Effort) -> Shrunk:
    """Find the smallest part of a case that fails as well.

    What raised on a device is not cut down: the context may be broken, and then everything fails.
    """
    whole = cases.get(verdict.case)
    part = whole
    if not verdict.output or subject.device == "cpu":
        part = smallest(
            whole,
            verdict.seed,
            lambda piece: run_case(piece, subject, verdict.seed, effort).status == FAILED,
            SHRINKING,
        )
    return Shrunk(smallest=part.id, input=operands_of(part, verdict.seed))


def time_call(operator: str, subject: Subject) -> Timed:
    """Time a call of the operator, or say why not."""
    try:
        return Timed(speed=timed(operator, subject))
    except UntimedError as error:
        return Timed(why=str(error))
    except Exception as error:  # the suite's call is refused, or too large for this device
        return Timed(why=f"timing raised {described(error)}")


def _say_all(batch: Batch, answers: int, problem: str) -> None:
    """Fail every case of a batch for one reason."""
    send(answers, Started(pid=os.getpid(), versions={}))
    for case_id in batch.cases:
        case = cases.get(case_id)
        verdict = Verdict(
            case=case.id,
            operator=case.operator,
            implementation=batch.implementation,
            status=FAILED,
            problems=(problem,),
            seed=batch.seed,
            fault=case.fault,
        )
        send(answers, Done(verdict=verdict))


if __name__ == "__main__":
    main()
