"""What the page on TPUs prints for a TPU VM runs as it stands, on torch-xla's CPU device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from documents import run_python

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

from kimi_hal.dispatch.contract import Probe
from kimi_hal_tpu import plugin

PAGE = Path(__file__).parents[2] / "docs" / "tpu.md"


def test_what_a_vm_plans_and_one_step_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Probe(present=True, arch="v6e", devices=("TPU v6e",), facts={"libtpu": "0.0.21"})
    monkeypatch.setattr(plugin, "probe", lambda: seen)
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    names: dict[str, Any] = {"__name__": "tpu"}
    run_python(PAGE, names, ("On a TPU VM", "The pool"))
    stored = names["pool"].take("index", 3, names["step"]).cpu()
    assert [bool(page.any()) for page in stored] == [n in (15, 16, 32) for n in range(64)]
