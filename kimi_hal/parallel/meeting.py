"""The place where W threads meet: each call ends for all of them, with everyone's offer or with one error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kimi_hal.errors import GroupError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose.

    Args:
        late: rank -> seconds that it waits before it arrives at each call.
        dead: rank -> number of the call (from 0) at which it ends without arriving or raising.
        reorder: a seed; the ranks then arrive at each call in an order drawn from it.
    """

    late: Mapping[int, float] = field(default_factory=dict)
    dead: Mapping[int, int] = field(default_factory=dict)
    reorder: int | None = None

    def check(self, world: int) -> None:
        """Refuse ranks that a group does not have, which nothing would happen to, and negative delays."""
        strange = sorted(rank for rank in {*self.late, *self.dead} if rank not in range(world))
        if strange:
            raise GroupError(f"faults name {ranks_text(strange)}, the group has ranks 0 to {world - 1}")
        if any(seconds < 0 for seconds in self.late.values()):
            raise GroupError(f"a late rank waits 0 seconds or more, got {dict(self.late)}")


@dataclass(frozen=True)
class Offer:
    """What a rank brings to a call: its name, the shape and dtype of the message, the message."""

    call: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    payload: Any = None

    def __str__(self) -> str:
        return self.call if self.shape is None else f"{self.call} {list(self.shape)} {self.dtype}"


class _Dead(BaseException):
    """Ends a rank's thread as a killed process would: no handler of the rank's own code sees it."""


class Meeting:
    """The state that W ranks share. Calls are matched by their number on each rank, from 0.

    A failure ends the call at which it happened on every rank, and every later call.
    """

    def __init__(self, world: int, timeout: float, faults: Faults) -> None:
        if not isinstance(world, int) or world < 1:
            raise GroupError(f"a group has at least 1 rank, got {world!r}")
        check_timeout(timeout)
        faults.check(world)
        self.world = world
        self.timeout = timeout
        self.faults = faults
        self.failure: str | None = None
        self.errors: dict[int, BaseException] = {}  # in the order in which they happened
        self._changed = threading.Condition()
        self._calls = [0] * world
        self._offers: dict[int, dict[int, Offer]] = {}
        self._taken: dict[int, int] = {}
        self._ended: dict[int, str] = {}
        self._inside = [threading.Lock() for _ in range(world)]

    def exchange(self, rank: int, offer: Offer) -> list[Any]:
        """Bring an offer to this rank's next call and return everyone's messages in rank order."""
        if not self._inside[rank].acquire(blocking=False):
            with self._changed:
                self._fail(
                    f"rank {rank} called {offer.call} while another call of this rank was under way: each rank uses "
                    "its own group, from one thread at a time"
                )
                self._raise_failure()
        try:
            return self._exchange(rank, offer)
        finally:
            self._inside[rank].release()

    def _exchange(self, rank: int, offer: Offer) -> list[Any]:
        number = self._calls[rank]
        self._calls[rank] += 1
        if self.faults.dead.get(rank, number + 1) <= number:
            raise _Dead
        if rank in self.faults.late:
            time.sleep(self.faults.late[rank])
        with self._changed:
            self._await(self._before(rank, number), number, offer)
            self._offers.setdefault(number, {})[rank] = offer
            self._changed.notify_all()
            self._await(range(self.world), number, offer)
            return self._take(number)

    def _before(self, rank: int, number: int) -> Iterable[int]:
        """Return the ranks that must arrive before this one."""
        if self.faults.reorder is None:
            return ()
        order = random.Random(f"{self.faults.reorder} {number}").sample(range(self.world), self.world)
        return order[: order.index(rank)]

    def _await(self, ranks: Iterable[int], number: int, offer: Offer) -> None:
        """Wait until these ranks have arrived; raise if one cannot, or the group has failed."""
        deadline = time.monotonic() + self.timeout
        while missing := [r for r in ranks if r not in self._offers.get(number, {})]:
            gone = [r for r in missing if r in self._ended]
            left = deadline - time.monotonic()
            if self.failure is None and gone:
                self._fail(f"rank {gone[0]} {self._ended[gone[0]]}; {offer.call} (call {number}) cannot end")
            elif self.failure is None and left <= 0:
                what = f"did not arrive at {offer.call} (call {number}) within {self.timeout:g} s"
                self._fail(f"{ranks_text(missing)} {what}")
            self._raise_failure()
            self._changed.wait(left)
        self._raise_failure(unless=self._complete(number))

    def _complete(self, number: int) -> bool:
        return len(self._offers.get(number, {})) == self.world

    def _take(self, number: int) -> list[Any]:
        offers = [self._offers[number][rank] for rank in range(self.world)]
        problem = disagreement(number, [str(offer) for offer in offers])
        if problem:
            self._fail(problem)
            raise GroupError(problem)
        self._taken[number] = self._taken.get(number, 0) + 1
        if self._taken[number] == self.world:
            del self._offers[number], self._taken[number]
        return [offer.payload for offer in offers]

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text
        self._changed.notify_all()

    def _raise_failure(self, unless: bool = False) -> None:
        if self.failure is not None and not unless:
            raise GroupError(self.failure)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Note how a rank ended; whoever waits for it is woken."""
        with self._changed:
            self._ended[rank] = _ending(error)
            if error is not None:
                self.errors[rank] = error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until every rank has ended; after a failure no longer than the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == self.world or self.failure is not None)
            self._changed.wait_for(lambda: len(self._ended) == self.world, self.timeout)
            running = [r for r in range(self.world) if r not in self._ended]
        if running:
            raise GroupError(f"{self.failure}; {ranks_text(running)} still running")


def check_timeout(seconds: float) -> None:
    """Refuse a timeout that never ends, or that is none."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= threading.TIMEOUT_MAX:
        raise GroupError(f"timeout={seconds!r} is not a number of seconds above 0")


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "returned"
    return "died" if isinstance(error, _Dead) else f"raised {type(error).__name__}: {error}"


def run_ranks(meeting: Meeting, body: Callable[[int], Result]) -> list[Result]:
    """Run ``body(rank)`` in a thread a rank; return the results in rank order or raise the first failure."""
    results: dict[int, Result] = {}

    def thread(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = body(rank)
        except BaseException as caught:  # a rank's failure belongs to the group, whatever it is
            error = caught
        meeting.end(rank, error)

    for rank in range(meeting.world):
        # Daemons: a rank that hangs must not keep the process alive.
        threading.Thread(target=thread, args=(rank,), daemon=True, name=f"rank {rank}").start()
    meeting.wait()
    for rank, error in meeting.errors.items():  # the first one is why the others failed
        text = str(error) if isinstance(error, GroupError) else f"rank {rank} {_ending(error)}"
        raise GroupError(text) from error
    return [results[rank] for rank in range(meeting.world)]


def disagreement(number: int, offers: list[str]) -> str | None:
    """Return the sentence that names each different offer and its ranks, or ``None`` if all are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        ranks.setdefault(offer, []).append(rank)
    if len(ranks) == 1:
        return None
    return f"ranks disagree at call {number}: " + "; ".join(f"{ranks_text(r)} {o}" for o, r in ranks.items())


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 0, 2"``."""
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
