"""The fixed maps that widen an encoder's vectors to K3.1's widths.

Each is a stack of seeded signed permutations: the wide vector is made of blocks of the narrow one, every
block in an order and with signs of its own, each channel divided by the square root of how often it occurs.
So the columns of the map are orthonormal: lengths, angles and dot products of the narrow space are kept, and
a channel that stands out still stands out, once in every block. A dense rotation would smear it over all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.workload import noise

#: Elements that are widened in float64 at a time: 64 MiB.
CHUNK = 1 << 23


@dataclass(frozen=True)
class Isometry:
    """A map from ``narrow`` to ``len(index)`` dimensions with orthonormal columns (rows, if it narrows).

    ``index [wide]`` int64 names the channel that each output reads, ``factor [wide]`` float64 is its sign
    divided by √(times the channel occurs). ``gain`` is √(wide / narrow) of the whole map: times this, an
    expansion keeps the root mean square of an element.
    """

    narrow: int
    index: Tensor
    factor: Tensor
    gain: float

    def expand(self, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Widen ``x [..., narrow]`` float64 to ``[..., wide]``: a gather, a product, a rounding."""
        rows = x.reshape(-1, self.narrow)
        out = torch.empty(len(rows), len(self.index), dtype=dtype)
        factor, step = self.factor * scale, max(CHUNK // len(self.index), 1)
        for at in range(0, len(rows), step):
            out[at : at + step] = rows[at : at + step, self.index] * factor
        return out.view(*x.shape[:-1], len(self.index))

    def columns(self, outputs: Tensor) -> Isometry:
        """Return the part of the map that makes the named outputs; it keeps the whole map's gain."""
        return Isometry(self.narrow, self.index[outputs], self.factor[outputs], self.gain)

    def matrix(self) -> Tensor:
        """Return the map as a dense ``[wide, narrow]`` float64 matrix."""
        return torch.zeros(len(self.index), self.narrow, dtype=torch.float64).scatter_(
            1, self.index[:, None], self.factor[:, None]
        )


def isometry(seed: int, name: str, narrow: int, wide: int) -> Isometry:
    """Build the map ``name`` from ``narrow`` to ``wide`` dimensions.

    Args:
        seed: with ``name`` and the two widths, all that the map depends on.
        name: which map; two names give independent orders and signs.
        narrow: width of what is widened.
        wide: width of the result. The last block may be a part of a permutation; below ``narrow`` the map
            selects ``wide`` channels.
    """
    stream = f"{name}/{narrow}/{wide}"
    blocks = [noise.permutation(seed, f"{stream}/{b}", narrow) for b in range(-(-wide // narrow))]
    index = torch.cat(blocks)[:wide]
    copies = torch.bincount(index, minlength=narrow)[index].double()
    factor = noise.signs(seed, f"{stream}/signs", wide) / copies.sqrt()
    return Isometry(narrow, index, factor, float((wide / narrow) ** 0.5))


def shuffle(seed: int, name: str, count: int) -> tuple[Tensor, Tensor]:
    """Return one signed permutation of ``count`` channels: ``index`` int64 and ``sign`` float64."""
    return noise.permutation(seed, name, count), noise.signs(seed, f"{name}/signs", count)
