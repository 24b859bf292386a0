"""Look at a plugin module's hooks before pluggy calls one, and say what is wrong in our own words."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pluggy

from kimi_hal.dispatch import hookspecs
from kimi_hal.errors import nearest

HOOK = "kimi_hal_backend"


def problems(plugin: Any) -> Iterator[str]:
    """Yield a misspelt or missing hook, and a hook that takes arguments."""
    marked = dict(_marked(plugin))
    for name in marked:
        if name != HOOK:
            yield f"unknown hook {name!r}{nearest(name, [HOOK]) or f'; the only hook is {HOOK!r}'}"
    if not marked:
        yield _missing(plugin)
    if HOOK in marked:
        yield from _signature(marked[HOOK])


def ask(plugin: Any, name: str) -> Any:
    """Call the hook through pluggy; ``None`` if it answers nothing."""
    manager = _manager()
    manager.register(plugin, name)
    answers = manager.hook.kimi_hal_backend()
    return answers[0] if answers else None


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _marked(plugin: Any) -> Iterator[tuple[str, Any]]:
    manager = _manager()
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            yield options.get("specname") or attribute, getattr(plugin, attribute)


def _missing(plugin: Any) -> str:
    if hasattr(plugin, HOOK):
        return f"{HOOK} is not marked; decorate it with kimi_hal.dispatch.hookspecs.hookimpl"
    near = nearest(HOOK, [n for n in dir(plugin) if n.startswith("kimi_hal")]).replace(
        "did you mean", "is it"
    )
    return f"it has no hook {HOOK!r}{near}"


def _signature(hook: Any) -> Iterator[str]:
    parameters = inspect.signature(hook).parameters.values()
    defaults = [str(p) for p in parameters if p.default is not p.empty]
    if defaults:
        yield f"{HOOK} has an argument with a default ({', '.join(defaults)}), which no caller ever fills"
    elif parameters:
        yield f"{HOOK} takes no argument, this one takes ({', '.join(map(str, parameters))})"
