"""Freezing: later plans obey the policy that was; a changed variable is an error."""

from __future__ import annotations

import pytest
from fake_plugins import GONE, LIMITS, SPEC

import kimi_hal
from kimi_hal.dispatch import policy
from kimi_hal.dispatch.selection import select
from kimi_hal.errors import FrozenError
from kimi_hal.ops import sparse_mla
from kimi_hal.settings import Settings


def choose(settings=None):
    settings = settings or policy.settings()
    return select(sparse_mla, SPEC, LIMITS, device="cuda", implementation=None, settings=settings).full_name


def refused(call=choose):
    with pytest.raises(FrozenError) as caught:
        call()
    return str(caught.value)


def test_later_plans_obey_the_same_policy(plugins, monkeypatch):
    plugins.add("acme")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    kimi_hal.freeze()
    assert choose() == "acme.fast"


def test_a_changed_variable_is_named_with_both_values(plugins, monkeypatch):
    plugins.add("acme")
    plugins.add("zeta")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    kimi_hal.freeze()
    monkeypatch.setenv("KIMI_HAL_BACKEND", "zeta")
    assert refused() == (
        "changed after hal.freeze(): KIMI_HAL_BACKEND was 'acme', now 'zeta'. Set it before that call."
    )


def test_every_changed_variable_is_named(plugins, monkeypatch):
    plugins.add("acme")
    monkeypatch.setenv("KIMI_HAL_FALLBACK", "reference")
    kimi_hal.freeze()
    monkeypatch.delenv("KIMI_HAL_FALLBACK")
    monkeypatch.setenv("KIMI_HAL_CHECK", "args")
    assert refused() == (
        "changed after hal.freeze(): KIMI_HAL_CHECK was not set, now 'args'; "
        "KIMI_HAL_FALLBACK was 'reference', now not set. Set it before that call."
    )


def test_a_variable_that_became_illegal_is_a_change(plugins, monkeypatch):
    kimi_hal.freeze()
    monkeypatch.setenv("KIMI_HAL_BAKEND", "acme")
    assert refused() == (
        "changed after hal.freeze(): KIMI_HAL_BAKEND was not set, now 'acme'. Set it before that call."
    )


def test_settings_made_by_hand_must_be_the_frozen_ones(plugins):
    plugins.add("acme")
    kimi_hal.freeze()
    assert refused(lambda: choose(Settings(backend="acme"))) == (
        "changed after hal.freeze(): KIMI_HAL_BACKEND was not set, now 'acme'. Set it before that call."
    )


def test_a_second_freeze_changes_nothing(plugins, monkeypatch):
    plugins.add("acme")
    kimi_hal.freeze()
    kimi_hal.freeze()
    assert choose() == "acme.fast"
    monkeypatch.setenv("KIMI_HAL_LOG", "INFO")
    assert refused(kimi_hal.freeze) == (
        "changed after hal.freeze(): KIMI_HAL_LOG was not set, now 'INFO'. Set it before that call."
    )


def test_a_plugin_installed_later_changes_nothing(plugins):
    plugins.add("acme")
    kimi_hal.freeze()
    plugins.add("zeta")
    assert choose() == "acme.fast"


def test_probes_are_asked_by_freeze_and_never_again(plugins):
    answers = [GONE]
    plugins.add("acme", probe=lambda: answers.pop())
    kimi_hal.freeze()
    assert answers == []
    assert policy.registry(policy.settings()).probe("acme") == GONE


def test_without_freeze_a_changed_variable_counts_at_once(plugins, monkeypatch):
    plugins.add("acme")
    plugins.add("zeta")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    assert choose() == "acme.fast"
    monkeypatch.setenv("KIMI_HAL_BACKEND", "zeta")
    assert choose() == "zeta.fast"


def test_equal_settings_share_one_registry(plugins, monkeypatch):
    plugins.add("acme")
    first = policy.registry(policy.settings())
    assert policy.registry(policy.settings()) is first
    plugins.add("zeta")
    assert policy.registry(policy.settings()) is not first


def test_sources_are_hashed_once(plugins, monkeypatch):
    plugins.add("acme")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    digests = iter("ab")
    monkeypatch.setattr("kimi_hal.dispatch.sources.source_hash", lambda *_: next(digests))
    backend, implementation = select_acme()
    assert [policy.source_hash(backend, implementation), policy.source_hash(backend, implementation)] == [
        "a",
        "b",
    ]
    digests = iter("cd")
    kimi_hal.freeze()
    assert [policy.source_hash(backend, implementation), policy.source_hash(backend, implementation)] == [
        "c",
        "c",
    ]


def select_acme():
    chosen = select(sparse_mla, SPEC, LIMITS, device="cuda", implementation=None, settings=policy.settings())
    return chosen.backend, chosen.implementation
