"""Prove that the suite can fail: run it over every mutant, and fail if one survives.

A mutant's cases and properties run in a process of their own, the smallest first, until one kills it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import msgspec

from kimi_hal.settings import VARIABLES
from kimi_hal_conformance import __version__
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import QUICK, STANDARD
from kimi_hal_conformance.cases import load as load_cases
from kimi_hal_conformance.mutants import catalogue, mutant
from kimi_hal_conformance.mutants.messages import Job, Kill, Message, Outcome, Trying
from kimi_hal_conformance.mutants.mutant import Mutant
from kimi_hal_conformance.mutants.plugin import NAME
from kimi_hal_conformance.properties import PROPERTIES
from kimi_hal_conformance.schema import SCHEMA_VERSION

#: Seconds that one test of a mutant may take.
LIMIT = 120
#: What a lane starts; it gets the descriptor to answer on as its last argument.
WORKER = (sys.executable, "-m", "kimi_hal_conformance.mutants.worker")
#: Mutants that every test kills show nothing; no more than this part of all may be such.
KILLED_BY_ALL = 0.1


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant.

    Args:
        name: its id.
        operator: those whose cases try it, else the areas of the properties that do, separated by commas.
        killed: one of its tests found it.
        killed_by: the smallest test that did; empty: it survived.
        input: the smallest input that shows the fault, operand by operand.
        file: the changed file of the package.
        breaks: what is wrong with it.
        imitates: the public report.
        kills: what killed it, the smallest first; empty: it survived.
        tried: how many tests ran.
        of: how many there are for it here.
        untried: tests whose operands this machine cannot make -> why; they count nowhere else.
        refused: tests that it refused, where it must claim everything.
        seconds: of all of them.
    """

    name: str
    operator: str
    killed: bool
    killed_by: str
    input: str
    file: str
    breaks: str
    imitates: str
    kills: tuple[Kill, ...]
    tried: int
    of: int
    untried: dict[str, str]
    refused: tuple[str, ...]
    seconds: float

    @property
    def by_all(self) -> bool:
        """Tell whether every test killed it; known only where all of them ran."""
        return len(self.kills) == self.of == self.tried and self.of > 1


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Args:
        schema: as in ``schema.py``.
        suite_version: the suite's.
        profile: quick or standard.
        every: all tests ran over each mutant, not only up to the first that kills it.
        seed: of the operands.
        seconds: of the run.
        mutants: what became of each.
    """

    schema: int
    suite_version: str
    profile: str
    every: bool
    seed: int
    seconds: float
    mutants: tuple[Killed, ...]

    @property
    def survivors(self) -> tuple[str, ...]:
        """Return the mutants that nothing killed."""
        return tuple(m.name for m in self.mutants if not m.killed)

    @property
    def refusing(self) -> tuple[str, ...]:
        """Return the mutants that refused a test: they are not on trial where they do."""
        return tuple(m.name for m in self.mutants if m.refused)

    @property
    def untried(self) -> dict[str, str]:
        """Return the tests whose operands this machine cannot make, and why."""
        return {test: why for m in self.mutants for test, why in m.untried.items()}

    @property
    def ok(self) -> bool:
        """Tell whether the suite has proved itself."""
        killed_by_all = sum(m.by_all for m in self.mutants)
        return bool(self.mutants) and not (
            self.survivors or self.refusing or killed_by_all > KILLED_BY_ALL * len(self.mutants)
        )


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Args:
        only: mutants; empty: all.
        quick: the quick profile alone.
        every: run all tests, also behind the first that kills.
        seed: of the operands.
        lanes: processes at once; ``None``: one a core.
    """

    only: Sequence[str] = ()
    quick: bool = False
    every: bool = False
    seed: int = 0
    lanes: int | None = None


def run(wanted: Wanted, progress: Callable[[Killed], None] = lambda killed: None) -> Proof:
    """Run the suite over mutants.

    Raises:
        UnknownNameError: no such mutant; the nearest is named.
    """
    load_cases()
    known = catalogue.load()
    chosen = [mutant.get(name) for name in wanted.only] or list(known.values())
    start = time.perf_counter()
    lanes = min(wanted.lanes or len(os.sched_getaffinity(0)), len(chosen))
    # Processes end before threads are waited for: what is left of an interrupted run fails at once.
    with plugin_path() as path, ThreadPoolExecutor(lanes) as pool, crew(environment(path), lanes) as idle:

        def one(subject: Mutant) -> Killed:
            lane = idle.get()
            try:
                found = lane.run(job(subject, wanted), subject)
            finally:
                idle.put(lane)
            progress(found)
            return found

        # The longest first: what is left for the end is short.
        ordered = sorted(chosen, key=lambda m: -len(tests(m, wanted.quick)))
        found = {k.name: k for k in pool.map(one, ordered)}
    return Proof(
        schema=SCHEMA_VERSION,
        suite_version=__version__,
        profile=QUICK if wanted.quick else STANDARD,
        every=wanted.every,
        seed=wanted.seed,
        seconds=time.perf_counter() - start,
        mutants=tuple(found[m.id] for m in chosen),
    )


