"""What the suite needs of the device: how to wait for it, time it, and take memory between canaries.

The CPU stands in, so all but the names are the host's. A device with queues waits in ``synchronize`` and
times with its own clock; one with graphs captures.
"""

from __future__ import annotations

from kimi_hal.dispatch.device import HostDevice

from kimi_hal_trainium.plugin import driver, probe


class Device(HostDevice):
    """A Trainium by name."""

    def arch(self, index: int) -> str:
        """Return the architecture of device ``index``; the devices of one machine are alike."""
        return probe().arch

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, torch and the Neuron driver."""
        return super().versions() | driver()
