"""A plugin's name, its hook and the contract it was written for: every mistake a sentence."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from loading import ACME, AUTO, refused

from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.loader import load
from kimi_hal.dispatch.points import GROUP


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_two_plugins_of_one_name_are_an_error(plugins, settings):
    plugins.add("acme")
    plugins.points.append(EntryPoint("acme", "other_acme.plugin", GROUP))
    assert refused(settings) == (
        "plugin 'acme': two plugins have this name, kimi-hal (fake_acme) and kimi-hal (other_acme.plugin); "
        "uninstall one of them"
    )


def test_two_plugins_of_another_name_do_not_stand_in_the_way(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    plugins.points.append(EntryPoint("zeta", "other_zeta.plugin", GROUP))
    assert sorted(load(ACME).backends) == ["acme", "reference"]


def test_a_plugin_may_not_be_called_reference(plugins):
    plugins.points.append(EntryPoint("reference", "fake_reference", GROUP))
    assert refused(AUTO) == (
        "plugin 'reference': two plugins have this name, kimi-hal (kimi_hal.reference.plugin) and kimi-hal "
        "(fake_reference); uninstall one of them"
    )


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_a_misspelt_hook_is_an_error(plugins, settings):
    plugins.module("acme", kimi_hal_backnd=hookimpl(lambda: None))
    assert refused(settings) == (
        "plugin 'acme': unknown hook 'kimi_hal_backnd'; did you mean 'kimi_hal_backend'?"
    )


def test_a_hook_that_is_not_ours_names_the_only_one(plugins):
    plugins.module("acme", start=hookimpl(lambda: None))
    assert refused() == "plugin 'acme': unknown hook 'start'; the only hook is 'kimi_hal_backend'"


def test_a_hook_without_its_mark_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backend=lambda: None)
    assert refused() == (
        "plugin 'acme': kimi_hal_backend is not marked; decorate it with kimi_hal.dispatch.hookspecs.hookimpl"
    )


def test_a_plugin_without_a_hook_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backends=lambda: None)
    assert refused() == "plugin 'acme': it has no hook 'kimi_hal_backend'; is it 'kimi_hal_backends'?"
    plugins.points.clear()
    plugins.module("acme")
    assert refused() == "plugin 'acme': it has no hook 'kimi_hal_backend'"


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_a_hook_with_argument_defaults_is_an_error(plugins, settings):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda config=None: None))
    assert refused(settings) == (
        "plugin 'acme': kimi_hal_backend has an argument with a default (config=None), "
        "which no caller ever fills"
    )


def test_a_hook_of_another_signature_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda config: None))
    assert refused() == "plugin 'acme': kimi_hal_backend takes no argument, this one takes (config)"


@pytest.mark.parametrize(("answer", "text"), [(None, "None"), ("acme", "str 'acme'"), ({}, "dict {}")])
def test_a_hook_that_answers_something_else_is_an_error(plugins, answer, text):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda: answer))
    assert refused() == f"plugin 'acme': kimi_hal_backend() must return a Backend, it returned {text}"


@pytest.mark.parametrize(
    ("version", "advice"), [(2, "install a newer kimi-hal"), (0, "install a newer version of it")]
)
def test_another_api_version_says_which_side_to_upgrade(plugins, version, advice):
    plugins.add("acme", api_version=version)
    assert refused() == (
        f"plugin 'acme': it was written for plugin API {version}, this kimi-hal has API 1; {advice}"
    )


def test_another_api_version_is_left_out_under_auto(plugins):
    plugins.add("acme", api_version=2)
    assert sorted(load(AUTO).backends) == ["reference"]


def test_a_name_unlike_its_entry_point_is_an_error(plugins):
    plugins.add("acme", name="acme2")
    assert refused() == (
        "plugin 'acme': its entry point is named 'acme' but its Backend 'acme2'; they must be equal"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("auto", "the name 'auto' is reserved"),
        ("Acme", "the name 'Acme' must be lower-case letters, digits and underscores, a letter first"),
        ("acme-2", "the name 'acme-2' must be lower-case letters, digits and underscores, a letter first"),
    ],
)
def test_a_name_that_cannot_stand_in_a_variable_is_an_error(plugins, name, sentence):
    plugins.add(name)
    assert load(AUTO).failures[name].message == sentence


def test_a_missing_module_of_ours_names_both_versions(plugins):
    plugins.points.append(EntryPoint("acme", "kimi_hal.of_the_future", GROUP))
    assert refused() == (
        "plugin 'acme': importing kimi_hal.of_the_future raised ModuleNotFoundError: No module named "
        "'kimi_hal.of_the_future'; this is kimi-hal 0.1.0"
    )


def test_a_missing_module_of_ours_names_what_the_distribution_asks_for(tmp_path, monkeypatch):
    info = tmp_path / "acme_hal-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-hal\nVersion: 9.0\nRequires-Dist: kimi-hal<0.3,>=0.2\n"
    )
    (info / "entry_points.txt").write_text("[kimi_hal]\nacme = kimi_hal.of_the_future\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused() == (
        "plugin 'acme': importing kimi_hal.of_the_future raised ModuleNotFoundError: No module named "
        "'kimi_hal.of_the_future'; this is kimi-hal 0.1.0, and acme-hal 9.0 requires kimi-hal<0.3,>=0.2"
    )
