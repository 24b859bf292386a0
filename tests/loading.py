"""Loading in tests: the settings that it is tried under, and what it says when it refuses."""

from __future__ import annotations

import pytest

from kimi_hal.dispatch.loader import load
from kimi_hal.errors import PluginError
from kimi_hal.settings import Settings

AUTO, ACME = Settings(), Settings(backend="acme")


def raising(error):
    """Return a function that raises."""

    def call():
        raise error

    return call


def refused(settings=ACME):
    """Return why plugins cannot be loaded."""
    with pytest.raises(PluginError) as caught:
        load(settings)
    return str(caught.value)
