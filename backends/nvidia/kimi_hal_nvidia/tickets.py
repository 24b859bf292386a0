"""Words of memory by which the blocks of a launch share work: no two launches that may overlap have the same."""

from __future__ import annotations

from torch import Tensor
from torch.cuda import is_current_stream_capturing

#: The handle that names every thread's own default stream: launches of several threads on it may overlap.
PER_THREAD = 2


class Tickets:
    """A plan's words: each stream and each captured launch has its own.

    Launches of a stream follow each other, and so do those of a captured one; others may overlap. Who gets no words
    does without: shares of scores are fixed then, and parts of attention meet in clusters. So it is on the default
    stream of each thread, whose handle is the same for all, and where streams and captured launches have used up all
    words: a captured launch keeps its own as long as the plan lives.

    Args:
        words: zeros that nobody else writes, of as many launches; None: there are none.
        launches: that have some.
        each: bytes of a launch.
    """

    def __init__(self, words: Tensor | None, launches: int, each: int) -> None:
        self.words = words
        begin = 0 if words is None else words.data_ptr()
        self.free = iter(range(begin, begin + launches * each, each))
        self.streams: dict[int, int] = {}

    def of(self, stream: int) -> int:
        """Return the address of a launch's words on the current stream; 0: there are none."""
        if self.words is None:
            return 0
        if is_current_stream_capturing():
            return next(self.free, 0)
        if stream == PER_THREAD:
            return 0
        if stream not in self.streams:
            self.streams[stream] = next(self.free, 0)
        return self.streams[stream]
