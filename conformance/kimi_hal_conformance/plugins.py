"""A backend's plugin in the suite's own process: only after it was imported and probed in another one and came back."""

from __future__ import annotations

import os
import sys

from kimi_hal.dispatch import points
from kimi_hal.dispatch.loader import Registry, load
from kimi_hal.errors import PluginError
from kimi_hal.settings import Settings
from kimi_hal_conformance.lane import Lane, ending
from kimi_hal_conformance.messages import Started

#: Seconds that importing a plugin may take, and as many that its probe may.
LIMIT = 60.0


def registry(backend: str) -> Registry:
    """Load a backend's plugin.

    Raises:
        UnknownNameError: no such backend; the nearest is named.
        PluginError: it cannot be loaded, or importing it or its probe ends or hangs a process.
    """
    for point in points.found().select(name=backend):
        if point.module not in sys.modules:  # else it came back already
            _rehearse(backend, point.value)
    return load(Settings(backend=backend))


def _rehearse(backend: str, value: str) -> None:
    lane = Rehearsal(os.environ)
    try:
        if problem := lane.problem(backend, value):
            raise PluginError(backend, problem)
    finally:
        lane.stop()


class Rehearsal(Lane):
    """The process in which a plugin is tried."""

    module = "kimi_hal_conformance.rehearsal"

    def problem(self, backend: str, value: str) -> str:
        """Return what importing a plugin or its probe did to the process, or an empty string."""
        self._start()
        mark = self._tell(backend.encode())
        for what in (f"importing {value}", "its probe"):
            message = self._receive(LIMIT)
            if isinstance(message, Started):
                continue
            if message is None and self._worker is not None:
                self._kill(self._worker.pid)
                said = f"{what} gave no answer within {LIMIT:g} s"
            else:
                said = f"{what} ended the process {ending(getattr(message, 'code', 0))}"
            return "\n    | ".join((said, *self._output(mark).splitlines()))
        return ""
