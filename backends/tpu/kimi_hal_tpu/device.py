"""Device hooks for a device that torch-xla drives: work is traced, then run by ``sync``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kimi_hal.dispatch.device import HostDevice, guarded
from kimi_hal_tpu import plugin


class Device:
    """An XLA device. torch_xla is imported when a method needs it, never before."""

    @property
    def _xla(self) -> Any:
        import torch_xla

        return torch_xla

    def synchronize(self) -> None:
        """Run what has been traced and wait for it."""
        self._xla.sync(wait=True)

    def arch(self, index: int) -> str:
        """Return the generation of the TPUs on the PCI bus, as claims name it; ``cpu`` on torch-xla's CPU device."""
        kind = self._xla.runtime.device_type()
        return plugin.probe().arch if kind == "TPU" else str(kind).lower()

    def time(self, fn: Callable[[], None]) -> float:
        """Return wall-clock seconds of one traced and executed call."""
        self.synchronize()
        start = time.perf_counter()
        fn()
        self.synchronize()
        return time.perf_counter() - start

    def capture(self, fn: Callable[[], None]) -> Callable[[], None] | None:
        """Return ``None``: XLA compiles programs instead of capturing launches."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        """Return a tensor between canaries. XLA owns its buffers: the whole room is compared after a call."""
        return guarded(shape, dtype, guard, str(self._xla.device()))

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        info = self._xla.core.xla_model.get_memory_info(self._xla.device())
        total, used = int(info["bytes_limit"]), int(info["bytes_used"])
        return total - used, total

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, torch and torch-xla."""
        return HostDevice().versions() | {"torch_xla": str(self._xla.__version__)}
