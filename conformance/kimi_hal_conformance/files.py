"""Reports as files: each whole or as it was, and one that cannot be written takes no other with it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

#: What is written.
Content = TypeVar("Content")


def write(path: Path, data: bytes) -> None:
    """Write a file beside the one that it replaces, and put it in that one's place when it is whole.

    What is no file (a pipe, a device) is written straight, and so is a file in a folder that takes no new one.

    Raises:
        OSError: it cannot be written; what the file held before is still there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    place = Path(os.path.realpath(path))  # a link stays one
    beside = place.with_name(f".kimi-hal-{os.getpid()}.part")
    try:
        beside.write_bytes(data)
    except PermissionError:
        place.write_bytes(data)
        return
    except BaseException:
        _remove(beside)
        raise
    if place.exists():
        shutil.copymode(place, beside)
    beside.replace(place)


def as_json(content: object) -> bytes:
    """Return the indented JSON of a report, a proof or a schema."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def unwritten(
    content: Content, wanted: Sequence[tuple[Callable[[Content, Path], None], Path | None]]
) -> dict[Path, str]:
    """Write a report in every form that is wanted; return a sentence for each file that cannot be written.

    Args:
        content: the report.
        wanted: each way of writing it, and where it is to write; ``None``: nowhere.
    """
    lost: dict[Path, str] = {}
    for writer, path in wanted:
        if path is None:
            continue
        try:
            writer(content, path)
        except OSError as error:
            lost[path] = f"cannot write {path}: {error.strerror or error}"
    return lost


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
