"""Device hooks: torch's stream device, with the SAIL toolkit's architecture names."""

from __future__ import annotations

from kimi_hal.dispatch.device import StreamDevice
from kimi_hal_ppu.plugin import architecture


class Device(StreamDevice):
    """A PPU, which torch drives under the name cuda."""

    def arch(self, index: int) -> str:
        """Return the build target of device ``index``."""
        return architecture(self._torch.get_device_name(index))
