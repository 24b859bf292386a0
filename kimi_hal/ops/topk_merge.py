"""Selection of the best keys from a row of scores, and its exact merge over ranks that hold shards of it.

One strict total order, rule 2 of ``docs/contract.md``: score descending, then smaller global position; −0
equals +0, NaN ranks below −inf, what is not a key below NaN. A member of the global selection is always in
its owner's local one, so the merge of local selections is exact. Protocols: ``docs/operators.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.ops import values as check
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.spec import DCP, FLOAT_DTYPES, Limits, Spec
from kimi_hal.parallel import ownership

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKSpec(Spec):
    """``topk_select``: how many, over scores of which type."""

    topk: int = 2048
    score: str = "float32"
    scores_dtype: str = "float32"
    ordered: bool = False
    return_selected: bool = False
    has_row_start: bool = False
    dcp: DCP = DCP()

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "topk": Range(1, 1 << 20),
        "score": OneOf(FLOAT_DTYPES),
        "scores_dtype": OneOf(FLOAT_DTYPES),
        "ordered": OneOf((False, True)),
        "return_selected": OneOf((False, True)),
        "has_row_start": OneOf((False, True)),
    }

    def dims(self) -> dict[str, int]:
        """Return k = topk and the width of the selected scores."""
        return {"k": self.topk, "selected": self.topk if self.return_selected else 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKMergeSpec(Spec):
    """``topk_merge``: which ranks, what they send each other, and whether global positions are wanted."""

    dcp: DCP
    topk: int = 2048
    protocol: str = "full"
    score: str = "float32"
    ordered: bool = False
    return_global: bool = True
    quota: int | None = None

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "topk": Range(1, 1 << 20),
        "protocol": OneOf(("full", "compact", "scores_only")),
        "score": OneOf(FLOAT_DTYPES),
        "ordered": OneOf((False, True)),
        "return_global": OneOf((False, True)),
        "quota": Range(1, 1 << 20),
    }

    def problems(self) -> Iterator[str]:
        """Yield combinations that a protocol cannot serve."""
        if self.protocol == "compact" and self.score != "bfloat16":
            yield f"protocol='compact' sends 16 bits of score and needs score='bfloat16', got {self.score!r}"
        if self.protocol == "scores_only" and self.return_global:
            yield "protocol='scores_only' keeps ids local and needs return_global=False"
        if self.protocol != "compact" and self.quota is not None:
            yield f"quota={self.quota} is for protocol='compact', got protocol={self.protocol!r}"

    @property
    def candidates(self) -> int:
        """Return how many candidates a rank sends at first under ``compact``: ⌈1.5·k/W⌉ or the quota."""
        wanted = self.quota or -(-3 * self.topk // (2 * self.dcp.world))
        return min(self.topk, wanted)

    def dims(self) -> dict[str, int]:
        """Return k = topk and the width of the global positions."""
        return {"k": self.topk, "global": self.topk if self.return_global else 0}

    def meets(self) -> int:
        """Return how many ranks exchange candidates: with all index keys on every rank none has anything to send."""
        return ownership.of_keys(self.dcp).world


def _select_presence(spec: TopKSpec) -> dict[str, bool]:
    return {"row_start": spec.has_row_start}


def _select_values(spec: TopKSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    width, start = t["scores"].shape[1], t.get("row_start")
    keys = ownership.local_length(t["row_len"].long(), ownership.of_keys(spec.dcp))
    yield from check.between("row_len", t["row_len"], 0, 1 << 31)
    if start is not None:
        yield from check.between("row_start", start, 0, width + 1)
    ends = keys if start is None else keys + start
    if ends.numel() and int(ends.max()) > width:
        yield f"row_len reaches column {int(ends.max())}, beyond the row's {width} scores"
    yield from check.outputs_apart(t, outputs=("out", "scores_out"))


@operator(
    spec=TopKSpec,
    args={
        "scores": Arg("spec.scores_dtype", "T L"),
        "row_len": Arg("int32", "T", strided="any"),
        "row_start": Arg("int32", "T", strided="any"),
    },
    outs=(Out("int32", "T k", "out"), Out("spec.score", "T selected", "scores_out")),
    presence=_select_presence,
    values=_select_values,
)
def topk_select(
    scores: Tensor,
    row_len: Tensor,
    row_start: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scores_out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the ``topk`` best keys of each row of scores.

    Args:
        scores: ``[T, L]`` in ``Spec.scores_dtype``; the row stride is free. Under ``score="bfloat16"`` each
            score is first rounded once, to nearest even.
        row_len: ``[T]`` int32 exclusive key bound in global positions; under ``Spec.dcp`` the row holds this
            rank's share of them.
        row_start: ``[T]`` int32, required with ``has_row_start``: the row's keys are the columns from
            ``row_start[t]`` on, and indices are relative to it.

    Returns:
        indices: ``[T, k]`` int32.
        selected: ``[T, k]`` in ``Spec.score``, aligned with indices, −inf where −1; ``[T, 0]`` without
            ``return_selected``.

    Edge rules: the order is strict: score descending, then smaller position; −0 equals +0, NaN of any sign
    ranks below −inf. The row's length is clamped to ``[0, L − row_start]``, ``row_start`` to ``[0, L]``; no
    other column is read. A row with fewer than k keys returns all of them. Selected entries stand at the
    front, the others are −1; they ascend with ``Spec.ordered``. A length ≤ 0 gives a row of −1. T = 0 and
    L = 0 are legal.

    Source: rules 1, 2 and 4 of ``docs/contract.md``; vLLM ``model_executor/layers/indexer_topk.py``.
    """


