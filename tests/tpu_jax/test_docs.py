"""What the page on TPUs prints for a mesh of devices runs as it stands, on eight devices of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import run_python

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

PAGE = Path(__file__).parents[2] / "docs" / "tpu.md"


def test_the_gather_over_a_mesh() -> None:
    run_python(PAGE, {"__name__": "tpu"}, ("Several devices",))
