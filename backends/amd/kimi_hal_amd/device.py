"""Device hooks: torch's stream device, with AMD's architecture names."""

from __future__ import annotations

from kimi_hal.dispatch.device import StreamDevice


class Device(StreamDevice):
    """A ROCm device, which torch drives under the name cuda."""

    def arch(self, index: int) -> str:
        """Return the compiler's name without its feature suffixes: ``gfx942:sramecc+:xnack-`` is gfx942."""
        return str(self._torch.get_device_properties(index).gcnArchName).partition(":")[0]
