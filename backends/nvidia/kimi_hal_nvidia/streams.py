"""Which device and which stream a launch goes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def device_index(device: str) -> int:
    """Return the number of a CUDA device; of the current one where the name has none."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def raw_stream(index: int) -> Callable[[], int]:
    """Return a function that returns the handle of torch's current stream on a device."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


def on_device(device: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` such that its device is current meanwhile, which only a second device makes necessary."""
    if torch.cuda.device_count() <= 1:
        return run
    index = device_index(device)

    @functools.wraps(run)
    def there(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(index):
            return run(*args, **kwargs)

    return there
