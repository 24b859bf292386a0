"""Composites: whole steps of a layer, each with a Spec, made of the operators unless a vendor fuses one.

What a composite is made of is data (``part_specs``): so its automatic implementation can plan the parts, and
the reference can compute them. Its answer is that of the parts; a fused kernel is held to the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kimi_hal import formats
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.errors import ContractError, nearest, unknown
from kimi_hal.ops import sequences
from kimi_hal.ops import values as check
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import ownership

if TYPE_CHECKING:
    from torch import Tensor

AnySpec = TypeVar("AnySpec", bound=Spec)

#: Whatever an implementation made of the checkpoint's tensors (``plan.weights``); only it knows them.
_WEIGHTS = Arg("*", "*", many=True, strided="any")


@dataclass(frozen=True)
class Part:
    """One operator inside a composite, as it is planned."""

    operator: str
    spec: Spec
    limits: Limits | None


def _admitting(spec: AnySpec, composite: Spec) -> AnySpec:
    """Return a part's Spec that also admits the classes of rounding that the composite's Spec admits."""
    both = (*spec.numerics, *(name for name in composite.numerics if name not in spec.numerics))
    return dataclasses.replace(spec, numerics=both)


# --- dsa_decode -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DSASpec(Spec):
    """``dsa_decode``: the Specs of its parts, and how heads are given back over a group.

    Args:
        query: of the index query.
        indexer: of the selection, local to this rank.
        attn: of the attention. ``num_heads`` is the whole group's: ``dcp.world`` times this rank's.
        merge: of the merge of selections; given exactly where index keys are sharded.
        head_exchange: ``"a2a"``: each rank sends the others their heads. ``"ag_rs"``: every part is
            gathered whole. The answer is the same.
    """

    query: IndexQuerySpec
    indexer: IndexerTopKSpec
    attn: SparseMLASpec
    merge: TopKMergeSpec | None = None
    head_exchange: str = "a2a"

    DOMAIN: ClassVar[Mapping[str, Domain]] = {"head_exchange": OneOf(("a2a", "ag_rs"))}

    @property
    def dcp(self) -> DCP:
        """Return how positions are spread over the group."""
        return self.attn.dcp

    @property
    def sharded_index(self) -> bool:
        """Tell whether each rank holds only its own index keys, so that selections are merged."""
        return self.dcp.world > 1 and self.dcp.index == "sharded"

    @property
    def heads(self) -> int:
        """Return the attention heads of this rank."""
        return self.attn.num_heads // self.dcp.world

    @property
    def q_dtype(self) -> str:
        """Return the dtype of q."""
        return self.attn.q_dtype

    @property
    def out_dtype(self) -> str:
        """Return the dtype of out."""
        return self.attn.out_dtype

    def problems(self) -> Iterator[str]:
        """Yield parts that do not fit together."""
        yield from self._equal("index", query=self.query.index, indexer=self.indexer.index)
        yield from self._equal("num_heads", query=self.query.num_heads, indexer=self.indexer.num_heads)
        yield from self._equal("head_dim", query=self.query.head_dim, indexer=self.indexer.head_dim)
        weights = {"query": self.query.weights_dtype, "indexer": self.indexer.weights_dtype}
        yield from self._equal("weights_dtype", **weights)
        yield from self._equal("topk", indexer=self.indexer.topk, attn=self.attn.topk)
        yield from self._equal("dcp", indexer=self.indexer.dcp, attn=self.attn.dcp)
        if self.attn.num_heads % self.dcp.world:
            yield f"attn.num_heads={self.attn.num_heads} is not a multiple of dcp.world={self.dcp.world}"
        if self.indexer.emit != "local":
            yield f"indexer.emit={self.indexer.emit!r}: dsa_decode translates positions itself; use 'local'"
        if self.dcp.world > 1 and not self.attn.return_lse:
            yield "attn.return_lse=False: over a group the parts are merged by their LSE; use True"
        yield from self._merge_problems() if self.sharded_index else self._whole_problems()

    def _merge_problems(self) -> Iterator[str]:
        if self.merge is None:
            yield f"merge is missing: dcp.world={self.dcp.world} shards the index keys"
            return
        yield from self._equal("topk", indexer=self.indexer.topk, merge=self.merge.topk)
        yield from self._equal("score", indexer=self.indexer.score, merge=self.merge.score)
        yield from self._equal("dcp", attn=self.attn.dcp, merge=self.merge.dcp)
        if not self.indexer.return_selected:
            yield "indexer.return_selected=False: the merge takes the selected scores; use True"
        if self.attn.index_space != "local":
            yield f"attn.index_space={self.attn.index_space!r}: the merge gives local positions; use 'local'"
        if not self.attn.has_index_len:
            yield "attn.has_index_len=False: the merge counts this rank's winners; use True"

    def _whole_problems(self) -> Iterator[str]:
        if self.merge is not None:
            yield "merge is given, but every rank selects from all index keys: leave it out"
        if self.attn.index_space != "position":
            wrong = self.attn.index_space
            yield f"attn.index_space={wrong!r}: the selection is of global positions; use 'position'"
        if self.attn.has_index_len:
            yield "attn.has_index_len=True: a selection ends with its first -1; use False"

    @staticmethod
    def _equal(field: str, **parts: object) -> Iterator[str]:
        (one, first), (other, second) = parts.items()
        if first != second:
            yield f"{one}.{field}={first!r} is not {other}.{field}={second!r}"

    def dims(self) -> dict[str, int]:
        """Return H heads of this rank, D, V, the LSE's width L, the indexer's Hi and Di, bytes of pages."""
        index, latent = formats.index(self.indexer.index), formats.latent(self.attn.latent)
        return {
            "H": self.heads,
            "D": self.attn.kv_rank + self.attn.pe_dim,
            "V": self.attn.kv_rank,
            "L": self.heads if self.attn.return_lse else 0,
            "Hi": self.indexer.num_heads,
            "Di": self.indexer.head_dim,
            "latent_page_bytes": self.attn.page * latent.row_bytes,
            "index_page_bytes": index.page_bytes,
        }


def _dsa_parts(spec: DSASpec, limits: Limits | None) -> Iterator[Part]:
    index_limits = limits and _index_limits(spec, limits)
    yield Part("quantize_index_query", _admitting(spec.query, spec), limits)
    yield Part("indexer_topk", _admitting(spec.indexer, spec), index_limits)
    if spec.merge is not None:
        yield Part("topk_merge", _admitting(spec.merge, spec), limits)
    yield Part("sparse_mla", _admitting(spec.attn, spec), limits)
    if spec.dcp.world > 1:
        merge = MergeSpec(
            parts=spec.dcp.world,
            num_heads=spec.heads,
            dim=spec.attn.kv_rank,
            dtype=spec.out_dtype,
            return_lse=True,
        )
        yield Part("merge_attn_states", _admitting(merge, spec), limits)


def _index_limits(spec: DSASpec, limits: Limits) -> Limits:
    """Return the indexer's Limits: the table width that the composite's Limits give counts latent pages."""
    width = limits.block_table_width
    if width is not None:
        width = -(-width * spec.attn.page // formats.index(spec.indexer.index).page)
    return dataclasses.replace(limits, block_table_width=width, num_pages=None)


def _dsa_presence(spec: DSASpec) -> dict[str, bool]:
    return {
        "k_scale": formats.latent(spec.attn.latent).needs_scale,
        "q_scale": spec.q_dtype != "bfloat16",
    }


def _dsa_values(spec: DSASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from check.outputs_apart(t, outputs=("out", "lse_out"))
    yield from check.between("row_len", t["row_len"], 0, 1 << 31)
    tables = {
        "latent": (spec.attn.page, spec.dcp),
        "index": (formats.index(spec.indexer.index).page, ownership.of_keys(spec.dcp)),
    }
    for kind, (page, dcp) in tables.items():
        yield from _table_values(t, kind, page, ownership.local_length(t["row_len"].long(), dcp))
    requests = min(t["latent_table"].shape[0], t["index_table"].shape[0])
    yield from check.row_requests(t["row_len"] > 0, t["row_req"], requests)


def _table_values(t: Mapping[str, Any], kind: str, page: int, keys: Any) -> Iterator[str]:
    """Check the entries of one table that rows with ``keys [T]`` keys on this rank can read."""
    table, cache = t[f"{kind}_table"], t[f"{kind}_cache"]
    room, longest = table.shape[1] * page, int(keys.max()) if keys.numel() else 0
    if longest > room:
        yield f"row_len asks for {longest} keys on this rank, beyond {kind}_table's tokens ({room})"
    first = keys.new_tensor(range(0, min(longest, room), page)).expand(keys.shape[0], -1)
    name = f"{kind}_table"
    yield from check.table_pages(
        first < keys[:, None], first, t["row_req"], table, page, cache.shape[0], name=name
    )


@operator(
    spec=DSASpec,
    args={
        "q": Arg("spec.q_dtype", "T H D"),
        "index_q": Arg(("bfloat16", "float32"), "T Hi Di"),
        "index_w": Arg(("bfloat16", "float32"), "T Hi"),
        "latent_cache": Arg("uint8", "latent_pages latent_page_bytes"),
        "index_cache": Arg("uint8", "index_pages index_page_bytes"),
        "latent_table": Arg("int32", "R latent_blocks"),
        "index_table": Arg("int32", "R index_blocks"),
        "row_req": Arg("int32", "T", strided="any"),
        "row_len": Arg("int32", "T", strided="any"),
        "k_scale": Arg("float32", "1"),
        "q_scale": Arg("float32", "1"),
    },
    outs=(Out("spec.out_dtype", "T H V", "out"), Out("float32", "T L", "lse_out")),
    presence=_dsa_presence,
    values=_dsa_values,
    parts=("quantize_index_query", "indexer_topk", "topk_merge", "sparse_mla", "merge_attn_states"),
    grouped=True,
)
def dsa_decode(
    q: Tensor,
    index_q: Tensor,
    index_w: Tensor,
    latent_cache: Tensor,
    index_cache: Tensor,
    latent_table: Tensor,
    index_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the best keys of T query rows and attend to them; over a group, each rank on its own shard.

    ``quantize_index_query`` → ``indexer_topk`` → ``topk_merge`` (sharded index keys) → gather of the group's
    query heads → ``sparse_mla`` over this rank's winners → exchange of heads → ``merge_attn_states``. The
    three steps of the group are left out where ``dcp.world`` is 1. The stores come before this call: the
    row's own token must already be in both caches.

    Args:
        q: ``[T, H, 576]`` absorbed query of this rank's heads, H = ``attn.num_heads / dcp.world``.
        index_q: ``[T, Hi, 128]`` bf16 or float32 index query, before quantisation; the same on every rank.
        index_w: ``[T, Hi]`` its head weights, before folding.
        latent_cache: ``[pages, page_bytes]`` uint8 in ``attn.latent``, pages of ``attn.page`` tokens.
        index_cache: ``[pages, page_bytes]`` uint8 in ``indexer.index``.
        latent_table: ``[R, blocks]`` int32, in pages of ``latent_cache``.
        index_table: ``[R, blocks]`` int32, in pages of ``index_cache``.
        row_req: ``[T]`` int32 request of each row; not read where ``row_len <= 0``.
        row_len: ``[T]`` int32 exclusive key bound in global positions, also under DCP.
        k_scale: ``[1]`` float32, as in ``store_latent``.
        q_scale: ``[1]`` float32, required with FP8 queries, refused with bf16.

    Returns:
        ``out [T, H, 512]`` in ``attn.out_dtype`` and ``lse [T, H]`` float32 over all selected keys of all
        ranks, natural log (``[T, 0]`` without ``attn.return_lse``).

    Edge rules: those of the parts. A row with ``row_len <= 0`` gives 0 and −inf. Any number of ranks gives
    the selection of one, and its output within rounding. Over a group a NaN in a selected key makes its own
    rank's part empty, since ``merge_attn_states`` drops an LSE of NaN; on one rank it propagates.

    Source: vLLM ``model_executor/layers/sparse_attn_indexer.py`` and ``v1/attention/ops/dcp.py``.
    """


