"""The sizes that the kernels are cut to. Imports no torch.

A matrix product of a NeuronCore takes 128 rows of stationary and 512 columns of moving operand at once (NKI
reference, ``nki.language.tile_size``: ``pmax``, ``gemm_moving_fmax``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kimi_hal.errors import SettingsError

VARIABLE = "KIMI_HAL_TRAINIUM_TILE"
TILES = ("128", "256", "512")
#: The largest: memory is planned for it, whatever the variable says.
MOST = 512


def tile_of(settings: Mapping[str, str]) -> int:
    """Return how many keys a tile holds.

    Raises:
        SettingsError: the variable holds something else.
    """
    value = settings.get(VARIABLE, str(MOST))
    if value not in TILES:
        raise SettingsError(f"{VARIABLE}={value!r} is not {', '.join(TILES[:-1])} or {TILES[-1]}")
    return int(value)


def spans(total: int, step: int) -> Iterator[slice]:
    """Cut ``range(total)`` into slices of at most ``step``."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
