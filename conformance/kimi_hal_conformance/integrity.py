"""Whether the judge is still itself: it runs in the process of the implementation on trial, and imports its plugin.

What is looked at are the functions, classes and constants of the suite, of the reference and of the formats, and what
these call of torch. Code that puts everything back before it returns is not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

#: Packages whose code judges.
JUDGES = ("kimi_hal_conformance", "kimi_hal.reference", "kimi_hal.formats")
#: Where their calls of torch end.
TORCH = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional}
#: What the suite itself changes while it runs.
CHANGING = ("kimi_hal_conformance.case.CASES", "kimi_hal_conformance.case.MADE")
#: What torch itself replaces when its compiler is imported; only the generators' own is called here.
REPLACED = ("manual_seed",)
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Part:
    """One thing by its name in a module, class or table, as it was; of a function its code and defaults too."""

    owner: Mapping[Any, Any]
    name: Any
    value: Any
    inner: FunctionType | None
    code: CodeType | None
    defaults: Any

    @classmethod
    def of(cls, owner: Mapping[Any, Any], name: Any) -> Part:
        """Note what stands there now."""
        value = owner.get(name, ABSENT)
        inner = _function(value)
        return cls(
            owner, name, value, inner, getattr(inner, "__code__", None), getattr(inner, "__defaults__", None)
        )

    def intact(self) -> bool:
        """Tell whether it is what it was."""
        if self.owner.get(self.name, ABSENT) is not self.value:
            return False
        inner = self.inner
        return inner is None or (inner.__code__ is self.code and inner.__defaults__ is self.defaults)


@dataclass(frozen=True)
class Integrity:
    """The judge as it was at one time, by the names of its parts."""

    parts: Mapping[str, Part]

    @classmethod
    def now(cls) -> Integrity:
        """Note every part of what is imported."""
        found = dict(_judges())
        names = {name for part in found.values() if part.code for name in _names(part.code)} - {*REPLACED}
        for where, owner in TORCH.items():
            own = {name for name in names if hasattr(owner, name)}  # what is inherited is of C, and stays
            found |= {f"{where}.{name}": Part.of(vars(owner), name) for name in sorted(own)}
        return cls(found)

    def problems(self) -> list[str]:
        """Return a sentence if a part is not what it was; the first of them are named."""
        changed = [name for name, part in self.parts.items() if not part.intact()]
        if not changed:
            return []
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        wrapped = " (a wrapper that calls it replaces it too)" if changed[0].startswith("torch.") else ""
        named = ", ".join(changed[:3])
        return [f"replaced, although the judge is made of it: {named}{more}{wrapped}. Nothing is proven"]


def _judges() -> Iterator[tuple[str, Part]]:
    for imported_as, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and _within(called := _name(module, imported_as)):
            for name, value in list(vars(module).items()):
                if _counts(name, value) and f"{called}.{name}" not in CHANGING:
                    yield f"{called}.{name}", Part.of(vars(module), name)
                if isinstance(value, type) and value.__module__ == imported_as:
                    for own, method in list(vars(value).items()):
                        if _is_code(method):
                            yield f"{called}.{name}.{own}", Part.of(vars(value), own)
                if _is_table(name, value):
                    for key in value:
                        yield f"{called}.{name}[{key!r}]", Part.of(value, key)


def _name(module: ModuleType, imported_as: str) -> str:
    """Return the name of a module, also of the one that the process began with (``python -m``)."""
    spec = module.__spec__ if imported_as == "__main__" else None
    return spec.name if spec is not None else imported_as


def _within(module: str) -> bool:
    return any(module == judge or module.startswith(f"{judge}.") for judge in JUDGES)


def _counts(name: str, value: Any) -> bool:
    return callable(value) or (name.isupper() and not name.startswith("_"))


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | property | classmethod | staticmethod)


def _is_table(name: str, value: Any) -> bool:
    return name.isupper() and isinstance(value, dict) and bool(value) and all(map(callable, value.values()))


def _function(value: Any) -> Any:
    """Return the function in a method or property; of anything else, what can only be replaced as a whole, nothing."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inner if isinstance(inner, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, those of the functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