def _merge_values(spec: TopKMergeSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    keys = ownership.local_length(t["row_len"].long(), ownership.of_keys(spec.dcp))
    index = t["indices"]
    yield from check.between("row_len", t["row_len"], 0, 1 << 31)
    beyond = index[index >= keys[:, None]]
    if beyond.numel():
        yield f"indices holds {int(beyond.max())}, beyond the local length of its row"
    ascending = index.sort(dim=1).values
    twice = (ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)
    if bool(twice.any()):
        yield f"indices names {int(ascending[:, 1:][twice][0])} twice in a row"
    yield from check.outputs_apart(t, outputs=("local_out", "len_out", "global_out"))


@operator(
    spec=TopKMergeSpec,
    args={
        "scores": Arg("spec.score", "T k"),
        "indices": Arg("int32", "T k"),
        "row_len": Arg("int32", "T", strided="any"),
    },
    outs=(
        Out("int32", "T k", "local_out"),
        Out("int32", "T", "len_out"),
        Out("int32", "T global", "global_out"),
    ),
    values=_merge_values,
    grouped=True,
)
def topk_merge(
    scores: Tensor,
    indices: Tensor,
    row_len: Tensor,
    *,
    local_out: Tensor | None = None,
    len_out: Tensor | None = None,
    global_out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the selections of W ranks into the selection over all keys; each rank keeps its own winners.

    Args:
        scores: ``[T, k]`` in ``Spec.score``, this rank's selected scores, from ``indexer_topk`` or
            ``topk_select`` with ``return_selected``. Only entries with an index count.
        indices: ``[T, k]`` int32 local positions of them, −1 where there is none.
        row_len: ``[T]`` int32 exclusive key bound in global positions, the same on every rank.

    Returns:
        local: ``[T, k]`` int32, this rank's winners as local positions, ascending from the front, then −1.
        local_len: ``[T]`` int32, how many they are.
        global_: ``[T, k]`` int32, all winners as global positions, the same on every rank, ascending from the
            front, then −1; ``[T, 0]`` without ``return_global``.

    The union of the ranks' winners is exactly what one rank would select from all keys, on every protocol:

    * ``full``: score and global position of every candidate, 8 bytes each.
    * ``compact`` (bfloat16 scores): the best ⌈1.5·k/W⌉ candidates of a rank (``Spec.quota``) in 4 bytes each,
      16 bits of score and 16 of local position, grouped by segments of 65,536 positions whose counts stand
      in a header. A row in which a rank sent its whole quota, holds more, and its last candidate is among
      the winners may be wrong: such rows, and those beyond 2^20 tokens, are sent again in full.
    * ``scores_only``: scores alone, 4 bytes each (2 with bfloat16); ids stay local and a shared threshold
      decides. Rows whose ties straddle the cut exchange the tied positions in a second message.

    Eagerly the size of a second message follows from the first, which all ranks have. A captured graph
    cannot do that: there the second exchange has a fixed capacity and a device flag says that it did not
    suffice; the engine then answers with an eager ``full``. A plan that promises ``capture="full"`` under one
    of these two protocols has the flag as ``plan.run.flag``, int32 ``[1]``: rows left without an answer (−1,
    and 0 as their count) since the engine last set it to zero, the same on every rank. What needs no vendor's
    kernel is ``kimi_hal.parallel.captured``.

    Edge rules: rule 2 of ``docs/contract.md``. An index at or beyond the row's local length counts as −1.
    Padding is told by its index, never by its score. A length ≤ 0 gives −1 and 0. With one rank
    every candidate wins. With ``dcp.index="replicated"`` they are global positions already: every one wins,
    nothing is sent, and each rank keeps those that it owns.

    Source: rule 2 of ``docs/contract.md``; vLLM ``dcp_indexer_cutedsl.py`` (``full``), aiter
    ``ops/flydsl/dcp_topk_merge.py`` (``scores_only``).
    """
