"""Text that came from an implementation or its process: it commands no terminal and breaks no file."""

from __future__ import annotations

import re

#: What XML has no way to write, and the carriage return, which its parsers read as a newline.
ILLEGAL = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Return text with everything escaped that is no letter on a page: controls, escapes of terminals, surrogates."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def legal(text: str) -> str:
    """Return text with U+FFFD for what XML and HTML have no way to write."""
    return ILLEGAL.sub("\ufffd", text)
