"""One worker process and what it is doing: a batch at a time, watched by the clock."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from tempfile import TemporaryFile
from typing import IO

import msgspec

from kimi_hal_conformance.case import get
from kimi_hal_conformance.levels import SPEED
from kimi_hal_conformance.messages import (
    SHRINKING,
    TIMING,
    UNUSABLE,
    Batch,
    Done,
    Ended,
    Message,
    Shrunk,
    Started,
    Timed,
)
from kimi_hal_conformance.verdict import AGAINST, CRASHED, FAILED, HUNG, NOT_RUN, PASSED, Verdict

#: Seconds in which a worker must have imported torch and the suite, and the device's hooks answered.
START_LIMIT = 120.0
#: Seconds more for the first case of a process, which imports the kernels and may compile them.
FIRST_CASE = 60.0
#: Seconds in which a process that was asked to show its stack must end.
GRACE = 3.0
#: After so many lost cases in a row the rest of an implementation's are not tried.
LOST_IN_A_ROW = 3
#: What is said of the input of a case whose process was lost, and of one whose process ended itself.
NOT_CUT = "the whole case: what ends its process is not cut down"
LEFT_UNUSABLE = "the whole case: it left the device unusable, and the process ended"
#: Characters kept of what a process printed.
OUTPUT = 4000


class StoppedError(Exception):
    """The lane was stopped while it worked."""


class Lane:
    """A worker process, started when it is needed and again when it is gone."""

    module = "kimi_hal_conformance.worker"

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.versions: dict[str, str] = {}
        self._worker: subprocess.Popen[bytes] | None = None
        self._batch = 0  # the process of the batch in hand, which leads a group of its own
        self._answers = -1
        self._pending = b""
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._stopped = False

    def run(self, batch: Batch) -> Iterator[Verdict]:
        """Yield one verdict a case, in order, whatever becomes of the process.

        Raises:
            StoppedError: ``stop`` was called meanwhile.
        """
        left, lost = deque(batch.cases), 0
        while left:
            if lost == LOST_IN_A_ROW:
                problem = f"not tried: the {LOST_IN_A_ROW} cases before it were lost"
                yield from (verdict(batch, case, NOT_RUN, problem) for case in left)
                return
            for found in self._attempt(msgspec.structs.replace(batch, cases=tuple(left))):
                left.popleft()
                if SPEED in found.untried or found.speed:  # once, whatever became of it
                    batch = msgspec.structs.replace(batch, untimed="it was timed before")
                lost = lost + 1 if found.status in (CRASHED, HUNG) else 0
                yield found

    def stop(self) -> None:
        """End the worker and everything that it started."""
        self._stopped = True
        if self._batch:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._batch, signal.SIGKILL)
        self._end()
        self._log.close()

    def _attempt(self, batch: Batch) -> Iterator[Verdict]:
        """Run a batch until it is done or its process is lost, which is the verdict on the case in hand."""
        self._start()
        assert self._worker is not None
        assert self._worker.stdin is not None
        mark = self._log.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):
            self._worker.stdin.write(msgspec.json.encode(batch) + b"\n")
            self._worker.stdin.flush()
        left, pid, limit = deque(batch.cases), 0, START_LIMIT
        failed: Verdict | None = None  # a smaller part of its case is looked for, or its operator timed
        while True:
            message = self._receive(limit)
            self._batch = 0 if isinstance(message, Ended) else self._batch  # its number may be another's now
            if failed is not None:
                yield completed(failed, message)
                failed, limit = None, batch.limit
                if message is None:
                    self._kill(pid)
                if message is None or (isinstance(message, Ended) and left):
                    return  # a part that is lost says nothing of the next case
            if isinstance(message, Shrunk | Timed):
                mark = self._log.seek(0, os.SEEK_END)
            elif isinstance(message, Started):
                pid, self.versions = message.pid, self.versions | message.versions
                self._batch = pid
                limit = batch.limit + FIRST_CASE
            elif isinstance(message, Done):
                if not left or message.verdict.case != left[0]:
                    continue  # no one asked for it: a copy of the process, made by a kernel, speaks too
                left.popleft()
                limit = batch.limit
                found = message.verdict
                if found.status != PASSED:
                    output = f"{self._output(mark)}\n{found.output}".strip()
                    found = msgspec.structs.replace(found, output=output[-OUTPUT:])
                mark = self._log.seek(0, os.SEEK_END)
                if message.timing:
                    failed, limit = found, TIMING
                elif found.status == FAILED:
                    failed, limit = found, SHRINKING + 2 * found.seconds + GRACE
                else:
                    yield found
            else:
                ended = message if isinstance(message, Ended) else None
                if left:
                    yield self._lost(batch, left[0], ended, pid, mark, limit)
                elif ended is None:
                    self._end()
                return

    def _lost(
        self, batch: Batch, case: str, ended: Ended | None, pid: int, mark: int, limit: float
    ) -> Verdict:
        if ended is not None:
            return verdict(
                batch, case, CRASHED, f"the process ended {ending(ended.code)}", self._output(mark)
            )
        self._kill(pid)
        return verdict(batch, case, HUNG, f"no answer within {limit:g} s", self._output(mark))

    def _kill(self, pid: int) -> None:
        """End the process of a batch; it prints its stack first, if it still can."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)
                if isinstance(self._receive(GRACE), Ended):
                    return
        self._end()

    def _start(self) -> None:
        if self._stopped:
            raise StoppedError
        if self._worker is not None and self._worker.poll() is None:
            return
        self._end()
        self._answers, theirs = os.pipe()
        command = [sys.executable, "-m", self.module, str(theirs)]
        self._worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs,),
            env=self.environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._pending = b""

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        if worker.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
        os.close(self._answers)

    def _receive(self, limit: float) -> Message | None:
        """Return the next message, ``None`` if the time is over; a worker that is gone has ended."""
        deadline = time.monotonic() + limit
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                with contextlib.suppress(msgspec.DecodeError):  # what a dying process left of its line
                    found: Message = msgspec.json.decode(line, type=Message)
                    return found
                continue
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if self._stopped:
                raise StoppedError
            if not ready:
                return None
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return Ended(code=self._worker.wait() if self._worker else 0)
            self._pending += chunk

    def _output(self, mark: int) -> str:
        """Return the end of what was printed since a mark."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(mark, end - OUTPUT))
        return self._log.read().decode(errors="replace").strip()


def completed(held: Verdict, message: Message | None) -> Verdict:
    """Return a verdict with what was done after its case: a smaller part was looked for, or a call timed."""
    if held.status == FAILED:
        return with_input(held, message)
    if isinstance(message, Timed) and message.speed:
        return msgspec.structs.replace(held, speed=message.speed)
    lost = "the process was lost while a call was timed" if message else f"a call took more than {TIMING:g} s"
    why = message.why if isinstance(message, Timed) else lost
    return msgspec.structs.replace(held, untried=held.untried | {SPEED: why})


def with_input(failed: Verdict, message: Message | None) -> Verdict:
    """Return a failed verdict with the smallest part of its case that fails, or why none is known."""
    if isinstance(message, Shrunk):
        return msgspec.structs.replace(failed, smallest=message.smallest, input=message.input)
    if message is not None and not isinstance(message, Ended):
        return failed  # it was never run
    if message is not None and message.code == UNUSABLE:
        return msgspec.structs.replace(failed, smallest=failed.case, input=LEFT_UNUSABLE)
    lost = "was lost" if message else "gave no answer in time"
    said = f"the whole case: the process that looked for a smaller one {lost}"
    return msgspec.structs.replace(failed, smallest=failed.case, input=said)


def verdict(batch: Batch, case_id: str, status: str, problem: str, output: str = "") -> Verdict:
    """Return a verdict on a case that gave none itself."""
    case = get(case_id)
    return Verdict(
        case=case.id,
        operator=case.operator,
        implementation=batch.implementation,
        status=status,
        problems=(problem,),
        seed=batch.seed,
        fault=case.fault,
        output=output,
        smallest=case.id if status in AGAINST else "",
        input=NOT_CUT if status in AGAINST else "",
    )


def ending(code: int) -> str:
    """Say how a process ended: by which signal, or with which status."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
