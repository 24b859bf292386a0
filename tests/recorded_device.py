"""A device with graphs, on the CPU: capture records what torch runs, and a replay runs that again, nothing else.

Host code between the operations is not in the graph, as on a real device: a length that Python read, a branch that
it took and a tensor that it kept are what they were at capture. Reading values while recording is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kimi_hal.dispatch.device import HostDevice

#: What takes a value or a shape from data, by torch's names.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2")
#: Methods that read values behind the dispatcher.
HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__)
REFUSED = "operation not permitted when stream is capturing"


class Recorder(TorchDispatchMode):
    """Runs operations and remembers them with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record it, views and allocations excepted: those are addresses."""
        if func._schema.name in READS:
            raise RuntimeError(REFUSED)
        result = func(*args, **(kwargs or {}))
        if not _is_address(func):
            self.steps.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run every operation again on the same tensors, and put its results where they were."""
        for func, args, kwargs, result in self.steps:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class NoReads(TorchFunctionMode):
    """Refuses to give values to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function unless it reads."""
        if func in HOST_READS:
            raise RuntimeError(REFUSED)
        return func(*args, **(kwargs or {}))


def _is_address(func: Any) -> bool:
    schema = func._schema
    aliased = [r.alias_info for r in schema.returns if r.alias_info is not None]
    views = bool(aliased) and not any(info.is_write for info in aliased)
    return views or schema.name in (
        "aten::empty",
        "aten::empty_like",
        "aten::new_empty",
        "aten::empty_strided",
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what runs inside."""
    with NoReads(), Recorder() as recorder:
        yield recorder


class RecordedDevice(HostDevice):
    """The CPU with graphs."""

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Run once, record a second run, and return the replay."""
        fn()
        with recording() as recorder:
            fn()
        return recorder.replay
