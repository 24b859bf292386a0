"""The lightning indexer: query quantisation, the index-key store, scores, and selection of the best keys.

``S[t, s] = Σ_h w[t, h] · relu(q[t, h, :] · k[s, :])``. Formulas: ``docs/operators.md``; DeepGEMM
``tests/test_attention.py`` for the scores, vLLM ``v1/attention/ops/rocm_aiter_mla_sparse.py`` for the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_hal import formats
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.ops import values as check
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.spec import DCP, FLOAT_DTYPES, Limits, Spec
from kimi_hal.parallel import ownership

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes that a row of logits is padded to where no Limits say so.
LOGITS_ALIGN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexQuerySpec(Spec):
    """``quantize_index_query``: the key format that the query must match, and what is folded into weights."""

    index: str
    num_heads: int = 32
    head_dim: int = 128
    weights_dtype: str = "float32"
    weight_scale: float | None = None
    hadamard: bool = False

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_heads": Range(1, 128),
        "head_dim": OneOf((128,)),
        "weights_dtype": OneOf(FLOAT_DTYPES),
        "weight_scale": Range(0, 1 << 16),
        "hadamard": OneOf((False, True)),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown index format."""
        yield from formats.problems("index", self.index)

    @property
    def query_dtype(self) -> str:
        """Return the dtype of the quantised query: an FP8 dtype, or uint8 for packed e2m1."""
        return formats.index(self.index).query_dtype

    @property
    def folded_scale(self) -> float:
        """Return ``weight_scale``, by default head_dim^-½ · num_heads^-½ with the true head count."""
        given = self.weight_scale
        return float(self.head_dim * self.num_heads) ** -0.5 if given is None else float(given)

    def dims(self) -> dict[str, int]:
        """Return H, D, the quantised query's width Q and its block scales' width S."""
        return {"H": self.num_heads, "D": self.head_dim, **_query_dims(self.index)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndexSpec(Spec):
    """``store_index_keys``: which key format, and which slot may be written by several rows."""

    index: str
    head_dim: int = 128
    dump_slot: int = -1

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "head_dim": OneOf((128,)),
        "dump_slot": Range(-1, 1 << 40),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown index format."""
        yield from formats.problems("index", self.index)

    def dims(self) -> dict[str, int]:
        """Return D and the bytes of a page."""
        return {"D": self.head_dim, "page_bytes": formats.index(self.index).page_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec(Spec):
    """``indexer_logits``: key format, heads, score type, and how the keys are spread over ranks."""

    index: str
    num_heads: int = 32
    head_dim: int = 128
    score: str = "float32"
    weights_dtype: str = "float32"
    dcp: DCP = DCP()

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_heads": Range(1, 128),
        "head_dim": OneOf((128,)),
        "score": OneOf(FLOAT_DTYPES),
        "weights_dtype": OneOf(FLOAT_DTYPES),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown index format."""
        yield from formats.problems("index", self.index)

    @property
    def query_dtype(self) -> str:
        """Return the dtype of the quantised query."""
        return formats.index(self.index).query_dtype

    @property
    def page(self) -> int:
        """Return the tokens of a page of keys."""
        return formats.index(self.index).page

    def dims(self) -> dict[str, int]:
        """Return H, the query's widths Q and S, and the bytes of a page."""
        page_bytes = formats.index(self.index).page_bytes
        return {"H": self.num_heads, "page_bytes": page_bytes, **_query_dims(self.index)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTopKSpec(IndexerSpec):
    """``indexer_topk``: what to score, and how many keys to select in which form."""

    topk: int = 2048
    ordered: bool = False
    return_selected: bool = False
    emit: str = "local"

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        **IndexerSpec.DOMAIN,
        "topk": Range(1, 1 << 20),
        "ordered": OneOf((False, True)),
        "return_selected": OneOf((False, True)),
        "emit": OneOf(("local", "slot")),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown index format, and slots where the selection of one rank is not final."""
        yield from IndexerSpec.problems(self)
        if self.emit == "slot" and ownership.of_keys(self.dcp).world > 1:
            yield "emit='slot' needs all keys on this rank; with sharded keys emit='local' and merge"

    def dims(self) -> dict[str, int]:
        """Return the dimensions of ``indexer_logits``, k = topk and the width of the selected scores."""
        selected = self.topk if self.return_selected else 0
        return {**IndexerSpec.dims(self), "k": self.topk, "selected": selected}


def _query_dims(index: str) -> dict[str, int]:
    fmt = formats.index(index)
    return {"Q": fmt.element_bytes, "S": 4 if fmt.element == "e2m1" else 0}


def logits_width(spec: IndexerSpec, limits: Limits | None, columns: int) -> int:
    """Return the width of an allocated row of logits.

    Args:
        spec: gives the score type and how keys are spread.
        limits: ``max_context`` local keys in whole interleaves, rounded up to ``logits_align`` bytes.
            ``None``: the keys of ``columns`` pages.
        columns: columns of the block table.
    """
    itemsize = 4 if spec.score == "float32" else 2
    if limits is None:
        keys, align = columns * spec.page, LOGITS_ALIGN // itemsize
    else:
        shards = ownership.of_keys(spec.dcp)
        keys = -(-limits.max_context // (shards.world * shards.interleave)) * shards.interleave
        align = max(1, limits.logits_align // itemsize)
    return -(-keys // align) * align


def _quantize_values(spec: IndexQuerySpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from check.outputs_apart(t, outputs=("q_out", "q_scale_out", "weights_out"))


@operator(
    spec=IndexQuerySpec,
    args={
        "q": Arg(("bfloat16", "float32"), "T H D"),
        "weights": Arg(("bfloat16", "float32"), "T H"),
    },
    outs=(
        Out("spec.query_dtype", "T H Q", "q_out"),
        Out("uint8", "T H S", "q_scale_out"),
        Out("spec.weights_dtype", "T H", "weights_out"),
    ),
    values=_quantize_values,
)
def quantize_index_query(
    q: Tensor,
    weights: Tensor,
    *,
    q_out: Tensor | None = None,
    q_scale_out: Tensor | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the index query of T rows to its key format, and fold the scales into the head weights.

    FP8: one power of two for each row and head, ``2**⌈log2(max(amax, 1e-4) / 448)⌉`` (224 for fnuz), which
    goes into ``w = weights · q_scale · weight_scale``. MXFP4: one e8m0 for each 32 elements, which stays
    apart; ``w = weights · weight_scale``.

    Args:
        q: ``[T, H, 128]`` bf16 or float32; row and head strides are free.
        weights: ``[T, H]`` bf16 or float32, the head weights; may be negative.

    Returns:
        q_quant: ``[T, H, 128]`` in the format's FP8 dtype, or ``[T, H, 64]`` uint8, the low nibble the even
            element.
        q_scale: ``[T, H, 4]`` uint8 e8m0 with MXFP4; ``[T, H, 0]`` with FP8.
        w: ``[T, H]`` in ``Spec.weights_dtype``.

    ``Spec.weight_scale`` is 128^-½ · H^-½ by default, H being the model's heads and never a padded number.
    ``Spec.hadamard`` first turns q by the orthonormal 128-point Hadamard matrix in Sylvester's order; the
    engine turns the keys it stores likewise.

    Edge rules: an all-zero q gives zeros and a finite scale. There is no padding marker: every row is
    computed, and none can trap. T = 0 is legal.

    Source: vLLM ``model_executor/layers/sparse_attn_indexer.py`` and
    ``models/deepseek_v4/common/ops/fused_indexer_q.py``; rule 6 of ``docs/contract.md``.
    """


def _store_values(spec: StoreIndexSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    capacity = t["cache"].shape[0] * formats.index(spec.index).page
    yield from check.below("slots", t["slots"], capacity, "the cache's tokens")
    yield from check.distinct("slots", t["slots"], ignore=spec.dump_slot)
    yield from check.no_overlap(t, written="cache", read=("k", "slots"))


@operator(
    spec=StoreIndexSpec,
    args={
        "k": Arg(("bfloat16", "float32"), ">=T D"),
        "slots": Arg("int64", "T", strided="any"),
        "cache": Arg("uint8", "pages page_bytes", mutated=True),
    },
    values=_store_values,
)
def store_index_keys(k: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Quantise the index keys of T tokens and write each into its cache slot.

    Args:
        k: ``[>=T, 128]`` bf16 or float32, after LayerNorm; rows beyond T (a graph's padding) are ignored.
        slots: ``[T]`` int64, ``page * 64 + offset`` in this cache view; negative: the token is skipped.
        cache: ``[pages, page_bytes]`` uint8 in ``Spec.index``, written in place; ``stride(0)`` is free.

    Edge rules: slot 0 is an ordinary slot. No byte outside the named slots changes. A slot at or beyond
    ``pages * 64`` writes nothing. Two live rows with one slot: each of its bytes is of either; an error in
    checked mode unless the slot is ``Spec.dump_slot`` (an engine that pads with slot 0 owns that slot and never
    reads it). T = 0 is legal.

    Source: vLLM ``indexer_k_quant_and_cache``; byte layouts in ``docs/formats.md``; rule 6 of
    ``docs/contract.md``.
    """


def _row_values(spec: IndexerSpec, t: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """Check lengths, requests and the table entries that the live rows read."""
    table, length = t["block_table"], t["row_len"].long()
    keys = ownership.local_length(length, ownership.of_keys(spec.dcp))
    room, live = table.shape[1] * spec.page, keys > 0
    longest = int(keys.max()) if keys.numel() else 0
    yield from check.between("row_len", length, 0, 1 << 31)
    if longest > room:
        yield f"row_len asks for {longest} keys on this rank, beyond the block table's tokens ({room})"
    if width is not None and longest > width:
        yield f"row_len asks for {longest} keys on this rank, beyond the columns of out ({width})"
    yield from check.row_requests(live, t["row_req"], table.shape[0])
    first = length.new_tensor(range(0, min(longest, room), spec.page)).expand(length.shape[0], -1)
    read = first < keys[:, None]
    yield from check.table_pages(read, first, t["row_req"], table, spec.page, t["cache"].shape[0])


def _logits_values(spec: IndexerSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    out = t.get("out")
    yield from _row_values(spec, t, None if out is None else out.shape[1])
    yield from check.outputs_apart(t, outputs=("out",))


def _logits_sizes(spec: IndexerSpec, limits: Limits | None, t: Mapping[str, Any]) -> dict[str, Any]:
    out = t.get("out")
    if out is not None and len(out.shape) == 2:
        return {"L": out.shape[1]}
    return {"L": logits_width(spec, limits, t["block_table"].shape[1])}


_SCORED = {
    "q": Arg("spec.query_dtype", "T H Q"),
    "q_scale": Arg("uint8", "T H S"),
    "weights": Arg("spec.weights_dtype", "T H"),
    "cache": Arg("uint8", "pages page_bytes"),
    "block_table": Arg("int32", "R columns"),
    "row_req": Arg("int32", "T", strided="any"),
    "row_len": Arg("int32", "T", strided="any"),
}


@operator(
    spec=IndexerSpec,
    args=_SCORED,
    outs=(Out("spec.score", "T L", "out"),),
    sizes=_logits_sizes,
    values=_logits_values,
)
def indexer_logits(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Score T query rows against the keys of their requests: ``S[t, j] = Σ_h w · relu(q · k_j)``.

    The dot product, the ReLU, the weight and the sum over heads are in at least float32, in that order.

    Args:
        q: ``[T, H, 128]`` FP8 or ``[T, H, 64]`` packed e2m1, from ``quantize_index_query``.
        q_scale: ``[T, H, 4]`` e8m0 with MXFP4, ``[T, H, 0]`` with FP8, whose scale is in the weights.
        weights: ``[T, H]`` in ``Spec.weights_dtype``, folded.
        cache: ``[pages, page_bytes]`` uint8 in ``Spec.index``.
        block_table: ``[R, columns]`` int32 pages of each request. Column c holds local positions 64c to
            64c + 63; entries beyond a row's local length are not read.
        row_req: ``[T]`` int32 request of each row; not read where ``row_len[t] <= 0``.
        row_len: ``[T]`` int32 exclusive key bound in global positions, also under DCP.

    Returns:
        ``[T, L]`` in ``Spec.score``; column j is local position j. bfloat16 is the float32 sum rounded once,
        to nearest even. L is ``out.shape[1]``, or what ``Limits.max_context`` needs on one rank in whole
        interleaves, rounded up to ``Limits.logits_align`` bytes.

    Edge rules: columns from the row's local length on are unspecified and may be written, so nobody may read
    them (the reference leaves a caller's bytes there, and −inf where it allocates). A length ≤ 0 gives a row
    without keys; one beyond the block table or the row is clamped. ReLU keeps NaN: a key with a NaN scores
    NaN, no other byte does. A key behind a block-table entry that names no page scores −inf. With
    ``dcp.index="replicated"`` every rank holds all keys and a local position is the global one.

    Source: DeepGEMM ``tests/test_attention.py``; rules 1, 2 and 4 of ``docs/contract.md``.
    """


def _topk_values(spec: IndexerTopKSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from _row_values(spec, t)
    yield from check.outputs_apart(t, outputs=("out", "scores_out"))


@operator(
    spec=IndexerTopKSpec,
    args=_SCORED,
    outs=(Out("int32", "T k", "out"), Out("spec.score", "T selected", "scores_out")),
    tested=(Out("spec.score", "T width", "all_scores_out"),),
    values=_topk_values,
)
def indexer_topk(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    scores_out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the ``topk`` best keys of each row, as ``topk_select`` would on ``indexer_logits``.

    Args:
        q: as in ``indexer_logits``, like the six operands after it.
        q_scale: block scales of q.
        weights: folded head weights.
        cache: index keys.
        block_table: pages of each request.
        row_req: request of each row.
        row_len: exclusive key bound of each row, in global positions.

    Returns:
        indices: ``[T, k]`` int32. ``emit="local"``: local positions, on one rank the positions themselves.
            ``emit="slot"``: physical slots of this cache view, in the order of their positions; a selected key
            behind a block-table entry that names no page has none: it drops out, and the others close up.
        scores: ``[T, k]`` in ``Spec.score``, aligned with indices, −inf where −1; ``[T, 0]`` without
            ``return_selected``.

    Edge rules: rule 2 of ``docs/contract.md``. The order is strict: score descending, then smaller position;
    −0 equals +0, NaN ranks below −inf. A row with fewer than k keys returns all of them. Selected entries
    stand at the front, the others are −1; they ascend with ``Spec.ordered``. A length ≤ 0 gives a row of −1.
    Under DCP the selection is this rank's, for ``topk_merge``. ``out`` may be a column slice of a wider
    buffer.

    Test entry: a run function carries ``return_scores``, which takes one more keyword, ``all_scores_out
    [T, width]``, and returns ``(indices, scores, all_scores)``. It writes the score of every key of a row;
    the columns behind them are unspecified. The selection is bit-equal with and without it.

    Source: vLLM ``model_executor/layers/indexer_topk.py``; rules 1, 2 and 4 of ``docs/contract.md``.
    """
