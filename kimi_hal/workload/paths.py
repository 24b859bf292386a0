"""Where the workload lies: a cache folder outside any repository."""

from __future__ import annotations

import os
from pathlib import Path

#: What to type where the file is missing.
BUILD = "python -m kimi_hal_conformance.workload build"


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kimi-hal/workload``, by default under ``~/.cache``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative value is invalid and ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "kimi-hal" / "workload"


def activations_path() -> Path:
    """Return the default path of the activation file, a link to what was built last."""
    return cache_folder() / "activations.safetensors"


def experts_path() -> Path:
    """Return the default path of the expert shard, a link to what was built last."""
    return cache_folder() / "experts.safetensors"
