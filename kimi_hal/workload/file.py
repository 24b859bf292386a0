"""The workload file: a safetensors file whose metadata carries the hash of its own data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_hal.errors import FormatError, KimiHalError
from kimi_hal.workload.paths import BUILD

#: Changes when the meaning of a stored tensor or of an expansion changes.
FORMAT = "kimi-hal.workload.1"

DISCLAIMER = (
    "Activations of all-MiniLM-L6-v2 over Python's standard library, widened by fixed maps to the sizes of "
    "Kimi K3.1 Pro. This is not the output of Kimi K3.1, of any of its layers or weights, and says nothing "
    "about its quality."
)


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the file's bytes; the format's name, the disclaimer and the data's hash join the metadata."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    fixed = {"format": FORMAT, "disclaimer": DISCLAIMER, "sha256": _digest(data)}
    header, begin = _header(data)
    # The library writes metadata in the order of a hash map, which changes from run to run.
    text = json.dumps({"__metadata__": {**metadata, **fixed}, **header}, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[begin:]


def decode(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a workload file, and check that its data is what was written.

    Raises:
        KimiHalError: no file at ``path``, or safetensors is not installed.
        FormatError: another kind or version of file, or data that does not have the hash in the metadata.
    """
    if not path.is_file():
        raise KimiHalError(f"no workload file at {path}; build it with: {BUILD}")
    data = path.read_bytes()
    metadata = _metadata(path, data)
    if _digest(data) != metadata.get("sha256"):
        raise FormatError(
            f"{path} is damaged: its data does not have the hash it was written with; {_again()}"
        )
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError as error:
        raise KimiHalError(
            "reading a workload needs safetensors, which is not installed: pip install safetensors"
        ) from error
    try:
        return load(data), metadata
    except SafetensorError as error:
        raise FormatError(f"{path} is damaged: its header does not describe its data; {_again()}") from error


def _metadata(path: Path, data: bytes) -> dict[str, str]:
    try:
        metadata = _header(data)[0]["__metadata__"]
        found = str(metadata["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is not a workload file; {_again()}") from error
    if found != FORMAT:
        raise FormatError(f"{path} has the format {found!r}, this version reads {FORMAT!r}; {_again()}")
    return dict(metadata)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and where its data begins."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8:begin])), begin


def _digest(data: bytes) -> str:
    """Return the SHA-256 of what follows the header, so that it can stand inside the header."""
    return hashlib.sha256(memoryview(data)[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def _again() -> str:
    return f"build it again with: {BUILD}"
