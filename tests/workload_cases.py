"""A workload of numbers from the project's own stream: reading one needs no encoder."""

from __future__ import annotations

import json
import math
import zlib

import torch

from kimi_hal.workload import codes, noise

CONTENT = "def push(heap, item):\n    heap.append(item)\n" * 40
METADATA = {
    "seed": "31",
    "heads": "[4, 6, 9, 10]",
    "files": json.dumps([["a.py", 0], ["b.py", 880]]),
    "torch": "2.x",
}


def integers(name: str, low: int, high: int, *shape: int) -> torch.Tensor:
    """Return int64 in [low, high), the same on every machine."""
    words = noise.words(0, name, math.prod(shape))
    return (words % (high - low) + low).view(shape)


def tensors() -> dict[str, torch.Tensor]:
    starts = torch.arange(0, len(CONTENT) - 3, 5, dtype=torch.int32)
    count = len(starts)
    scale = integers("scale", 900, 3000, 384).int()
    scale[7] = 20000  # a channel that stands out
    stored = {
        "hidden.codes": codes.pack(integers("codes", -31, 32, count, 384)),
        "hidden.scale": scale,
        "router.codes": integers("router", -127, 128, 896, 384).to(torch.int8),
        "router.gain": integers("gain", 1, 1000, 896) * 2.0**-20,
        "router.bias": integers("bias", -100, 100, 896) * 2.0**-13,
        "kda.A_log": integers("A_log", -64, 128, 96) * 2.0**-6,
        "kda.dt_bias": integers("dt_bias", -192, 64, 96 * 128) * 2.0**-6,
        "token.ids": torch.arange(count, dtype=torch.int16) % 7,
        "token.start": starts,
        "token.length": torch.full((count,), 3, dtype=torch.int16),
        "text.zlib": torch.frombuffer(bytearray(zlib.compress(CONTENT.encode())), dtype=torch.uint8),
    }
    for name in ("query", "key", "value"):
        stored[f"{name}.weight"] = integers(name, -1500, 1500, 384, 384).to(torch.int16)
        stored[f"{name}.bias"] = integers(f"{name}.bias", -900, 900, 384).int()
    return stored
