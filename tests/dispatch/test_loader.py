"""Loading: one plugin at a time, whatever it raises kept, and what a name stands for."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from fake_plugins import FP8, capability, implementation
from loading import ACME, AUTO, raising, refused

from kimi_hal.dispatch.contract import (
    OneOf,
)
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.loader import load, resolve
from kimi_hal.dispatch.points import GROUP, installed
from kimi_hal.errors import PluginError, UnknownNameError
from kimi_hal.settings import Settings


def test_auto_loads_every_plugin_and_the_reference(plugins):
    plugins.add("acme")
    plugins.add("zeta", implementation("other"))
    assert sorted(load(AUTO).backends) == ["acme", "reference", "zeta"]


def test_a_named_backend_is_the_only_plugin_loaded(plugins):
    plugins.add("acme")
    plugins.module("zeta", __getattr__=raising(AssertionError("zeta was touched")))
    assert sorted(load(ACME).backends) == ["acme", "reference"]


def test_an_override_loads_its_backend_too(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    settings = Settings(backend="acme", ops=(("sparse_mla", "zeta.fast"),))
    assert sorted(load(settings).backends) == ["acme", "reference", "zeta"]


def test_a_plugin_not_loaded_is_loaded_when_it_is_asked_for(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    registry = load(ACME)
    assert registry.get("zeta").name == "zeta"


def test_an_unknown_backend_names_the_nearest(plugins):
    plugins.add("acme")
    with pytest.raises(UnknownNameError) as caught:
        load(AUTO).get("acne")
    assert str(caught.value) == "unknown backend 'acne'; did you mean 'acme'? Known: acme, reference"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ImportError("libacme.so: cannot open shared object"),
            "ImportError: libacme.so: cannot open shared object",
        ),
        (OSError("/dev/acme0: permission denied"), "OSError: /dev/acme0: permission denied"),
        (SystemExit("no licence"), "SystemExit: no licence"),
        (SystemExit(), "SystemExit"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
def test_whatever_the_hook_raises_is_shown_when_named(plugins, error, text):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(error)))
    assert refused() == f"plugin 'acme': kimi_hal_backend() raised {text}"


def test_what_importing_raises_is_shown_when_named(plugins, monkeypatch):
    plugins.points.append(EntryPoint("acme", "acme_is_not_installed.plugin", GROUP))
    assert refused() == (
        "plugin 'acme': importing acme_is_not_installed.plugin raised ModuleNotFoundError: "
        "No module named 'acme_is_not_installed'"
    )


def test_under_auto_it_is_one_warning_and_the_others_stay(plugins, caplog):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    plugins.add("zeta")
    with caplog.at_level(logging.WARNING, logger="kimi_hal"):
        load(AUTO)
        registry = load(AUTO)
    assert sorted(registry.backends) == ["reference", "zeta"]
    assert caplog.messages == [
        "plugin 'acme': kimi_hal_backend() raised OSError: driver too old; it is left out, "
        "`kimi-hal doctor` says more"
    ]


def test_a_failure_keeps_its_traceback(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    failure = load(AUTO).failures["acme"]
    assert failure.message == "kimi_hal_backend() raised OSError: driver too old"
    assert "Traceback (most recent call last)" in failure.traceback
    assert "in call\n    raise error" in failure.traceback


def test_the_error_of_a_named_plugin_carries_its_traceback(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    with pytest.raises(PluginError) as caught:
        load(ACME)
    assert "in call\n    raise error\nOSError: driver too old" in caught.value.__notes__[0]


def test_a_plugin_that_cannot_even_be_looked_at_is_kept(plugins):
    class Odd:
        @property
        def __dict__(self):
            raise RuntimeError("no entry")

        def __dir__(self):
            raise RuntimeError("no entry")

    plugins.module("acme", plugin=Odd())
    plugins.points[0] = EntryPoint("acme", "fake_acme:plugin", GROUP)
    assert load(AUTO).failures["acme"].message == "checking it raised RuntimeError: no entry"


def test_an_interrupt_is_not_kept(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        load(AUTO)


def test_without_strict_a_named_failure_is_only_kept(plugins, caplog):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    registry = load(ACME, strict=False)
    assert caplog.messages == []
    assert registry.failures["acme"].message == "kimi_hal_backend() raised OSError: driver too old"


def test_a_plugin_may_bring_formats(plugins, monkeypatch):
    from kimi_hal.formats import latent, registry

    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    extra = dataclasses.replace(latent(FP8), name="latent.acme.576")
    covered = capability(spec={"latent": OneOf(("latent.acme.576",))})
    plugins.add("acme", implementation(capabilities=(covered,)), formats="fake_acme:FORMATS").FORMATS = (
        extra,
    )
    loaded = load(ACME)
    assert latent("latent.acme.576") is extra
    (reference,) = loaded.get("reference").of("sparse_mla")
    assert "latent.acme.576" in reference.capabilities[0].spec["latent"].values


def test_resolve_imports_what_a_name_stands_for():
    assert resolve("kimi_hal.dispatch.loader:resolve") is resolve


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("kimi_hal.dispatch.loader", "'kimi_hal.dispatch.loader' is not of the form 'module:function'"),
        (
            "kimi_hal.dispatch.loader:resolv",
            "module kimi_hal.dispatch.loader has no 'resolv'; did you mean 'resolve'?",
        ),
    ],
)
def test_resolve_says_what_is_wrong(name, sentence):
    with pytest.raises(UnknownNameError) as caught:
        resolve(name)
    assert str(caught.value) == sentence


def test_installed_names_plugins_without_loading_them(plugins):
    plugins.module("zeta")
    plugins.module("acme")
    assert installed() == ("acme", "zeta")


def test_loading_and_probing_everything_imports_no_torch():
    code = (
        "import sys\n"
        "from kimi_hal.dispatch.loader import load\n"
        "from kimi_hal.settings import Settings\n"
        "registry = load(Settings(), strict=False)\n"
        "[registry.probe(name) for name in registry.backends]\n"
        "assert 'reference' in registry.backends\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
