"""What every test folder may ask for."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from fake_plugins import Plugins

from kimi_hal.dispatch import convenience, policy
from kimi_hal.dispatch.table import PLANS


@pytest.fixture(autouse=True)
def seeded(request):
    """Every test draws its own numbers, the same in every run and in every order of tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def plugins(monkeypatch):
    """No plugin is installed but those that the test adds, no ``KIMI_HAL_*`` variable is set, no plan is kept."""
    for name in list(os.environ):
        if name.startswith("KIMI_HAL_"):
            monkeypatch.delenv(name)
    _forget()
    yield Plugins(monkeypatch)
    _forget()  # else a later test would meet a plan of a plugin that is gone


def _forget():
    PLANS.clear()
    convenience.forget()
    policy.thaw()
