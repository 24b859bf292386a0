"""Sparse multi-head latent attention: the latent store, attention over selected rows, and LSE merging.

Formulas: ``docs/operators.md``; FlashMLA ``tests/ref.py`` for attention, vLLM
``v1/attention/ops/dcp.py`` for the merge.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLatentSpec(Spec):
    """``store_latent``: which latent format, and how many tokens a page of the cache has."""

    latent: str
    page: int = 64
    kv_rank: int = 512
    pe_dim: int = 64
    dump_slot: int = -1

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "page": Range(1, 1 << 20),
        "kv_rank": OneOf((512,)),
        "pe_dim": OneOf((64,)),
        "dump_slot": Range(-1, 1 << 40),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown latent format."""
        yield from formats.problems("latent", self.latent)

    def dims(self) -> dict[str, int]:
        """Return kv_rank, pe_dim and the bytes of a page."""
        fmt = formats.latent(self.latent)
        return {"kv_rank": self.kv_rank, "pe_dim": self.pe_dim, "page_bytes": self.page * fmt.row_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMLASpec(Spec):
    """``sparse_mla``: heads of this call (under DCP the group's), latent format, what an index means."""

    num_heads: int
    latent: str
    page: int = 64
    topk: int = 2048
    kv_rank: int = 512
    pe_dim: int = 64
    softmax_scale: float = 192**-0.5
    index_space: str = "slot"
    has_index_len: bool = False
    q_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    return_lse: bool = True
    dcp: DCP = DCP()

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_heads": Range(1, 128),
        "page": Range(1, 1 << 20),
        "topk": Range(1, 1 << 20),
        "kv_rank": OneOf((512,)),
        "pe_dim": OneOf((64,)),
        "softmax_scale": Range(0, 1 << 16),
        "index_space": OneOf(("slot", "position", "local")),
        "q_dtype": OneOf(("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz")),
        "out_dtype": OneOf(FLOAT_DTYPES),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown latent format."""
        yield from formats.problems("latent", self.latent)

    def dims(self) -> dict[str, int]:
        """Return H, D = kv_rank + pe_dim, V = kv_rank, the LSE's width L, topk and the bytes of a page."""
        fmt = formats.latent(self.latent)
        return {
            "H": self.num_heads,
            "D": self.kv_rank + self.pe_dim,
            "V": self.kv_rank,
            "L": self.num_heads if self.return_lse else 0,
            "topk": self.topk,
            "page_bytes": self.page * fmt.row_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec(Spec):
    """``merge_attn_states``: how many parts of which shape."""

    parts: int
    num_heads: int
    dim: int = 512
    dtype: str = "bfloat16"
    return_lse: bool = False

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "parts": Range(1, 64),
        "num_heads": Range(1, 128),
        "dim": Range(1, 1 << 16),
        "dtype": OneOf(FLOAT_DTYPES),
    }

    def dims(self) -> dict[str, int]:
        """Return M parts, H heads, D = dim and the LSE's width."""
        return {
            "M": self.parts,
            "H": self.num_heads,
            "D": self.dim,
            "L": self.num_heads if self.return_lse else 0,
        }


def _store_presence(spec: StoreLatentSpec) -> dict[str, bool]:
    return {"k_scale": formats.latent(spec.latent).needs_scale}


def _store_values(spec: StoreLatentSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    capacity = t["cache"].shape[0] * spec.page
    yield from check.below("slots", t["slots"], capacity, "the cache's tokens")
    yield from check.distinct("slots", t["slots"], ignore=spec.dump_slot)
    yield from check.no_overlap(t, written="cache", read=("kv_c", "k_pe", "slots", "k_scale"))


@operator(
    spec=StoreLatentSpec,
    args={
        "kv_c": Arg(("bfloat16", "float32"), ">=T kv_rank"),
        "k_pe": Arg(("bfloat16", "float32"), ">=T pe_dim"),
        "slots": Arg("int64", "T", strided="any"),
        "cache": Arg("uint8", "pages page_bytes", mutated=True),
        "k_scale": Arg("float32", "1"),
    },
    presence=_store_presence,
    values=_store_values,
)
def store_latent(
    kv_c: Tensor, k_pe: Tensor, slots: Tensor, cache: Tensor, k_scale: Tensor | None = None
) -> None:
    """Quantise the latent of T tokens and write each into its cache slot.

    Args:
        kv_c: ``[>=T, 512]`` bf16 or float32, the normalised latent; extra rows are ignored.
        k_pe: ``[>=T, 64]``, the shared key part, neither normalised nor rotated.
        slots: ``[T]`` int64, ``page * P + offset`` in this cache view; negative: the token is skipped.
        cache: ``[pages, page_bytes]`` uint8, written in place; ``stride(0)`` is free.
        k_scale: ``[1]`` float32 dequantisation factor, required by ``latent.fp8.*.tensor``, else refused.

    Edge rules: slot 0 is an ordinary slot. No byte outside the named slots changes. A slot at or beyond
    ``pages * P`` writes nothing. Two live rows with one slot: each of its bytes is of either; an error in
    checked mode unless the slot is ``Spec.dump_slot``.

    Source: HF ``KimiK3GatedMLA``; vLLM ``concat_and_cache_mla``; byte layouts in ``docs/formats.md``.
    """


def _mla_presence(spec: SparseMLASpec) -> dict[str, bool]:
    positional = spec.index_space != "slot"
    return {
        "k_scale": formats.latent(spec.latent).needs_scale,
        "q_scale": spec.q_dtype != "bfloat16",
        "index_len": spec.has_index_len,
        "block_table": positional,
        "row_req": positional,
    }


def _mla_values(spec: SparseMLASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from check.outputs_apart(t, outputs=("out", "lse_out"))
    index = t["indices"].long()
    live = index >= 0
    if t.get("index_len") is not None:
        yield from check.between("index_len", t["index_len"], 0, index.shape[1] + 1)
        live &= index.new_ones(index.shape).cumsum(1) <= t["index_len"][:, None]
    if spec.index_space == "slot":
        yield from check.below("indices", index[live], t["cache"].shape[0] * spec.page, "the cache's tokens")
    else:
        yield from _table_values(spec, index, live, t)


def _table_values(spec: SparseMLASpec, index: Any, live: Any, t: Mapping[str, Any]) -> Iterator[str]:
    """Check positions and the block-table entries that they name; ``live`` says which indices count."""
    table, row_req = t["block_table"], t["row_req"]
    yield from check.row_requests(live.any(1), row_req, table.shape[0])
    tokens, place = table.shape[1] * spec.page, index
    if spec.index_space == "position":
        place = ownership.local(index, spec.dcp)
    beyond = index[live & (place >= tokens)]
    if beyond.numel():
        yield f"indices holds {int(beyond.max())}, beyond the block table's tokens ({tokens} a rank)"
    if spec.index_space == "position":
        live = live & (ownership.owner(index, spec.dcp) == spec.dcp.rank)
    yield from check.table_pages(live, place, row_req, table, spec.page, t["cache"].shape[0])


@operator(
    spec=SparseMLASpec,
    args={
        "q": Arg("spec.q_dtype", "T H D"),
        "cache": Arg("uint8", "pages page_bytes"),
        "indices": Arg("int32", "T <=topk"),
        "k_scale": Arg("float32", "1"),
        "q_scale": Arg("float32", "1"),
        "index_len": Arg("int32", "T", strided="any"),
        "block_table": Arg("int32", "R blocks"),
        "row_req": Arg("int32", "T", strided="any"),
    },
    outs=(Out("spec.out_dtype", "T H V", "out"), Out("float32", "T L", "lse_out")),
    presence=_mla_presence,
    values=_mla_values,
)
def sparse_mla(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    index_len: Tensor | None = None,
    block_table: Tensor | None = None,
    row_req: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from T query rows to the cache rows that each row's indices name.

    ``P = scale · (q · K[idx]ᵀ)``; ``out = softmax(P) @ K[idx][:, :512]``; ``lse = ln Σ exp(P)``, all in at
    least float32, with ``scale = softmax_scale`` times ``q_scale`` where q is FP8.

    Args:
        q: ``[T, H, 576]`` absorbed query, ``[nope 512 | pe 64]``; H is the heads of this call (under DCP
            the whole group's).
        cache: ``[pages, page_bytes]`` uint8 in ``Spec.latent``.
        indices: ``[T, k]`` int32, ``k <= Spec.topk``, by ``Spec.index_space``: ``"slot"`` physical slots of
            this cache view, ``"position"`` global positions, ``"local"`` positions on this rank.
        k_scale: ``[1]`` float32, as in ``store_latent``.
        q_scale: ``[1]`` float32, required with FP8 queries, refused with bf16.
        index_len: ``[T]`` int32, only the leading entries count; clamped to ``[0, k]``.
        block_table: ``[R, blocks]`` int32 pages of each request, for positions and local positions.
        row_req: ``[T]`` int32 request of each row; not read for a row without a live index.

    Returns:
        ``out [T, H, 512]`` in ``Spec.out_dtype`` and ``lse [T, H]`` float32, natural log (``[T, 0]`` without
        ``return_lse``).

    Edge rules: a negative index may stand anywhere in a row and is never dereferenced; one beyond the cache
    or the block table contributes nothing; with ``"position"`` so does one that this rank does not own.
    Duplicates count as often as given. A row with no key gives 0 and −inf, whatever its q and ``k_scale``
    hold, and so does one whose logits are all −inf. A NaN in a selected key makes that row's out and lse NaN;
    no other byte reaches a result. Infinities follow IEEE arithmetic: one logit of +inf gives lse +inf and a
    NaN out, a logit of −inf weighs 0. No finite logit is ever taken for a sentinel. T = 0 and k = 0 are legal.

    Source: FlashMLA ``tests/ref.py``; rules 3 and 4 of ``docs/contract.md``.
    """


def _merge_values(spec: MergeSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from check.outputs_apart(t, outputs=("out", "lse_out"), may_alias={"out": "outs"})
    out = t.get("out")
    if out is not None and not check.same_place(out, t["outs"][0]) and check.overlaps(out, t["outs"]):
        yield "out overlaps outs without being outs[0]"


@operator(
    spec=MergeSpec,
    args={"outs": Arg("spec.dtype", "M T H D"), "lses": Arg("float32", "M T H")},
    outs=(Out("spec.dtype", "T H D", "out", alias="outs"), Out("float32", "T L", "lse_out")),
    values=_merge_values,
)
def merge_attn_states(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine M partial attention results over disjoint keys by their log-sum-exp.

    ``m = max lse``, ``w = exp(lse − m)``, ``out = Σ w·o / Σ w``, ``lse = m + ln Σ w``.

    Args:
        outs: ``[M, T, H, D]``, any ``stride(0)``.
        lses: ``[M, T, H]`` float32, natural log.

    Returns:
        ``out [T, H, D]`` (may share storage with ``outs[0]``) and ``lse [T, H]`` (``[T, 0]`` without
        ``return_lse``).

    Edge rules: a part whose LSE is −inf, +inf or NaN is empty, whatever its output holds. All parts empty
    gives 0 and −inf. A finite LSE is never clamped, and its NaN output propagates even where its weight
    underflows to 0.

    Source: vLLM ``v1/attention/ops/dcp.py``; rule 3 of ``docs/contract.md``.
    """
