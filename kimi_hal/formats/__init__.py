"""Byte layouts of caches and weights, as data, with encoding and decoding in plain torch.

A format owns its element type, scale kind and element order; nothing is ever derived from a device.
Importing this package imports no torch. Tables and sources: ``docs/formats.md``; rules: rule 6 of
``docs/contract.md``.
"""

from __future__ import annotations

from kimi_hal.formats.catalogue import FORMATS
from kimi_hal.formats.conversion import convert
from kimi_hal.formats.expert_weights import ExpertFormat
from kimi_hal.formats.index_keys import IndexFormat
from kimi_hal.formats.latents import LatentFormat
from kimi_hal.formats.registry import Format, experts, get, index, latent, names, problems, register

__all__ = [
    "ExpertFormat",
    "Format",
    "IndexFormat",
    "LatentFormat",
    "convert",
    "experts",
    "get",
    "index",
    "latent",
    "names",
    "problems",
    "register",
]

for _format in FORMATS:
    register(_format)
