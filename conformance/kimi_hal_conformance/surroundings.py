"""What a call must leave as it found it beside its operands: the settings of its process, on which the oracle hangs.

A library that lets subnormals be flushed, or that lets float32 products lose bits, changes the engine's other
kernels and the answer to which it is held.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: What a thread does with numbers that are too small to be normal.
KEPT, FLUSHED = "kept", "flushed"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


#: How this thread rounds a sum that no number is: to the nearest number, as everything is defined, or otherwise.
NEAREST, DIRECTED = "to nearest", "up, down or to zero"
#: C's name for the first, on every machine that torch runs on.
FE_TONEAREST = 0


@dataclass(frozen=True)
class Setting:
    """One setting of a process: how it is read, and how it is put back.

    Args:
        read: returns it.
        put: sets it to what was read before.
        told: what was read says something to a reader.
    """

    read: Callable[[], Any]
    put: Callable[[Any], object]
    told: bool = True


def _subnormals() -> str:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    return KEPT if (smallest * 1.0).view(torch.int32).item() else FLUSHED


def _rounding() -> str:
    """Add what a double cannot hold, above and below half of its last bit; read at run time, for no one may fold it."""
    one, above, below = (float(text) for text in ("1", "1.6653345369377348e-16", "5.551115123125783e-17"))
    return NEAREST if one + above > one and one + below == one else DIRECTED


def _round(before: str) -> None:
    if before == NEAREST:
        ctypes.CDLL(None).fesetround(FE_TONEAREST)


def _autocast(device: str) -> Setting:
    return Setting(
        lambda: torch.is_autocast_enabled(device),
        lambda before: torch.set_autocast_enabled(device, before),
    )


def _generator() -> tuple[int, ...]:
    return tuple(torch.random.get_rng_state().tolist())


def _put_generator(before: tuple[int, ...]) -> None:
    torch.random.set_rng_state(torch.tensor(before, dtype=torch.uint8))


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


def _put_folder(before: str) -> None:
    if before:
        os.chdir(before)


def _handler(number: int) -> Setting:
    return Setting(
        lambda: signal.getsignal(number),
        lambda before: signal.signal(number, before) if before is not None else None,
    )


#: Kinds of devices whose products an autocast that is left on would round, the oracle's among them.
AUTOCAST = ("cpu", "cuda")

SETTINGS: Mapping[str, Setting] = {
    "torch's default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": Setting(torch.get_default_device, torch.set_default_device),
    "torch's number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic mode": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch's precision of float32 products": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "how this thread rounds subnormals": Setting(
        _subnormals, lambda before: torch.set_flush_denormal(before == FLUSHED)
    ),
    "how this thread rounds": Setting(_rounding, _round),
    **{f"autocast on {device}": _autocast(device) for device in AUTOCAST},
    "the state of torch's default generator": Setting(_generator, _put_generator, told=False),
    "the state of Python's default generator": Setting(random.getstate, random.setstate, told=False),
    "Python's garbage collection": Setting(
        gc.isenabled, lambda before: gc.enable() if before else gc.disable()
    ),
    "what logging leaves out": Setting(lambda: logging.root.manager.disable, logging.disable),
    "the working folder": Setting(_folder, _put_folder),
    **{f"the handler of {number.name}": _handler(number) for number in SIGNALS},
}


@dataclass(frozen=True)
class Surroundings:
    """The settings of this process at one time."""

    values: Mapping[str, Any]

    @classmethod
    def now(cls) -> Surroundings:
        """Read them."""
        return cls({name: setting.read() for name, setting in SETTINGS.items()})

    def restored(self, who: str = "the call") -> list[str]:
        """Put back what was changed since; return a sentence for each setting that was."""
        return list(self._restored(who))

    def _restored(self, who: str) -> Iterator[str]:
        for name, before in self.values.items():
            after = SETTINGS[name].read()
            if after != before:
                SETTINGS[name].put(before)
                said = f": {_said(before)} before, {_said(after)} after" if SETTINGS[name].told else ""
                yield f"{who} changed {name}{said}"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    name = getattr(value, "__name__", None) or (value.name if isinstance(value, signal.Handlers) else None)
    return str(name or value)


#: The process that runs a batch; 0 where none does.
_owner = 0


def own() -> None:
    """Say that this process runs a batch: a copy of it that a kernel makes is to say nothing."""
    global _owner
    _owner = os.getpid()


def end_copies() -> None:
    """End this process if it is a copy, which came back out of a kernel that forked."""
    if _owner and os.getpid() != _owner:
        os._exit(0)
