"""Device hooks for devices that torch itself drives: the host, and any device with streams and graphs.

A plugin whose device behaves like one of these names the class in its Backend; another writes its own.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

CANARY = 0xA5


def guarded(shape: tuple[int, ...], dtype: str, guard: int, device: str) -> Any:
    """Return an uninitialised tensor that stands between two runs of canary bytes.

    It starts where a workspace may (``WORKSPACE_ALIGN``): torch's own host allocations need not. So ``guard``
    is rounded up, and up to as many bytes more stand before the tensor.
    """
    import torch

    from kimi_hal.ops.check import WORKSPACE_ALIGN as ALIGN
    from kimi_hal.ops.operator import torch_dtype

    element = torch_dtype(dtype)
    guard = -(-guard // ALIGN) * ALIGN
    count = 1
    for size in shape:
        count *= size
    length = count * element.itemsize
    room = torch.full((ALIGN + guard + length + guard,), CANARY, dtype=torch.uint8, device=device)
    start = guard + -room.data_ptr() % ALIGN
    return room[start : start + length].view(element).view(shape)


class HostDevice:
    """The CPU. Nothing is queued, so there is nothing to wait for and no graph."""

    def synchronize(self) -> None:
        """Return at once."""

    def arch(self, index: int) -> str:
        """Return the processor's architecture."""
        return platform.machine()

    def time(self, fn: Callable[[], None]) -> float:
        """Return wall-clock seconds of one call."""
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start

    def capture(self, fn: Callable[[], None]) -> Callable[[], None] | None:
        """Return ``None``: the host has no graphs."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        """Return an uninitialised tensor between canaries."""
        return guarded(shape, dtype, guard, "cpu")

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of main memory."""
        pages = {}
        with open("/proc/meminfo") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                pages[name] = int(rest.split()[0]) * 1024
        return pages["MemAvailable"], pages["MemTotal"]

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and torch."""
        import torch

        return {"python": platform.python_version(), "torch": str(torch.__version__)}


class StreamDevice:
    """A device that torch drives through streams, events and graphs: ``torch.<torch_device>``."""

    torch_device = "cuda"

    @property
    def _torch(self) -> Any:
        import torch

        return getattr(torch, self.torch_device)

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        self._torch.synchronize()

    def arch(self, index: int) -> str:
        """Return the architecture of device ``index`` as capabilities name it. Plugins override it."""
        major, minor = self._torch.get_device_capability(index)
        return f"sm_{major}{minor}"

    def time(self, fn: Callable[[], None]) -> float:
        """Return seconds between two events around one call."""
        start, end = (self._torch.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Run once on a side stream, capture a second run, and return the replay."""
        side = self._torch.Stream()
        side.wait_stream(self._torch.current_stream())
        with self._torch.stream(side):
            fn()
        self._torch.current_stream().wait_stream(side)
        graph = self._torch.CUDAGraph()
        with self._torch.graph(graph):
            fn()
        return graph.replay  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        """Return an uninitialised tensor between canaries."""
        return guarded(shape, dtype, guard, self.torch_device)

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the current device."""
        free, total = self._torch.mem_get_info()
        return int(free), int(total)

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, torch and the runtime that torch was built for."""
        import torch

        host = HostDevice().versions()
        return host | {"runtime": str(torch.version.cuda or torch.version.hip or "unknown")}
