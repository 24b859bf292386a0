"""A process that imports a plugin and asks its probe, before the suite does so itself: either may end or hang it.

It says when each is done. It imports no torch unless the plugin does, and so takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys

from kimi_hal.dispatch.loader import load
from kimi_hal.settings import Settings


def main() -> None:
    """Import the plugin that standard input names, then ask its probe. What they raise the suite will see itself."""
    faulthandler.enable()
    answers, backend = int(sys.argv[1]), sys.stdin.buffer.readline().decode().strip()
    registry = None
    with contextlib.suppress(Exception):
        registry = load(Settings(backend=backend))
    _done(answers)
    with contextlib.suppress(Exception):
        if registry is not None:
            registry.probe(backend)
    _done(answers)


def _done(answers: int) -> None:
    message = {"type": "Started", "pid": os.getpid(), "versions": {}}  # messages.Started, which needs torch
    os.write(answers, b"\n" + json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
