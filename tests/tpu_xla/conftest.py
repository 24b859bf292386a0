"""A machine with a TPU, as far as planning can see; torch-xla drives its CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.contract import Probe
from kimi_hal_tpu import plugin

PLACES = {"native": "xla", "interpreted": "cpu"}


@pytest.fixture
def seen() -> Probe:
    """Return what the plugin sees; a module that wants another machine has a fixture of this name."""
    return Probe(present=True, arch="v6e", devices=("TPU v6e",), facts={"libtpu": "0.0.21"})


@pytest.fixture
def tpu(seen: Probe, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan for that machine."""
    policy.thaw()  # a probe is kept, and other tests see another TPU
    monkeypatch.setattr(plugin, "probe", lambda: seen)
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    yield
    policy.thaw()


@pytest.fixture(params=sorted(PLACES))
def device(request: pytest.FixtureRequest, tpu: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of a plan for that machine, and of one that runs interpreted."""
    monkeypatch.setenv("KIMI_HAL_EXECUTION", request.param)
    return PLACES[request.param]
