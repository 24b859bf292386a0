"""The variables: a name or value that is not legal is an error, whatever was meant."""

from __future__ import annotations

import os

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain, raises


@plain("settings")
def legal(modules: Modules) -> object:
    """Read legal variables."""
    read = modules("settings").Settings.from_env
    values = {"KIMI_HAL_BACKEND": "acme", "KIMI_HAL_CHECK": "shadow:10", "KIMI_HAL_LOG": "info"}
    found = read(values, plugins=["acme"])
    return found.backend, found.check, found.shadow, found.log, found.variables()


@holds("settings/misspelt", "KIMI_HAL_BAKCEND, and a backend nvidai")
def misspelt(modules: Modules) -> None:
    """A misspelt name or value is an error that names the nearest."""
    read, error = modules("settings").Settings.from_env, modules("errors").SettingsError
    raises(error, lambda: read({"KIMI_HAL_BAKCEND": "acme"}, plugins=["acme"]), "KIMI_HAL_BACKEND")
    raises(error, lambda: read({"KIMI_HAL_BACKEND": "acm"}, plugins=["acme"]), "acme")
    raises(error, lambda: read({"KIMI_HAL_FALLBACK": "referense"}, plugins=[]), "reference")


@holds("settings/every-problem", "two wrong variables at once")
def every_problem(modules: Modules) -> None:
    """All problems are told together."""
    read, error = modules("settings").Settings.from_env, modules("errors").SettingsError
    wrong = {"KIMI_HAL_CHECK": "shadow", "KIMI_HAL_EXECUTION": "fast"}
    told = ("KIMI_HAL_CHECK: shadow needs", "KIMI_HAL_EXECUTION: unknown value")
    raises(error, lambda: read(wrong, plugins=[]), *told)


@holds("settings/injected", "what a cluster injects for a service called kimi-hal")
def injected(modules: Modules) -> None:
    """Names that a cluster injects are nobody's."""
    names = ("KIMI_HAL_SERVICE_HOST", "KIMI_HAL_SERVICE_PORT_HTTP", "KIMI_HAL_PORT", "KIMI_HAL_PORT_80_TCP")
    found = modules("settings").Settings.from_env(dict.fromkeys(names, "10.0.0.1"), plugins=[])
    expect("settings", found, modules("settings").Settings())


@holds("settings/overrides", "an operator that KIMI_HAL_OPS names twice, and one that does not exist")
def overrides(modules: Modules) -> None:
    """An override that is ambiguous or names nothing is an error."""
    read, error = modules("settings").Settings.from_env, modules("errors").SettingsError
    twice = {"KIMI_HAL_OPS": "sparse_mla=acme.one,sparse_mla=acme.two"}
    raises(error, lambda: read(twice, plugins=["acme"]), "named twice")
    raises(error, lambda: read({"KIMI_HAL_OPS": "sparse_mia=acme.one"}, plugins=["acme"]), "sparse_mla")


@holds("settings/removed", "a variable that a plugin has removed, and one that it declares")
def removed(modules: Modules) -> None:
    """A plugin's removed variable is an error that names its replacement; its own are silent and kept."""
    from kimi_hal_conformance.properties.plugins import Plugins

    plugins = Plugins(modules)
    plugins.add(
        "acme",
        device="Acme A2",
        variables={"KIMI_HAL_ACME_TUNE": "0 or 1"},
        removed_variables={"KIMI_HAL_ACME_OLD": "set KIMI_HAL_ACME_TUNE"},
    )
    settings, loader = modules("settings").Settings, modules("dispatch.loader")

    def told(*names: str) -> list[str]:
        wanted = settings(plugins=tuple((name, "1") for name in names))
        return list(loader.problems_of_settings(plugins.registry(wanted)))

    expect("declared", told("KIMI_HAL_ACME_TUNE"), [])
    expect("removed", told("KIMI_HAL_ACME_OLD"), ["KIMI_HAL_ACME_OLD was removed: set KIMI_HAL_ACME_TUNE"])
    expect("misspelt", ["KIMI_HAL_ACME_TUNE" in text for text in told("KIMI_HAL_ACME_TUNNE")], [True])


@holds("settings/frozen", "a variable that changes after hal.freeze()")
def frozen(modules: Modules) -> None:
    """After freeze() a changed variable is an error at the next plan."""
    policy, errors, name = modules("dispatch.policy"), modules("errors"), "KIMI_HAL_FALLBACK"
    before = dict(os.environ)
    try:
        for variable in [n for n in os.environ if n.startswith("KIMI_HAL_")]:
            del os.environ[variable]
        os.environ["KIMI_HAL_BACKEND"] = "reference"
        policy.freeze()
        os.environ[name] = "reference"
        raises(errors.FrozenError, policy.settings, name)
    finally:
        os.environ.clear()
        os.environ.update(before)
        policy.thaw()
