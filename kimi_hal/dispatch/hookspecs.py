"""The plugin hook and the device protocol.

One hook: pluggy checks names, not behaviour. Every behaviour is a ``"module:function"`` string that the
loader resolves lazily, so that a failure is recorded for one implementation and not for the whole plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pluggy

from kimi_hal.dispatch.contract import Backend

PROJECT = "kimi_hal"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kimi_hal_backend() -> Backend:
    """Return exactly one Backend. Imports no torch and opens no device."""


class DeviceHooks(Protocol):
    """What the conformance suite and ``kimi-hal step`` need of a device. Never used by ``run``."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def arch(self, index: int) -> str:
        """Return the architecture of device ``index``."""

    def time(self, fn: Callable[[], None]) -> float:
        """Return seconds of device time that one call takes."""

    def capture(self, fn: Callable[[], None]) -> Callable[[], None] | None:
        """Capture a call into a graph and return its replay, or ``None`` where there are no graphs."""

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        """Return an uninitialised tensor with ``guard`` canary bytes on both sides of it."""

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""

    def versions(self) -> dict[str, str]:
        """Return driver and library versions."""
