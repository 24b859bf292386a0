"""Run a backend's cases in child processes, one an implementation, with a time limit a case.

A crash or a hang is a verdict; the child is started again and the run goes on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kimi_hal_conformance.case import Case
from kimi_hal_conformance.verdict import CRASHED, HUNG, Verdict
from kimi_hal_conformance.worker import Job


@dataclass
class Child:
    """A worker process and the pipe on which it answers."""

    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    answers: int = -1
    buffer: bytes = field(default=b"")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the worker if it is not running."""
        if self.process is None:
            self.answers, theirs = os.pipe()
            command = [sys.executable, "-m", "kimi_hal_conformance.worker", str(theirs)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(theirs,), env=dict(self.env)
            )
            os.close(theirs)
            self.buffer = b""
        return self.process

    def ask(self, job: Job, limit: float) -> bytes | None:
        """Send a job; return its answer, ``b""`` if the child died, ``None`` if the limit passed."""
        process = self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], limit)
            if not ready:
                return None
            chunk = os.read(self.answers, 1 << 20)
            if not chunk:
                return b""
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def stop(self) -> int:
        """Kill the worker and return its exit code."""
        if self.process is None:
            return 0
        if self.process.stdin:
            self.process.stdin.close()
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        os.close(self.answers)
        self.process = None
        return code


def run(
    jobs: Sequence[tuple[Case, Job]], environment: Mapping[str, str], limit: float, start_limit: float = 60.0
) -> Iterator[Verdict]:
    """Yield one verdict a job, in order.

    Args:
        jobs: cases with the jobs that name them.
        environment: the children's environment (execution mode, interpreter switches).
        limit: seconds a case may take.
        start_limit: seconds more for the first case of a child, which imports torch and the kernels.
    """
    child = Child(environment)
    try:
        for case, job in jobs:
            fresh = child.process is None
            line = child.ask(job, limit + start_limit if fresh else limit)
            if line:
                yield msgspec.json.decode(line, type=Verdict)
                continue
            hung = line is None
            if hung and child.process:
                child.process.send_signal(signal.SIGKILL)
            yield lost(case, job, hung, child.stop(), limit)
    finally:
        child.stop()


def lost(case: Case, job: Job, hung: bool, code: int, limit: float) -> Verdict:
    """Return the verdict on a case whose child did not answer."""
    if hung:
        status, problem = HUNG, f"no answer within {limit:g} s; the process was ended"
    else:
        status, problem = CRASHED, f"the process ended {ending(code)}"
    return Verdict(
        case=case.id,
        operator=case.operator,
        implementation=job.implementation,
        status=status,
        problems=(problem,),
        seed=job.seed,
        replay=replay(job),
    )


def replay(job: Job) -> str:
    """Return the command that runs one job again."""
    backend = job.implementation.partition(".")[0]
    return f"kimi-hal conformance run --backend {backend} --case {job.case} --seed {job.seed}"


def ending(code: int) -> str:
    """Say how a process ended: by which signal, or with which status."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
