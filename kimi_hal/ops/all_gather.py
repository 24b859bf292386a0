"""Gathering a tensor from all ranks into the layout that its reader wants.

Formulas of ownership: ``kimi_hal/parallel/ownership.py``; sources: vLLM ``dcp_gather_kv_rows``, aiter
``aiter/dist/device_communicators/custom_all_reduce.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.ops import values as check
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.parallel import ownership

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSpec(Spec):
    """``all_gather``: the layout of the result, and of which ranks."""

    layout: str
    dtype: str
    ndim: int = 2
    dcp: DCP = DCP()

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "layout": OneOf(("rank_major", "token_order", "last_dim")),
        "dtype": OneOf(DTYPES),
        "ndim": Range(1, 8),
    }


def total_problem(spec: GatherSpec, rows: int, total: int | None) -> str | None:
    """Return why ``total`` cannot be the real rows of all ranks, each giving ``rows``; or ``None``."""
    if total is not None and (isinstance(total, bool) or not hasattr(total, "__index__")):
        return f"total must be a number of rows, got {type(total).__name__} {total!r}"
    if spec.layout != "token_order":
        return None if total is None else f"total is for layout='token_order', this is {spec.layout!r}"
    world, whole = spec.dcp.world, gathered_rows(spec, rows, total)
    if not 0 <= whole <= world * rows:
        return f"total={total} is outside 0 to {world * rows}, {world} ranks of {rows} rows"
    first = DCP(world=world, interleave=spec.dcp.interleave)  # no rank owns more than the first
    needed = ownership.local_length(whole, first)
    if needed > rows:
        return f"total={whole} puts {needed} rows on rank 0 at interleave {spec.dcp.interleave}, x has {rows}"
    return None


def gathered_rows(spec: GatherSpec, rows: int, total: int | None) -> int:
    """Return the rows of a result in token order."""
    return spec.dcp.world * rows if total is None else total


def _gather_sizes(spec: GatherSpec, limits: Limits | None, t: Mapping[str, Any]) -> dict[str, Any]:
    shape, world = tuple(t["x"].shape), spec.dcp.world
    if spec.layout == "rank_major":
        return {"Y": (world, *shape)}
    if spec.layout == "last_dim":
        return {"Y": (*shape[:-1], world * shape[-1])}
    return {"Y": (gathered_rows(spec, shape[0], t.get("total")), *shape[1:])}


def _gather_values(spec: GatherSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    problem = total_problem(spec, t["x"].shape[0], t.get("total"))
    if problem:
        yield problem
    yield from check.outputs_apart(t, outputs=("out",))


@operator(
    spec=GatherSpec,
    args={"x": Arg("spec.dtype", "*", ndim="ndim", strided="any")},
    outs=(Out("spec.dtype", "Y", "out"),),
    sizes=_gather_sizes,
    values=_gather_values,
    grouped=True,
)
def all_gather(
    x: Tensor, total: int | None = None, *, out: Tensor | None = None, workspace: Tensor | None = None
) -> Tensor:
    """Gather a tensor from all ranks, bit for bit, into one of three layouts.

    Args:
        x: ``[T_local, …]`` of ``Spec.ndim`` dimensions in ``Spec.dtype``, the same shape on every rank; any
            strides. A rank with fewer real rows pads.
        total: the real rows of all ranks together, for ``token_order`` only; ``None``: W · T_local.

    Returns:
        By ``Spec.layout``:

        * ``rank_major``: ``[W, T_local, …]``, rank r's tensor at r.
        * ``token_order``: ``[total, …]``, row p being row ``local(p)`` of the rank that owns position p under
          ``Spec.dcp`` (interleave I); the ranks' padding rows are left out.
        * ``last_dim``: ``[…, W · d]``, the ranks' last dimensions side by side.

    Edge rules: bytes are moved, never converted: every NaN payload and −0 arrives as it was. ``total`` may
    end anywhere; it is refused where a rank would own more rows than ``x`` has (so with ``total=None``
    T_local must be whole interleaves), or with another layout. Zero-length dimensions are legal. A batch of
    several ragged sequences is not one token order: gather rank-major, or once for each sequence.

    Errors: ``ContractError`` for a ``total`` that does not fit; ``GroupError`` on all ranks where shapes
    differ.

    Source: vLLM ``dcp_gather_kv_rows``, SGLang ``layers/dcp/comm.py``.
    """
