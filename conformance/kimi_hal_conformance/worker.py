"""The child process that runs cases of one implementation, so that a device fault ends only itself.

Reads one JSON job a line from standard input, writes one JSON verdict a line to the given descriptor: a
kernel that prints to standard output cannot garble a verdict.
"""

from __future__ import annotations

import os
import sys

import msgspec

from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.loader import resolve
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.execute import Subject, run_case


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One case to run."""

    case: str
    implementation: str
    device: str
    hooks: str
    seed: int


def main() -> None:
    """Serve jobs until standard input ends."""
    load()
    answers = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    hooks: dict[str, DeviceHooks] = {}
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        device = hooks.setdefault(job.hooks, resolve(job.hooks)())
        verdict = run_case(cases.get(job.case), Subject(job.implementation, job.device, device), job.seed)
        answers.write(msgspec.json.encode(verdict) + b"\n")


if __name__ == "__main__":
    main()
