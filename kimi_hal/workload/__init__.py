"""The real-text workload: activations of a small trained encoder over Python sources, at K3.1's widths.

Nothing here is Kimi K3.1's output. The text is real and the encoder was really trained, so the numbers have
what random ones lack: channels that stand out, clusters of near-equal scores, attention mass on few keys.
How they are made and what they are not: ``docs/workload.md``. The file is built by
``python -m kimi_hal_conformance.workload build``; reading it needs torch and safetensors only.

Importing this module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_hal.workload.paths import activations_path, experts_path

if TYPE_CHECKING:
    from kimi_hal.workload.kda import KDAInputs
    from kimi_hal.workload.reader import Router, Workload

__all__ = ["KDAInputs", "Router", "Workload", "activations_path", "experts_path", "load"]


def load(path: str | Path | None = None) -> Workload:
    """Read a workload file.

    Args:
        path: the file; by default where the builder puts it, ``activations_path()``.

    Raises:
        KimiHalError: no file there, or safetensors is not installed; says what to type.
        FormatError: not a workload file, of another version, or its bytes are not those that were written.
    """
    from kimi_hal.workload.reader import read

    return read(Path(path) if path is not None else activations_path())


def __getattr__(name: str) -> Any:
    if name not in ("KDAInputs", "Router", "Workload"):
        raise AttributeError(f"module 'kimi_hal.workload' has no attribute {name!r}")
    from kimi_hal.workload import kda, reader

    return getattr(kda if name == "KDAInputs" else reader, name)