def tests(subject: Mutant, quick: bool) -> tuple[str, ...]:
    """Return the tests that may kill a mutant: the cases of its operators, the properties of its areas."""
    own = [p.id for p in PROPERTIES.values() if p.area in subject.areas]
    mine = [c for c in cases.CASES.values() if c.operator in subject.operators]
    return (*own, *(c.id for c in mine if c.runs_in(QUICK if quick else STANDARD)))


def job(subject: Mutant, wanted: Wanted) -> Job:
    """Return what a mutant's process is told."""
    return Job(
        mutant=subject.id,
        tests=tests(subject, wanted.quick),
        every=wanted.every,
        seed=wanted.seed,
        limit=LIMIT,
    )


@contextmanager
def plugin_path() -> Iterator[Path]:
    """Make a folder that registers the mutants as a plugin for whoever has it in its path."""
    with TemporaryDirectory(prefix="kimi-hal-mutants-") as folder:
        info = Path(folder) / f"kimi_hal_mutants-{__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kimi-hal-mutants\nVersion: {__version__}\n"
        )
        (info / "entry_points.txt").write_text(f"[kimi_hal]\n{NAME} = kimi_hal_conformance.mutants.plugin\n")
        yield Path(folder)


def environment(path: Path) -> dict[str, str]:
    """Return the environment of processes that see the mutants."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH", ""))))
    return inherited | {"PYTHONPATH": places, "KIMI_HAL_BACKEND": NAME, "OMP_NUM_THREADS": "1"}


@contextmanager
def crew(environ: Mapping[str, str], lanes: int) -> Iterator[SimpleQueue[Lane]]:
    """Start processes, and end them."""
    started = [Lane(environ) for _ in range(lanes)]
    idle: SimpleQueue[Lane] = SimpleQueue()
    for lane in started:
        idle.put(lane)
    try:
        yield idle
    finally:
        for lane in started:
            lane.stop()


class Lane:
    """A process that runs one mutant after another, each in a fork of its own."""

    def __init__(self, environ: Mapping[str, str], worker: Sequence[str] = WORKER) -> None:
        answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [*worker, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            env=dict(environ),
            start_new_session=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers, "rb")

    def run(self, todo: Job, subject: Mutant) -> Killed:
        """Run a mutant's tests; a process that dies or hangs is killed by the test it was at."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(todo) + b"\n")
        self._process.stdin.flush()
        at = ""
        while True:
            message = self._receive()
            if isinstance(message, Trying):
                at = message.test
            elif isinstance(message, Outcome):
                return concluded(subject, todo, message)
            else:
                lost = Kill(test=at, smallest=at, input="", problem=ending(message.code))
                return concluded(
                    subject, todo, Outcome(mutant=subject.id, kills=(lost,), tried=todo.tests.index(at) + 1)
                )

    def stop(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def _receive(self) -> Message:
        for line in self._answers:
            if line.strip():
                found: Message = msgspec.json.decode(line, type=Message)
                return found
        raise RuntimeError(f"the process that runs mutants {ending(self._process.wait())}")


def ending(code: int) -> str:
    """Say how a process ended."""
    if code == -signal.SIGALRM:
        return f"gave no answer within {LIMIT} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def concluded(subject: Mutant, todo: Job, found: Outcome) -> Killed:
    """Join what a mutant is and what became of it."""
    first = found.kills[0] if found.kills else None
    return Killed(
        name=subject.id,
        operator=", ".join(subject.operators or subject.areas),
        killed=first is not None,
        killed_by=first.test if first else "",
        input=first.input if first else "",
        file=subject.file,
        breaks=subject.breaks,
        imitates=subject.imitates,
        kills=found.kills,
        tried=found.tried,
        of=len(todo.tests) - len(found.untried),
        untried=found.untried,
        refused=found.refused,
        seconds=found.seconds,
    )
