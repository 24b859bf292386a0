"""The known formats by name: lookup, the sentence for an unknown name, and registration by plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from kimi_hal.errors import FormatError, unknown
from kimi_hal.formats.expert_weights import ExpertFormat
from kimi_hal.formats.index_keys import IndexFormat
from kimi_hal.formats.latents import LatentFormat

Format = IndexFormat | LatentFormat | ExpertFormat
F = TypeVar("F", IndexFormat, LatentFormat, ExpertFormat)

KINDS = ("index", "latent", "experts")

_formats: dict[str, Format] = {}


def register(fmt: Format) -> None:
    """Make a format known by its name; a plugin's loader calls it with each format the plugin brings.

    Raises:
        FormatError: another format has the name, or the name does not begin with its kind. Registering an
            equal format again does nothing.
    """
    if not fmt.name.startswith(f"{fmt.kind}."):
        raise FormatError(f"format {fmt.name!r} is of kind {fmt.kind!r}: call it '{fmt.kind}.{fmt.name}'")
    if _formats.setdefault(fmt.name, fmt) != fmt:
        raise FormatError(
            f"format {fmt.name!r} is registered already, with another layout: choose another name"
        )


def names(kind: str | None = None) -> tuple[str, ...]:
    """Return the known names in order, of one kind ("index", "latent", "experts") or of all."""
    if kind is not None and kind not in KINDS:
        raise unknown("kind of format", kind, KINDS)
    return tuple(sorted(name for name, fmt in _formats.items() if kind in (None, fmt.kind)))


def get(name: str) -> Format:
    """Return the format of any kind; raises UnknownNameError with the nearest name."""
    if name not in _formats:
        raise unknown("format", name, _formats)
    return _formats[name]


def _typed(cls: type[F], name: str) -> F:
    fmt = _formats.get(name)
    if not isinstance(fmt, cls):
        raise unknown(f"{cls.kind} format", name, names(cls.kind))
    return fmt


def index(name: str) -> IndexFormat:
    """Return an index-key format; raises UnknownNameError with the nearest name."""
    return _typed(IndexFormat, name)


def latent(name: str) -> LatentFormat:
    """Return a latent format; raises UnknownNameError with the nearest name."""
    return _typed(LatentFormat, name)


def experts(name: str) -> ExpertFormat:
    """Return an expert-weight format; raises UnknownNameError with the nearest name."""
    return _typed(ExpertFormat, name)


def problems(kind: str, name: str) -> Iterator[str]:
    """Yield one sentence with the nearest name if there is no such format of this kind."""
    if name not in names(kind):
        yield str(unknown(f"{kind} format", name, names(kind)))
