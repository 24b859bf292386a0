"""The words behind the tokens: where each stands in the sources, so that a selection can be read."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """The text of the context and the place of each token in it.

    ``start [S]`` and ``length [S]`` count characters of ``content``; ``files`` lists each source file's name
    and first character, ascending.
    """

    content: str
    start: Tensor
    length: Tensor
    files: tuple[tuple[str, int], ...]

    def token(self, position: int) -> str:
        """Return the characters of one token."""
        return self.around(position, 0)

    def around(self, position: int, tokens: int) -> str:
        """Return the text from ``tokens`` before a position to ``tokens`` after it, as the file has it."""
        first = max(position - tokens, 0)
        last = min(position + tokens, len(self.start) - 1)
        return self.content[int(self.start[first]) : int(self.start[last]) + int(self.length[last])]

    def place(self, position: int) -> str:
        """Return a token's place as ``file.py:line``."""
        at = int(self.start[position])
        name, begin = self.files[bisect.bisect_right(self.files, at, key=lambda f: f[1]) - 1]
        return f"{name}:{self.content.count(chr(10), begin, at) + 1}"
