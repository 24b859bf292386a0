"""What ranks send each other between the parts of a traced program."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

#: Held while a program is traced and run: torch-xla has one trace a process, and ranks of a loopback group are threads.
TRACE = threading.Lock()


class Exchange:
    """A group as a program sees it: tensors of the device go in and come out.

    A group that meets on the host (a loopback group, Gloo) gets host tensors: the program is run up to there. A group
    of the device's own gathers inside the program.

    Args:
        group: the ranks.
        on_host: it meets on the host.
        rows: the call's rows before padding, all that is sent to the host: ranks that have other numbers of rows are
            told of it, whatever they are padded to. ``None``: messages have none but real rows.
    """

    def __init__(self, group: Any, on_host: bool, rows: int | None = None) -> None:
        self.group, self.on_host, self.rows = group, on_host, rows

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's tensor, ``[W, …]``."""
        if not self.on_host:
            return self.group.all_gather(x)  # type: ignore[no-any-return]
        message = x.cpu()
        rows = message.shape[0] if self.rows is None else self.rows
        TRACE.release()  # the other ranks must come this far
        try:
            received = self.group.all_gather(message[:rows])
        finally:
            TRACE.acquire()
        if rows == message.shape[0]:
            return received.to(x.device)  # type: ignore[no-any-return]
        padding = message[rows:].expand(len(received), -1, *message.shape[1:])  # the same on every rank
        return torch.cat((received, padding), dim=1).to(x.device)

    def whole(self) -> Exchange:
        """Return the ranks for messages whose rows are all real."""
        return Exchange(self.group, self.on_host)

    def on_the_host(self, x: Tensor) -> Tensor:
        """Return a tensor on the host, where what all ranks know alike may decide how large the next message is."""
        return x.cpu()
