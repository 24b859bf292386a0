"""The errors of kimi-hal. Each says what was asked, what is possible, and what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class KimiHalError(Exception):
    """Base of every error that this package raises on purpose."""


class SettingsError(KimiHalError):
    """An unknown or ill-formed ``KIMI_HAL_*`` variable."""


class SpecError(KimiHalError, ValueError):
    """A Spec or Limits field that holds a value outside the contract."""


class UnknownNameError(KimiHalError, LookupError):
    """An operator, backend, implementation or format that does not exist; names the nearest that does."""


class ContractError(KimiHalError, ValueError):
    """Operands that break an operator's contract. ``reasons`` holds every failure, not only the first."""

    def __init__(self, operator: str, reasons: Sequence[str]) -> None:
        self.operator = operator
        self.reasons = tuple(reasons)
        super().__init__(f"{operator}: " + "; ".join(self.reasons))


class PluginError(KimiHalError):
    """A plugin that cannot be loaded, or breaks the plugin contract. ``plugin`` is its entry-point name."""

    def __init__(self, plugin: str, message: str) -> None:
        self.plugin = plugin
        super().__init__(f"plugin {plugin!r}: {message}")


class ToolMissingError(KimiHalError):
    """A compiler or another tool that is not installed, or too old: what it is needed for, and how to get it."""


class SelectionError(KimiHalError):
    """No implementation fits. ``refusals`` maps each candidate's full name to all its reasons."""

    def __init__(self, message: str, refusals: dict[str, tuple[str, ...]] | None = None) -> None:
        self.refusals = refusals or {}
        lines = [message]
        lines += [f"  {name}: {'; '.join(reasons)}" for name, reasons in self.refusals.items()]
        super().__init__("\n".join(lines))


class PlanError(KimiHalError):
    """A plan that does not go with what it is used for: another pair, another group, another source."""


class ShadowError(KimiHalError):
    """A shadow check found a result that differs from the reference's by more than its budget.

    ``operator``, ``implementation`` (full name) and ``call`` (from 1) say which; ``reasons`` holds one
    sentence for each buffer that differs.
    """

    def __init__(self, operator: str, implementation: str, call: int, reasons: Sequence[str]) -> None:
        self.operator = operator
        self.implementation = implementation
        self.call = call
        self.reasons = tuple(reasons)
        super().__init__(f"{operator}: {implementation} differs in call {call}: " + "; ".join(self.reasons))


class TableError(KimiHalError):
    """A table of measurements cannot be read, or says nothing about this machine."""


class FrozenError(KimiHalError):
    """A setting or policy changed after ``hal.freeze()``."""


class GroupError(KimiHalError):
    """Ranks of a group that disagree, or a rank that did not arrive."""


class FormatError(KimiHalError, ValueError):
    """Bytes, a tensor or a checkpoint shard that is not in the format it was said to be."""


class CacheError(KimiHalError, ValueError):
    """A packed cache that cannot be planned, paired, addressed or moved as asked."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string.

    Case does not count. Ties go to the name that sorts first, so that the text of an error never depends on
    set order.
    """
    spelling = {k.lower(): k for k in sorted(known, reverse=True)}
    close = difflib.get_close_matches(str(name).lower(), sorted(spelling), n=1, cutoff=0.5)
    return f"; did you mean {spelling[close[0]]!r}?" if close else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not known: the nearest name, then all of them."""
    names = sorted(known)
    listing = ", ".join(names) or "none"
    return UnknownNameError(f"unknown {kind} {name!r}{nearest(name, names) or '.'} Known: {listing}")
