"""Where the points of an error plot stand: a logarithmic axis of shares of a budget, its limit at 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: The axis, in decades: from what nobody needs told apart to what no budget comes near.
LOWEST, HIGHEST = -4, 2
#: Pixels: of the labels' column, of the axis, of a row, of the ticks' line above the rows.
LABELS, AXIS, ROW, HEAD = 280.0, 520.0, 20.0, 22.0


@dataclass(frozen=True)
class Share:
    """An error as a share of its budget, ``None`` where no finite share says it, and what a reader is told."""

    value: float | None
    told: str

    @property
    def within(self) -> bool:
        """Tell whether the budget allows it."""
        return self.value is not None and self.value <= 1.0

    @property
    def x(self) -> float:
        """Return where it stands; what lies outside of the axis, or has no finite share, stands at its end."""
        return position(math.inf if self.value is None else self.value)


@dataclass(frozen=True)
class Row:
    """A line of the plot."""

    label: str
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Plot:
    """Rows under one axis."""

    rows: tuple[Row, ...]

    @property
    def width(self) -> float:
        """Return the drawing's width in pixels."""
        return LABELS + AXIS + 2 * ROW

    @property
    def height(self) -> float:
        """Return the drawing's height in pixels."""
        return HEAD + ROW * (len(self.rows) + 0.5)

    @property
    def ticks(self) -> Sequence[tuple[float, str]]:
        """Return each decade's place and label."""
        return [(position(10.0**n), f"{10.0**n:g}") for n in range(LOWEST, HIGHEST + 1)]

    @property
    def edge(self) -> float:
        """Return where labels end."""
        return LABELS - ROW / 2

    @property
    def limit(self) -> float:
        """Return where the budget ends."""
        return position(1.0)

    def y(self, index: int) -> float:
        """Return the middle of a row."""
        return HEAD + ROW * (index + 0.5)


def position(share: float) -> float:
    """Return a share's place on the axis, in pixels from the left."""
    decade = math.log10(share) if share > 0 else -math.inf
    inside = min(max(decade, float(LOWEST)), float(HIGHEST))
    return LABELS + AXIS * (inside - LOWEST) / (HIGHEST - LOWEST)
