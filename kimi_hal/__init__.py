"""kimi-hal: Kimi K3.1 Pro's operators on whatever accelerator is found, selected by one variable.

Importing this package imports neither torch nor a plugin; each name below is resolved at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: public name -> (module, attribute); an attribute of "" is the module itself
_LAZY = {
    "plan": ("kimi_hal.dispatch.plan", "plan"),
    "Plan": ("kimi_hal.dispatch.plan", "Plan"),
    "dump_plans": ("kimi_hal.dispatch.plan", "dump_plans"),
    "load_plans": ("kimi_hal.dispatch.plan", "load_plans"),
    "freeze": ("kimi_hal.dispatch.policy", "freeze"),
    "explain": ("kimi_hal.dispatch.explain", "explain"),
    "Settings": ("kimi_hal.settings", "Settings"),
    "log": ("kimi_hal.log", "log"),
    "model": ("kimi_hal.model", ""),
    "formats": ("kimi_hal.formats", ""),
    "specs": ("kimi_hal.specs", ""),
    "ops": ("kimi_hal.ops", ""),
    "cache": ("kimi_hal.cache", ""),
    "parallel": ("kimi_hal.parallel", ""),
    "errors": ("kimi_hal.errors", ""),
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kimi_hal' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = importlib.import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return sorted(__all__)
