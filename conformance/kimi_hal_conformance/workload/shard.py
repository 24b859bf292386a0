"""Writes a large safetensors file piece by piece: bounded memory, resumable, never seen half done.

The safetensors library writes a file from tensors that are all in memory. Here every tensor is uint8 and all
shapes are known before the first byte exists, so the header is written first and the data follows in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """Groups of uint8 tensors by name and shape, in file order, and the file's metadata."""

    groups: Sequence[Shapes]
    metadata: Mapping[str, str]

    def header(self) -> bytes:
        """Return the file's beginning: the header's length and the header, padded to eight bytes."""
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)}
        at = 0
        for name, shape in ((n, s) for group in self.groups for n, s in group.items()):
            end = at + _size(shape)
            entries[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def end(self, groups: int) -> int:
        """Return the bytes of data in the first ``groups`` groups."""
        return sum(_size(shape) for group in self.groups[:groups] for shape in group.values())


class Writer:
    """Writes a Layout's groups one by one into ``<path>.partial``, and moves it to ``path`` when complete.

    ``done`` is the number of whole groups that an interrupted run left; what it left of another one is cut off.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout, self.header = path, layout, layout.header()
        self.partial = path.with_suffix(".partial")
        self.done = self._resume()
        self._file = self.partial.open("r+b")
        self._file.truncate(len(self.header) + layout.end(self.done))
        self._file.seek(0, os.SEEK_END)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Write the next group's tensors, uint8 on the CPU, in the Layout's order.

        Raises:
            ValueError: a tensor that does not have the shape the header gives it.
        """
        for (name, shape), tensor in zip(self.layout.groups[self.done].items(), tensors, strict=True):
            if tuple(tensor.shape) != shape or str(tensor.dtype) != "torch.uint8":
                raise ValueError(f"{name} must be uint8 {shape}, is {tensor.dtype} {tuple(tensor.shape)}")
            self._file.write(tensor.contiguous().numpy().tobytes())
        self._file.flush()
        self.done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move a complete file into place; keep an incomplete one for the next run."""
        os.fsync(self._file.fileno())
        self._file.close()
        if kind is None and self.done == len(self.layout.groups):
            os.replace(self.partial, self.path)

    def _resume(self) -> int:
        begin = len(self.header)
        if self.partial.is_file():
            with self.partial.open("rb") as file:
                if file.read(begin) == self.header:
                    written = self.partial.stat().st_size - begin
                    return max(n for n in range(len(self.layout.groups) + 1) if self.layout.end(n) <= written)
        self.partial.write_bytes(self.header)
        return 0


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
