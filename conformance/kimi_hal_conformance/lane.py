"""One worker process and what it is doing: a batch at a time, watched by the clock."""

from __future__ import annotations

import contextlib
import fcntl
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

from kimi_hal_conformance.levels import SPEED
from kimi_hal_conformance.messages import (
    SHRINKING,
    TIMING,
    Batch,
    Done,
    Ended,
    Message,
    Shrunk,
    Started,
    Timed,
)
from kimi_hal_conformance.printable import printable
from kimi_hal_conformance.turn import Turn, plain, verdict
from kimi_hal_conformance.verdict import CRASHED, FAILED, HUNG, NOT_RUN, PASSED, Verdict

#: Seconds in which a worker must have imported torch and the suite, and the device's hooks answered.
START_LIMIT = 120.0
#: Seconds more for the first case of a process, which imports the kernels and may compile them.
FIRST_CASE = 60.0
#: Seconds in which a process that was asked to show its stack must end.
GRACE = 3.0
#: After so many lost cases in a row the rest of an implementation's are not tried.
LOST_IN_A_ROW = 3
#: Characters kept of what a process printed.
OUTPUT = 4000
#: Bytes of it that lie on the disk at most when it is looked at.
LOG = 64 << 20
#: Seconds between two looks.
LOOK = 0.25


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
        self._log: IO[bytes] = TemporaryFile(buffering=0)  # noqa: SIM115 - closed by stop()
        # Whoever writes does so at the end: it is cut while processes print.
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
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
        turn = Turn(batch, mark=self._tell(msgspec.json.encode(batch)), limit=START_LIMIT)
        while True:
            message = self._receive(turn.limit)
            self._batch = 0 if isinstance(message, Ended) else self._batch  # its number may be another's now
            if turn.held is not None:
                yield turn.completed(message)
                if message is None:
                    self._kill(turn.pid)
                if message is None or (isinstance(message, Ended) and turn.left):
                    return  # a part that is lost says nothing of the next case
            if isinstance(message, Shrunk | Timed):
                turn.mark = self._mark()
            elif isinstance(message, Started):
                turn.pid = self._batch = message.pid
                turn.limit = batch.limit + FIRST_CASE
                self.versions = self.versions | message.versions
            elif isinstance(message, Done):
                yield from self._done(turn, message)
            else:
                yield from self._over(turn, message if isinstance(message, Ended) else None)
                return

    def _done(self, turn: Turn, message: Done) -> Iterator[Verdict]:
        """Yield the verdict on the case in hand, unless more is to come of it."""
        if not turn.left or message.verdict.case != turn.left[0]:
            return  # no one asked for it: a copy of the process, made by a kernel, speaks too
        turn.left.popleft()
        found = self._with_output(plain(message.verdict), turn.mark)
        turn.mark, turn.limit = self._mark(), turn.batch.limit
        if message.timing:
            turn.hold(found, TIMING)
        elif found.status == FAILED:
            turn.hold(found, SHRINKING + 2 * found.seconds + GRACE)
        else:
            yield found

    def _over(self, turn: Turn, ended: Ended | None) -> Iterator[Verdict]:
        """Yield the verdict on the case in whose midst the process ended, or did not answer, if there is one."""
        if not turn.left:
            if ended is None:
                self._end()
            return
        case = turn.left[0]
        if ended is not None:
            problem = f"the process ended {ending(ended.code)}"
            yield verdict(turn.batch, case, CRASHED, problem, self._output(turn.mark))
            return
        self._kill(turn.pid)
        yield verdict(turn.batch, case, HUNG, f"no answer within {allowed(turn)}", self._output(turn.mark))

    def _tell(self, line: bytes) -> int:
        """Tell the process something; return where in the log begins what it prints from then on."""
        assert self._worker is not None
        assert self._worker.stdin is not None
        mark = self._mark()
        with contextlib.suppress(BrokenPipeError):
            self._worker.stdin.write(line + b"\n")
            self._worker.stdin.flush()
        return mark

    def _mark(self) -> int:
        """Return where the log ends."""
        return os.fstat(self._log.fileno()).st_size

    def _trim(self) -> None:
        """Keep the end of the log alone where a process prints without end: it would fill its neighbours' disk too."""
        log, size = self._log.fileno(), self._mark()
        if size > LOG:
            end = os.pread(log, OUTPUT, size - OUTPUT)
            os.ftruncate(log, 0)
            os.write(log, end)

    def _with_output(self, found: Verdict, mark: int) -> Verdict:
        """Return a verdict with what was printed since a mark, unless it passed."""
        if found.status == PASSED:
            return found
        output = f"{self._output(mark)}\n{found.output}".strip()
        return msgspec.structs.replace(found, output=output[-OUTPUT:])

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
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._answers], [], [], min(left, LOOK))
            if self._stopped:
                raise StoppedError
            self._trim()
            if not ready and left > LOOK:
                continue
            if not ready:
                return None
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return self._closed(deadline)
            self._pending += chunk

    def _closed(self, deadline: float) -> Ended | None:
        """Return how the worker ended that speaks no more, ``None`` if it goes on in silence."""
        try:
            return Ended(code=self._worker.wait(max(0.0, deadline - time.monotonic())) if self._worker else 0)
        except subprocess.TimeoutExpired:
            return None

    def _output(self, mark: int) -> str:
        """Return the end of what was printed since a mark."""
        end = self._mark()
        start = max(mark if mark <= end else 0, end - OUTPUT)  # it may have been begun anew since
        return printable(os.pread(self._log.fileno(), end - start, start).decode(errors="replace").strip())


def allowed(turn: Turn) -> str:
    """Say how long a process had for the case in hand: the limit that was asked for, and what its first has more."""
    if turn.pid and turn.limit == turn.batch.limit + FIRST_CASE:
        return f"{turn.batch.limit:g} s, and {FIRST_CASE:g} s more for the first case of a process"
    return f"{turn.limit:g} s"


def ending(code: int) -> str:
    """Say how a process ended: by which signal, or with which status."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
