"""What ranks send each other between the parts of a traced program."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

#: Held while a program is traced and run: torch-xla has one trace a process, and ranks of a loopback group are threads.
TRACE = threading.Lock()


class Exchange:
    """A group as a program sees it: tensors of the device go in and come out.

    A group that meets on the host (a loopback group, Gloo) gets host tensors: the program is run up to there. A group
    of the device's own gathers inside the program.
    """

    def __init__(self, group: Any, on_host: bool) -> None:
        self.group, self.on_host = group, on_host

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's tensor, ``[W, …]``."""
        if not self.on_host:
            return self.group.all_gather(x)  # type: ignore[no-any-return]
        sent = x.cpu()
        TRACE.release()  # the other ranks must come this far
        try:
            received = self.group.all_gather(sent)
        finally:
            TRACE.acquire()
        return received.to(x.device)  # type: ignore[no-any-return]

    def on_the_host(self, x: Tensor) -> Tensor:
        """Return a tensor on the host, where what all ranks know alike may decide how large the next message is."""
        return x.cpu()
