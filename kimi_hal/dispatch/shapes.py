"""The class of shapes that a plan serves: what a measurement on one of them says something about. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import fields
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.parallel import ownership

#: Spec fields on which the speed of an operator's kernels depends, by operator; the others may be anything.
FIELDS = {
    "indexer_logits": ("index", "num_heads", "score"),
    "indexer_topk": ("index", "num_heads", "score", "topk"),
    "topk_select": ("score", "scores_dtype", "topk"),
    "sparse_mla": ("latent", "num_heads", "q_dtype", "topk"),
    "quantize_index_query": ("index", "num_heads"),
    "store_index_keys": ("index",),
    "store_latent": ("latent",),
    "merge_attn_states": ("dim", "dtype", "num_heads", "parts"),
}
#: How far from a measured class another may be, as a factor of each size: beyond it nothing is known.
REACH = 4


@dataclass(frozen=True, order=True)
class Shape:
    """Sizes as powers of two, the next larger where they are none.

    Args:
        rows: query rows of a call.
        rows_per_req: rows of a request, where an operator reads a request's keys for all of its rows.
        length: keys of a row: scores, or selected keys; 1 where there are none.
    """

    rows: int
    rows_per_req: int = 1
    length: int = 1

    def distance(self, other: Shape) -> float | None:
        """Return how far another class is, in doublings of all sizes together; None beyond ``REACH`` in any."""
        sizes = (
            (self.rows, other.rows),
            (self.rows_per_req, other.rows_per_req),
            (self.length, other.length),
        )
        apart = [abs(math.log2(a / b)) for a, b in sizes]
        return None if max(apart) > math.log2(REACH) else sum(apart)

    def __str__(self) -> str:
        together = f" by {self.rows_per_req}" if self.rows_per_req > 1 else ""
        return f"{self.rows} rows{together}" + (f" × {self.length}" if self.length > 1 else "")


def power(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def shape(operator: str, spec: Any, limits: Limits) -> Shape:
    """Return the class of shapes of a plan with these Limits."""
    rows = power(limits.max_rows)
    if operator in ("indexer_logits", "indexer_topk", "topk_select"):
        keys = ownership.of_keys(spec.dcp)
        rows_per_req = 1 if operator == "topk_select" else power(limits.rows_per_req)
        return Shape(rows, min(rows_per_req, rows), power(-(-limits.max_context // keys.world)))
    if operator == "sparse_mla":
        return Shape(rows, 1, power(spec.topk))
    return Shape(rows)


def decisive(operator: str, spec: Spec) -> dict[str, Any]:
    """Return the fields of a Spec on which speed depends."""
    found = fields.values(spec)
    return {name: found[name] for name in FIELDS.get(operator, ()) if name in found}
