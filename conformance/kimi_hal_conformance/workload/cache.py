"""The cache folder: files named by the hash of what made them, written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

#: Digits of a key in a file's name.
DIGITS = 16


def key(parameters: Mapping[str, str | int]) -> str:
    """Return the hash of everything that decides a file's contents."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:DIGITS]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one builder; a second waits, and then finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, data: bytes) -> None:
    """Write a file under another name and move it into place."""
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def publish(path: Path, link: Path) -> None:
    """Make ``link``, the name that readers know, point at a finished file beside it."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    os.replace(temporary, link)
