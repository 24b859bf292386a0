"""Run batches, each in a process of its own, on several lanes at once.

A crash or a hang is a verdict; the run goes on. Ctrl-C ends what runs, and what was found until then is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from kimi_hal_conformance.lane import Lane
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.verdict import Verdict


@dataclass(frozen=True)
class Outcome:
    """Verdicts by batch, in the batches' order, and the versions that the device's hooks named.

    Where it was interrupted, batches lack the verdicts that were not there yet.
    """

    verdicts: tuple[tuple[Verdict, ...], ...]
    versions: dict[str, str]
    interrupted: bool = False


def run(
    batches: Sequence[Batch],
    environment: Mapping[str, str],
    lanes: int,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> Outcome:
    """Run every batch.

    Args:
        batches: each becomes a process.
        environment: of the processes: execution mode, interpreter switches.
        lanes: how many run at once.
        progress: told each verdict when it is there, from several threads.
    """
    crew = [Lane(environment) for _ in range(min(lanes, len(batches)))]
    idle: SimpleQueue[Lane] = SimpleQueue()
    for lane in crew:
        idle.put(lane)

    found: list[list[Verdict]] = [[] for _ in batches]

    def one(number: int) -> None:
        lane = idle.get()
        try:
            found[number].extend(_told(lane.run(batches[number]), progress))
        finally:
            idle.put(lane)

    interrupted = False
    pool = ThreadPoolExecutor(max(1, len(crew)))
    try:
        for _ in pool.map(one, range(len(batches))):
            pass
    except KeyboardInterrupt:
        interrupted = True
    finally:  # what runs is ended, what waits is dropped
        for lane in crew:
            lane.stop()
        pool.shutdown(cancel_futures=True)
    versions: dict[str, str] = {}
    for lane in crew:
        versions |= lane.versions
    return Outcome(tuple(map(tuple, found)), versions, interrupted)


def _told(verdicts: Iterator[Verdict], progress: Callable[[Verdict], None]) -> Iterator[Verdict]:
    for verdict in verdicts:
        progress(verdict)
        yield verdict
