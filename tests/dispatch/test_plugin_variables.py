"""Variables of plugins and overrides by name: what reaches a plugin, and what names nothing."""

from __future__ import annotations

import pytest
from fake_plugins import implementation
from loading import raising, refused

from kimi_hal.dispatch import loader
from kimi_hal.dispatch.contract import (
    Capability,
    Implementation,
)
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.loader import load
from kimi_hal.errors import SettingsError
from kimi_hal.settings import Settings


def test_a_plugins_own_variable_reaches_it(plugins):
    plugins.add("acme", variables={"KIMI_HAL_ACME_SPLITS": "1..64"})
    registry = load(Settings(backend="acme", plugins=(("KIMI_HAL_ACME_SPLITS", "4"),)))
    assert registry.variables("acme") == {"KIMI_HAL_ACME_SPLITS": "4"}


def refused_variable(plugins, variable, **fields):
    plugins.add("acme", **fields)
    with pytest.raises(SettingsError) as caught:
        load(Settings(plugins=((variable, "4"),)))
    return str(caught.value)


def test_a_variable_that_the_plugin_does_not_declare_names_the_nearest(plugins):
    assert refused_variable(plugins, "KIMI_HAL_ACME_SPLIT", variables={"KIMI_HAL_ACME_SPLITS": "1..64"}) == (
        "unknown variable KIMI_HAL_ACME_SPLIT; did you mean 'KIMI_HAL_ACME_SPLITS'? "
        "Declared by acme: KIMI_HAL_ACME_SPLITS"
    )


def test_a_variable_that_the_plugin_removed_names_its_replacement(plugins):
    message = refused_variable(
        plugins, "KIMI_HAL_ACME_PARTS", removed_variables={"KIMI_HAL_ACME_PARTS": "use KIMI_HAL_ACME_SPLITS"}
    )
    assert message == "KIMI_HAL_ACME_PARTS was removed: use KIMI_HAL_ACME_SPLITS"


def test_a_cluster_may_inject_names_under_a_plugins_prefix(plugins):
    plugins.add("acme")
    registry = load(Settings(plugins=(("KIMI_HAL_ACME_SERVICE_HOST", "10.0.0.7"),)))
    assert registry.variables("acme") == {}


def test_a_variable_of_a_plugin_that_is_not_loaded_is_left_alone(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    load(Settings(backend="acme", plugins=(("KIMI_HAL_ZETA_ANYTHING", "4"),)))


@pytest.mark.parametrize(
    ("full_name", "sentence"),
    [
        (
            "acme.fest",
            "KIMI_HAL_OPS: unknown implementation of sparse_mla 'acme.fest'; did you mean 'acme.fast'? "
            "Known: acme.fast",
        ),
        (
            "acme.merge",
            "KIMI_HAL_OPS: acme.merge implements merge_attn_states, not sparse_mla. Known: acme.fast",
        ),
    ],
)
def test_an_override_that_does_not_exist_is_an_error_at_load(plugins, full_name, sentence):
    merge = Implementation("merge_attn_states", "merge", "fake:build", (Capability(("acme2",), {}),))
    plugins.add("acme", implementation(), merge)
    with pytest.raises(SettingsError) as caught:
        load(Settings(ops=(("sparse_mla", full_name),)))
    assert str(caught.value) == sentence


def test_an_override_into_a_broken_plugin_shows_its_error(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    assert refused(Settings(ops=(("sparse_mla", "acme.fast"),))) == (
        "plugin 'acme': kimi_hal_backend() raised OSError: driver too old"
    )


def test_without_strict_problems_of_settings_are_told_together(plugins):
    plugins.add("acme")
    wrong = Settings(ops=(("sparse_mla", "acme.fest"),), plugins=(("KIMI_HAL_ACME_X", "1"),))
    assert list(loader.problems_of_settings(load(wrong, strict=False))) == [
        "unknown variable KIMI_HAL_ACME_X. Declared by acme: none",
        "KIMI_HAL_OPS: unknown implementation of sparse_mla 'acme.fest'; did you mean 'acme.fast'? "
        "Known: acme.fast",
    ]
