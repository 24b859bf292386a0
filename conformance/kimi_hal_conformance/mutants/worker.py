"""The process that imports torch and the suite once, and forks one process for every mutant.

Jobs come in on standard input; messages go out on a descriptor of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import NoReturn

import msgspec
import torch

from kimi_hal import ops
from kimi_hal.dispatch import policy
from kimi_hal.dispatch.device import HostDevice
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.case import Case
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.execute import run_case
from kimi_hal_conformance.mutants import catalogue
from kimi_hal_conformance.mutants.clone import Clone
from kimi_hal_conformance.mutants.messages import Died, Job, Kill, Message, Outcome, Trying
from kimi_hal_conformance.mutants.mutant import Mutant
from kimi_hal_conformance.mutants.plugin import NAME
from kimi_hal_conformance.promises import Allowance, operand_names
from kimi_hal_conformance.properties import PROPERTIES
from kimi_hal_conformance.properties.property import violation
from kimi_hal_conformance.shrink import described, smallest
from kimi_hal_conformance.sparse import CannotTryError
from kimi_hal_conformance.verdict import AGAINST, NOT_RUN, REFUSED, Verdict

#: On how many cases of an operator relations are tried, and how often a call is made again: as in the quick profile.
RELATIONS, REPEATS = 2, 1


def main() -> None:
    """Serve jobs until standard input ends."""
    load()
    torch.set_num_threads(1)
    answers = int(sys.argv[1])
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        tests = sorted(job.tests, key=lambda test: (size(test, job.seed), test))
        pid = os.fork()
        if not pid:
            torch.set_num_threads(1)  # makes torch's pool anew, which two threads at once must not
            _serve(msgspec.structs.replace(job, tests=tuple(tests)), answers)
        _, status = os.waitpid(pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            send(answers, Died(code=code))


def send(answers: int, message: Message) -> None:
    """Write a message on a line of its own."""
    os.write(answers, b"\n" + msgspec.json.encode(message) + b"\n")


def _serve(job: Job, answers: int) -> NoReturn:
    status = 1
    try:
        logging.disable()  # what a wrong core warns of is no one's concern
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        send(answers, tried(job, lambda test: send(answers, Trying(test=test))))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


@cache
def size(test: str, seed: int) -> int:
    """Return the bytes of a case's operands; a property has none, nor has a case that this machine cannot make."""
    if test in PROPERTIES:
        return 0
    case = cases.get(test)
    try:
        return cases.nbytes(case.make(cases.generator(case, seed)))
    except CannotTryError:  # its turn says why
        return 0


def tried(job: Job, announce: Callable[[str], None]) -> Outcome:
    """Run a mutant's tests, the smallest first."""
    start, count = time.perf_counter(), 0
    kills: list[Kill] = []
    refused: list[str] = []
    untried: dict[str, str] = {}
    left = {operator: Allowance(RELATIONS) for operator in ops.OPERATORS}
    mutant = catalogue.load()[job.mutant]
    policy.freeze()  # as an engine does: to look for plugins and sources again costs more than a small case
    for test in job.tests:
        announce(test)
        signal.alarm(job.limit)
        try:
            kill = (
                by_property(mutant, test) if test in PROPERTIES else by_case(mutant, test, job, refused, left)
            )
            count += 1
        except CannotTryError as error:
            untried[test], kill = str(error), None
        signal.alarm(0)
        if kill is not None:
            kills.append(kill)
            if not job.every:
                break
    return Outcome(
        mutant=job.mutant,
        kills=tuple(kills),
        tried=count,
        refused=tuple(refused),
        untried=untried,
        seconds=time.perf_counter() - start,
    )


def by_property(mutant: Mutant, test: str) -> Kill | None:
    """Hold a property against a copy of the whole core with the mutant's line in it."""
    clone = Clone(f"kimi_hal_mutated_{mutant.id}", None, mutant)
    problem = violation(PROPERTIES[test], clone.module)
    return Kill(test=test, smallest=test, input=PROPERTIES[test].input, problem=problem) if problem else None


def by_case(
    mutant: Mutant, test: str, job: Job, refused: list[str], left: Mapping[str, Allowance]
) -> Kill | None:
    """Run a case on the mutant; where it fails, find the smallest part of it that does.

    What relations and repeated calls may find is tried as in the quick profile: relations on the first cases of an
    operator that show it.

    Raises:
        CannotTryError: this machine cannot make its operands.
    """
    subject = Subject(f"{NAME}.{mutant.id}", "cpu", HostDevice())

    case = cases.get(test)
    operands = operand_names(case, job.seed)
    effort = left[case.operator].effort(REPEATS, operands)

    def verdict(case: Case) -> Verdict:
        return run_case(case, subject, job.seed, effort)

    found = verdict(case)
    if found.status == NOT_RUN:
        raise CannotTryError(found.problems[0])
    left[case.operator].spend(found.promises, operands)
    if found.status == REFUSED:
        refused.append(test)
    if found.status not in AGAINST:
        return None
    part = case if job.every else smallest(case, job.seed, lambda piece: verdict(piece).status in AGAINST)
    problems = found.problems if part is case else verdict(part).problems
    return Kill(test=test, smallest=part.id, input=described(part, job.seed), problem=problems[0])


if __name__ == "__main__":
    main()
