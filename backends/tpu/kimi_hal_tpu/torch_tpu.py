"""Device hooks for a TPU that torch_tpu drives: torch's device ``tpu``, reached through ``torch.accelerator``."""

from __future__ import annotations

from typing import Any

from kimi_hal.dispatch.device import HostDevice, guarded
from kimi_hal_tpu import device, plugin, requirements


class Device(device.Device):
    """A TPU of torch_tpu, timed as one of torch-xla. It is imported when a method needs it, never before."""

    torch_device = "tpu"

    @property
    def _accelerator(self) -> Any:
        import torch
        import torch_tpu

        del torch_tpu  # importing it makes the device known to torch
        return torch.accelerator

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        self._accelerator.synchronize()

    def arch(self, index: int) -> str:
        """Return the generation of the TPUs on the PCI bus: a host has one kind."""
        return plugin.probe().arch

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        """Return an uninitialised tensor between canaries."""
        return guarded(shape, dtype, guard, self.torch_device)

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        free, total = self._accelerator.get_memory_info()
        return int(free), int(total)

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, torch, torch_tpu and the libtpu that it compiles with."""
        own = {name: requirements.installed(name) for name in ("torch_tpu", "libtpu")}
        return HostDevice().versions() | own
