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
    "dsa_decode": (
        *("attn.latent", "attn.num_heads", "attn.q_dtype", "attn.topk"),
        *("indexer.index", "indexer.num_heads", "indexer.score"),
    ),
}
#: Where a row's keys come from: this rank's share of the context, or those that were selected; else it has none.
CONTEXT, SELECTED = "context", "selected"
#: Context of a class that says nothing of it.
UNTOLD = 1 << 20
#: How far from a measured class another may be, as a factor of each size: beyond it nothing is known.
REACH = 4


@dataclass(frozen=True)
class Kind:
    """Which sizes the classes of an operator have beside rows.

    Args:
        keys: ``CONTEXT``, ``SELECTED``, or empty.
        together: a request's keys are read for all of its rows.
    """

    keys: str = ""
    together: bool = False


#: By operator; of the others rows alone count.
KINDS = {
    "indexer_logits": Kind(CONTEXT, together=True),
    "indexer_topk": Kind(CONTEXT, together=True),
    "topk_select": Kind(CONTEXT),
    "sparse_mla": Kind(SELECTED),
    "dsa_decode": Kind(CONTEXT),
}


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


def kind(operator: str) -> Kind:
    """Return which sizes the classes of an operator have."""
    return KINDS.get(operator, Kind())


def shape(operator: str, spec: Any, limits: Limits) -> Shape:
    """Return the class of shapes of a plan with these Limits."""
    own, rows = kind(operator), power(limits.max_rows)
    rows_per_req = min(rows, power(limits.rows_per_req)) if own.together else 1
    length = 1
    if own.keys == CONTEXT:
        length = power(-(-limits.max_context // ownership.of_keys(spec.dcp).world))
    elif own.keys == SELECTED:
        length = power(spec.topk)
    return Shape(rows, rows_per_req, length)


def limits(operator: str, spec: Any, sizes: Shape) -> Limits:
    """Return the Limits whose class of shapes this is: ``shape`` makes it of them again."""
    context = UNTOLD
    if kind(operator).keys == CONTEXT:
        context = sizes.length * ownership.of_keys(spec.dcp).world
    requests = max(1, sizes.rows // sizes.rows_per_req)
    return Limits(
        max_rows=sizes.rows, max_reqs=requests, max_context=context, rows_per_req=sizes.rows_per_req
    )


def decisive(operator: str, spec: Spec) -> dict[str, Any]:
    """Return the fields of a Spec on which speed depends."""
    found = fields.values(spec)
    return {name: found[name] for name in FIELDS.get(operator, ()) if name in found}