# --- kda_layer_decode -----------------------------------------------------------------------------------


def _kda_parts(spec: KDASpec, limits: Limits | None) -> Iterator[Part]:
    own = dataclasses.replace(spec, checkpoints=False)
    of_one_row = limits and dataclasses.replace(
        limits, max_reqs=limits.max_rows, rows_per_req=1, uniform=True
    )
    yield Part("kda_conv", own, of_one_row)
    yield Part("kda_decode", own, of_one_row)


def _kda_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    ids = t["state_ids"].tolist()
    yield from sequences.slots("state_ids", ids, [True] * len(ids), t["state"].shape[0])
    yield from check.outputs_apart(t, outputs=("out",))
    read = ("x", "raw_g", "raw_beta", "out_gate", "state_ids")
    yield from check.no_overlap(t, written="conv_state", read=(*read, "state"))
    yield from check.no_overlap(t, written="state", read=read)


@operator(
    spec=KDASpec,
    args={
        "x": Arg("bfloat16", "T C"),
        "raw_g": Arg("spec.gate_dtype", "T H K", strided="inner"),
        "raw_beta": Arg("spec.gate_dtype", "T H"),
        "out_gate": Arg(("bfloat16", "float32"), "T H V"),
        "weights": _WEIGHTS,
        "conv_state": Arg("bfloat16", "slots conv_rows conv_columns", mutated=True),
        "state": Arg("float32", "slots H V K", mutated=True, strided="inner"),
        "state_ids": Arg("int32", "T", strided="any"),
    },
    outs=(Out("bfloat16", "T H V", "out"),),
    values=_kda_values,
    parts=("kda_conv", "kda_decode"),
)
def kda_layer_decode(
    x: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    out_gate: Tensor,
    weights: list[Tensor],
    conv_state: Tensor,
    state: Tensor,
    state_ids: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run one token of T sequences through a KDA layer, between its input and its output projection.

    ``kda_conv`` of one row a sequence → ``kda_decode`` → RMSNorm over a head's 128 channels, times its
    weight, times ``sigmoid(out_gate)``.

    Args:
        x: ``[T, C]`` bf16 projected q, k and v, channels ``[q | k | v]``.
        raw_g: ``[T, H, K]`` bf16, or float32 g with ``gate="log"``.
        raw_beta: ``[T, H]`` bf16, or float32 beta with ``gate="log"``.
        out_gate: ``[T, H, V]`` bf16 or float32, before its sigmoid.
        weights: what ``plan.weights(conv=, A_log=, dt_bias=, norm=)`` of this plan returned: conv
            ``[C, 4]``, A_log ``[H]`` and dt_bias ``[H·K]`` float32 (both left out with ``gate="log"``), norm
            ``[V]``. The reference takes them in this order.
        conv_state: ``[slots, 3, C]`` or ``[slots, C, 3]`` bf16, in place.
        state: ``[slots, H, V, K]`` float32, value-major, in place.
        state_ids: ``[T]`` int32 slot of each row; negative: the row is padding.

    Returns:
        ``o [T, H, V]`` bf16.

    Numerics: q, k and v are rounded to bf16 after the convolution, as ``kda_conv`` returns them, so that
    decoding and verifying advance a state alike. An implementation may round the recurrence's output to
    bf16 before the norm; the reference does not.

    Edge rules: a padding row, or one whose slot is out of range, gives zeros and touches no state, whatever
    its operands hold. ``Spec.checkpoints`` and ``Spec.num_layers`` mean nothing here. T = 0 is legal.

    Source: vLLM ``ops.fused_kda_decode`` (``models/kimi_k3/nvidia/kda.py``); HF ``KimiK3``'s gated norm.
    """


# --- moe_layer ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayerSpec(Spec):
    """``moe_layer``: the Specs of router and experts, the widths around them, and the ranks that share them.

    Args:
        route: of the router.
        experts: of this rank's experts: under tensor parallelism all of them with ``intermediate`` / tp
            columns, under expert parallelism ``num_local`` of them.
        model_dim: width of x and y.
        shared_intermediate: width of the shared experts together, over all ranks; 0 = none.
        norm_eps: of the RMSNorm between experts and up-projection.
        tp: ranks whose partial sums make the result, the group's size.
    """

    route: RouteSpec
    experts: MoESpec
    model_dim: int = 7168
    shared_intermediate: int = 6144
    norm_eps: float = 1e-5
    tp: int = 1

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "model_dim": Range(1, 1 << 16),
        "shared_intermediate": Range(0, 1 << 20),
        "norm_eps": Range(0, 1),
        "tp": Range(1, 64),
    }

    @property
    def shared(self) -> int:
        """Return this rank's share of the shared experts' width."""
        return self.shared_intermediate // self.tp

    def problems(self) -> Iterator[str]:
        """Yield parts that do not fit together."""
        for field in ("num_experts", "topk"):
            one, other = getattr(self.route, field), getattr(self.experts, field)
            if one != other:
                yield f"route.{field}={one} is not experts.{field}={other}"
        if self.shared_intermediate % self.tp:
            yield f"shared_intermediate={self.shared_intermediate} is not a multiple of tp={self.tp}"
        if self.experts.has_expert_map:
            yield "experts.has_expert_map=True: moe_layer takes no map; use expert_offset and num_local"
        if self.tp == 1 and self.experts.num_local != self.experts.num_experts:
            missing = self.experts.num_experts - self.experts.num_local
            yield f"tp=1, but {missing} of {self.experts.num_experts} experts are on other ranks"

    def dims(self) -> dict[str, int]:
        """Return M, the width of x."""
        return {"M": self.model_dim}


def _moe_parts(spec: MoELayerSpec, limits: Limits | None) -> Iterator[Part]:
    yield Part("moe_route", _admitting(spec.route, spec), limits)
    yield Part("moe_experts", _admitting(spec.experts, spec), limits)


def _moe_values(spec: MoELayerSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    if t.get("num_tokens") is not None:
        yield from check.between("num_tokens", t["num_tokens"], 0, t["x"].shape[0] + 1)
    yield from check.outputs_apart(t, outputs=("out",))


@operator(
    spec=MoELayerSpec,
    args={
        "x": Arg("bfloat16", "T M"),
        "weights": _WEIGHTS,
        "num_tokens": Arg("int32", "1"),
    },
    outs=(Out("bfloat16", "T M", "out"),),
    values=_moe_values,
    parts=("moe_route", "moe_experts"),
    grouped=True,
)
def moe_layer(
    x: Tensor,
    weights: list[Tensor],
    num_tokens: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run T rows through a latent mixture of experts, with its projections, norm and shared experts.

    ``logits = x·gateᵀ`` in float32 → ``moe_route`` → ``z = x·downᵀ`` → ``moe_experts`` → sum over the group,
    in rank order → ``RMSNorm(·)·norm`` → ``·upᵀ`` → plus the shared experts of x, ``act(x·w1ᵀ, x·w3ᵀ)·w2ᵀ``
    with the experts' activation, summed over the group. The sum stands before the norm, so that it cannot be
    left to the caller: without a group ``tp`` is 1.

    Args:
        x: ``[T, M]`` bf16, the same rows on every rank.
        weights: what ``plan.weights(gate=, bias=, down=, up=, norm=, shared_w13=, shared_w2=, w13=,
            w13_scale=, w2=, w2_scale=)`` of this plan returned: gate ``[E, M]``, bias ``[E]`` float32, down
            ``[Hid, M]``, up ``[M, Hid]``, norm ``[Hid]``, shared_w13 ``[2·S, M]`` (this rank's S gate rows,
            then its S up rows), shared_w2 ``[M, S]``, and the experts as ``prepare_moe_weights`` takes them;
            S = ``shared_intermediate / tp``. The reference takes the first seven in this order, then its
            prepared experts. Weights that are not MXFP4 are bf16 or float32.
        num_tokens: ``[1]`` int32; rows from it on are padding, whatever they hold. Clamped to ``[0, T]``.

    Returns:
        ``y [T, M]`` bf16, complete on every rank, with the same bits.

    Numerics: an implementation may round z, the norm's result, the shared experts' activation and each
    rank's partial sum to bf16; the reference rounds none. The group's sum is in float32, in rank order.

    Edge rules: a padded row gives zeros. A row without a live expert gives the shared experts alone. T = 0
    is legal.

    Source: HF ``KimiK3MoE``; vLLM ``models/kimi_k3/nvidia/model.py``.
    """


PARTS: Mapping[str, Callable[[Any, Limits | None], Iterator[Part]]] = {
    "dsa_decode": _dsa_parts,
    "kda_layer_decode": _kda_parts,
    "moe_layer": _moe_parts,
}


def part_specs(composite: str, spec: Any, limits: Limits | None = None) -> dict[str, Part]:
    """Return the parts of a composite by operator name, in the order in which they run.

    Args:
        composite: ``"dsa_decode"``, ``"kda_layer_decode"`` or ``"moe_layer"``.
        spec: its Spec.
        limits: its Limits; ``None`` gives parts without Limits.

    Raises:
        UnknownNameError: no such composite; names the nearest.
    """
    if composite not in PARTS:
        raise unknown("composite", composite, PARTS)
    return {part.operator: part for part in PARTS[composite](spec, limits)}


def weight_names(composite: str, spec: Any) -> tuple[str, ...]:
    """Return the names under which ``plan.weights`` of a composite takes the checkpoint's tensors, in order.

    ``dsa_decode`` takes none. The last four of ``moe_layer`` are what ``prepare_moe_weights`` takes.
    """
    if composite == "kda_layer_decode":
        return ("conv", "A_log", "dt_bias", "norm") if spec.gate == "raw" else ("conv", "norm")
    if composite == "moe_layer":
        dense = ("gate", "bias", "down", "up", "norm", "shared_w13", "shared_w2")
        return (*dense, "w13", "w13_scale", "w2", "w2_scale")
    return ()


def ordered_weights(
    composite: str, spec: Any, checkpoint: Mapping[str, Any], prepare: Callable[..., list[Any]]
) -> list[Any]:
    """Return the checkpoint's tensors of a composite in their order.

    Args:
        composite: its name.
        spec: its Spec.
        checkpoint: tensors by ``weight_names``.
        prepare: gets the experts' four tensors by name; what it returns stands in their place.

    Raises:
        ContractError: names that are missing or not known, all together.
    """
    names = weight_names(composite, spec)
    reasons = [f"weights need {name}=" for name in names if name not in checkpoint]
    reasons += [f"weights take no {name}={nearest(name, names)}" for name in checkpoint if name not in names]
    if reasons:
        raise ContractError(composite, reasons)
    if composite != "moe_layer":
        return [checkpoint[name] for name in names]
    dense, experts = names[:-4], names[-4:]
    return [*(checkpoint[name] for name in dense), *prepare(**{name: checkpoint[name] for name in experts})]
