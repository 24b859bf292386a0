"""Probes: asked once, and what is wrong with an answer."""

from __future__ import annotations

import pytest
from fake_plugins import HERE
from loading import ACME, AUTO, raising

from kimi_hal.dispatch.contract import (
    Probe,
)
from kimi_hal.dispatch.loader import load
from kimi_hal.errors import PluginError


def test_a_probe_is_asked_once(plugins):
    asked = []
    plugins.add("acme", probe=lambda: asked.append(1) or HERE)
    registry = load(ACME)
    assert registry.probe("acme") is registry.probe("acme")
    assert asked == [1]


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        (lambda: None, "fake_acme:probe: must return a Probe, it returned None"),
        (
            lambda: Probe(present=True),
            "fake_acme:probe: a present device needs `arch`, its architecture as capabilities name it",
        ),
        (
            lambda: Probe(present=False),
            "fake_acme:probe: an absent device needs `why`, what was looked for and not found",
        ),
        (
            lambda: Probe(present=True, arch="a", devices="Acme A2"),
            "fake_acme:probe: Probe.devices must be tuple[str, ...], got str 'Acme A2'",
        ),
        (raising(OSError("libacme.so: bad ELF")), "fake_acme:probe raised OSError: libacme.so: bad ELF"),
    ],
)
def test_a_wrong_probe_is_an_error_when_named(plugins, probe, sentence):
    plugins.add("acme", probe=probe)
    with pytest.raises(PluginError) as caught:
        load(ACME).probe("acme")
    assert str(caught.value) == f"plugin 'acme': {sentence}"


def test_a_wrong_probe_is_an_absent_device_under_auto(plugins, caplog):
    plugins.add("acme", probe=raising(OSError("libacme.so: bad ELF")))
    registry = load(AUTO)
    assert registry.probe("acme") == Probe(
        present=False, why="fake_acme:probe raised OSError: libacme.so: bad ELF"
    )
    assert caplog.messages == [
        "plugin 'acme': fake_acme:probe raised OSError: libacme.so: bad ELF; it is left out, "
        "`kimi-hal doctor` says more"
    ]
    assert "Traceback" in registry.failures["acme"].traceback
