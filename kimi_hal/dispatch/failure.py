"""What goes wrong with a plugin: one sentence, the traceback, and whether the plugin's author has to act."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kimi_hal import __version__
from kimi_hal.dispatch import points
from kimi_hal.errors import PluginError
from kimi_hal.log import log

T = TypeVar("T")

#: Problems of a plugin that are named one by one.
SAID = 20
#: What was said already.
_WARNED: set[str] = set()


@dataclass(frozen=True)
class Failure:
    """Why a plugin is not usable.

    Args:
        plugin: its entry-point name.
        message: one sentence.
        traceback: what Python printed; ``""`` if nothing was raised.
        breach: a mistake in the plugin's own declaration, an error also under ``auto``: two plugins of one
            name, a misspelt hook, a hook with arguments.
    """

    plugin: str
    message: str
    traceback: str = ""
    breach: bool = False

    def error(self) -> PluginError:
        """Return the error to raise; Python prints the plugin's own traceback below it."""
        error = PluginError(self.plugin, self.message)
        if self.traceback:
            error.add_note(self.traceback)
        return error


class BrokenError(Exception):
    """Carries a Failure out of the steps of loading."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def attempt(plugin: str, what: str, call: Callable[[], T]) -> T:
    """Call a plugin's code; whatever it raises, even SystemExit, becomes a Failure."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"{what} raised {type(error).__name__}: {error}".rstrip(": ")
        raise BrokenError(Failure(plugin, text + _skew(plugin, error), traceback.format_exc())) from error


def require(plugin: str, problems: Iterable[str], breach: bool = False) -> None:
    """Break off with the problems of a plugin, if there is one; of very many the first are named."""
    found = attempt(plugin, "checking it", lambda: list(problems))
    if found:
        more = [f"and {len(found) - SAID} more"] if len(found) > SAID else []
        raise BrokenError(Failure(plugin, "; ".join([*found[:SAID], *more]), breach=breach))


def warn(failure: Failure) -> None:
    """Say once that a plugin is left out."""
    text = str(failure.error())
    if text not in _WARNED:
        _WARNED.add(text)
        log.warning("%s; it is left out, `kimi-hal doctor` says more", text)


def _skew(plugin: str, error: BaseException) -> str:
    """Say which kimi-hal a plugin was written for, when what it misses is ours."""
    if not (isinstance(error, ImportError) and (error.name or "").startswith("kimi_hal.")):
        return ""
    requirement = points.requirement(plugin)
    return f"; this is kimi-hal {__version__}" + (f", and {requirement}" if requirement else "")
