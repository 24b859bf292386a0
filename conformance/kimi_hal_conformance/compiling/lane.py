"""One process that compiles, watched by the clock: a crash or a hang is the verdict on the kernel in hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import msgspec

from kimi_hal_conformance.compiling.order import ALL, GO, Order, said
from kimi_hal_conformance.lane import LOST_IN_A_ROW, START_LIMIT, Lane, ending
from kimi_hal_conformance.messages import Done, Ended, Listed
from kimi_hal_conformance.turn import plain
from kimi_hal_conformance.verdict import CRASHED, HUNG, NOT_RUN, Verdict


class CompileLane(Lane):
    """A process that compiles, started when it is needed and again when it is gone."""

    module = "kimi_hal_conformance.compiling.worker"

    def compile(self, order: Order) -> Iterator[Verdict]:
        """Yield one verdict a kernel, in order, whatever becomes of the process.

        Raises:
            StoppedError: ``stop`` was called meanwhile.
        """
        left: Order | None = order
        lost = 0
        while left is not None:
            if lost == LOST_IN_A_ROW:
                problem = f"the rest is not tried: the {LOST_IN_A_ROW} kernels before it were lost"
                yield said(left, ALL, NOT_RUN, problem)
                return
            before = len(left.done)
            left = yield from self._once(left)
            first = left is not None and len(left.done) == before + 1
            lost = lost + 1 if first else 1

    def _once(self, order: Order) -> Generator[Verdict, None, Order | None]:
        """Compile until all is done (``None``) or the process is lost; then return what is left of the order."""
        self._start()
        mark = self._tell(msgspec.json.encode(order))
        kernels: deque[str] | None = None
        done, limit, answered = list(order.done), START_LIMIT, False
        while True:
            message = self._receive(limit)
            answered = answered or isinstance(message, Listed | Done)
            if isinstance(message, Listed):
                kernels, limit = deque(message.kernels), order.limit
                mark = self._tell(GO) if kernels else mark
            elif isinstance(message, Done):
                if kernels:
                    done.append(kernels.popleft())
                found = self._with_output(plain(message.verdict), mark)
                mark = self._tell(GO) if kernels else mark
                yield found
            elif isinstance(message, Ended) and message.code == 0 and answered and not kernels:
                return None
            else:
                name = kernels[0] if kernels else ALL
                yield self._gone(order, name, message if isinstance(message, Ended) else None, mark, limit)
                self._end()
                return msgspec.structs.replace(order, done=(*done, name)) if kernels else None

    def _gone(self, order: Order, kernel: str, ended: Ended | None, mark: int, limit: float) -> Verdict:
        """Return the verdict on the kernel in whose compilation the process ended, or did not answer."""
        if ended is not None:
            problem = f"the process ended {ending(ended.code)}"
            return said(order, kernel, CRASHED, problem, output=self._output(mark))
        assert self._worker is not None
        self._kill(self._worker.pid)
        return said(order, kernel, HUNG, f"no answer within {limit:g} s", output=self._output(mark))
