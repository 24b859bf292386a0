"""The text: sources of the running interpreter's standard library.

The choice is fixed, so one interpreter version always gives the same text. Another version's library reads
otherwise: another text, and so another hash of everything that is made from it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from kimi_hal.errors import KimiHalError

#: In this order, each whole; one that this interpreter does not have is passed over. Together about 90,000
#: tokens; the default takes the first dozen.
MODULES = (
    "heapq", "bisect", "textwrap", "queue", "sched", "abc", "copy", "csv", "string", "shlex", "contextlib",
    "fractions", "calendar", "functools", "random", "statistics", "dataclasses",
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """The text and where each file begins in it, in characters."""

    content: str
    files: tuple[tuple[str, int], ...]

    @property
    def sha256(self) -> str:
        """Return the hash of the text, in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def until(self, end: int) -> Corpus:
        """Return the first ``end`` characters."""
        return Corpus(self.content[:end], tuple(f for f in self.files if f[1] < end))


def library() -> Path:
    """Return the folder of the standard library's sources."""
    return Path(sysconfig.get_path("stdlib"))


def read(folder: Path | None = None) -> Corpus:
    """Join the sources, a newline between two files.

    Raises:
        KimiHalError: the interpreter came without its sources.
    """
    folder = folder or library()
    content, files = "", []
    for name in MODULES:
        path = folder / f"{name}.py"
        if path.is_file():
            files.append((path.name, len(content)))
            content += path.read_text(encoding="utf-8") + "\n"
    if not files:
        raise KimiHalError(
            f"no sources of the standard library under {folder}: this interpreter came without them; "
            "build the workload with one that has them, such as python.org's or the distribution's python3"
        )
    return Corpus(content, tuple(files))
