"""Calls of every operator with a dimension of size 0, and what the reference makes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kda_cases import Layer, Rows, cuts, flags, ids
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec

#: A Spec and operands by name, with ``plan`` for what depends on the implementation (records, weights).
Case = tuple[str, Spec, Callable[[Callable[..., Any]], dict[str, Any]]]

LIMITS = Limits(max_rows=8, max_reqs=4, rows_per_req=2, row_buckets=(0, 2, 8))
KDA = KDASpec(num_heads=2, head_dim=4, checkpoints=True)
PLAIN = KDASpec(num_heads=2, head_dim=4)
INDEX, FP8 = "index.fp8.e4m3fn.f32.page64", "latent.fp8.e4m3fn.tensor"
EXPERTS = MoESpec(num_experts=4, num_local=2, topk=2, hidden=64, intermediate=32, out_dtype="float32")


def some(rows: int, *shape: int) -> Tensor:
    """Return random bfloat16 rows."""
    return torch.randn(rows, *shape).bfloat16()


def indexed(T: int = 8, R: int = 2, columns: int = 2, pages: int = 3) -> dict[str, Any]:
    """Return operands of index scores."""
    return {
        "q": torch.randn(T, 1, 128).to(torch.float8_e4m3fn),
        "q_scale": torch.zeros(T, 1, 0, dtype=torch.uint8),
        "weights": torch.rand(T, 1),
        "cache": torch.zeros(pages, formats.index(INDEX).page_bytes, dtype=torch.uint8),
        "block_table": torch.zeros(R, columns, dtype=torch.int32),
        "row_req": torch.zeros(T, dtype=torch.int32),
        "row_len": torch.full((T,), 100, dtype=torch.int32),
    }


def attended(
    latent: str, T: int = 8, k: int = 3, R: int | None = None, blocks: int = 2, pages: int = 3
) -> dict[str, Any]:
    """Return operands of attention: slots, or local positions where there are requests."""
    found = {
        "q": some(T, 1, 576),
        "cache": torch.zeros(pages, 4 * formats.latent(latent).row_bytes, dtype=torch.uint8),
        "indices": torch.arange(k, dtype=torch.int32).expand(T, k).contiguous(),
        "k_scale": torch.ones(1) if formats.latent(latent).needs_scale else None,
    }
    if R is not None:
        table = torch.zeros(R, blocks, dtype=torch.int32)
        found |= {"block_table": table, "row_req": torch.zeros(T, dtype=torch.int32)}
    return found


def attention(latent: str, index_space: str = "slot") -> SparseMLASpec:
    """Return the Spec of ``attended``."""
    return SparseMLASpec(
        num_heads=1, latent=latent, page=4, topk=4, index_space=index_space, out_dtype="float32"
    )


def gates(spec: KDASpec, rows: Rows) -> dict[str, Any]:
    """Return the operands of a gate."""
    layer = Layer.random(spec)
    return {
        "raw_g": rows.raw_g,
        "raw_beta": rows.raw_beta,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
    }


def cut(N: int, T: int, slots: int, *, checkpoints: bool) -> dict[str, Any]:
    """Return how T rows are cut into N sequences, each with a checkpoint in front of its first row."""
    lengths = [T // N + (n < T % N) for n in range(N)] if N else []
    found = {"state_ids": torch.arange(N, dtype=torch.int32), "cu_seqlens": cuts(*lengths)}
    if checkpoints:
        found |= {
            "has_initial_state": flags(*[True] * N),
            "checkpoint_offsets": ids(*[0] * N),
            "checkpoint_ids": ids(*[slots - 1 - n for n in range(N)]),
        }
    return found


def convolved(spec: KDASpec, T: int = 8, N: int = 2, slots: int = 4) -> dict[str, Any]:
    """Return operands of a convolution."""
    layer = Layer.random(spec)
    own = {
        "x": Rows.random(spec, T).x,
        "weight": layer.weight,
        "conv_state": layer.conv_pool(4)[:slots],
    }
    return own | cut(N, T, slots, checkpoints=spec.checkpoints)


def prefilled(spec: KDASpec, T: int = 8, N: int = 2, slots: int = 4) -> dict[str, Any]:
    """Return operands of a prefill."""
    rows = Rows.random(spec, T)
    own = {"q": rows.q, "k": rows.k, "v": rows.v, "state": Layer.random(spec).pool(4)[:slots]}
    return own | gates(spec, rows) | cut(N, T, slots, checkpoints=spec.checkpoints)


def decoded(T: int = 8, slots: int = 8) -> dict[str, Any]:
    """Return operands of a decode."""
    rows = Rows.random(PLAIN, T)
    own = {"q": rows.q, "k": rows.k, "v": rows.v, "state": Layer.random(PLAIN).pool(8)[:slots]}
    return own | gates(PLAIN, rows) | {"state_ids": torch.arange(T, dtype=torch.int32)}


def verified(plan: Callable[..., Any], T: int = 8, N: int = 4, slots: int = 4) -> dict[str, Any]:
    """Return operands of a verify; records are 0 and compared where no sequence may write them."""
    rows, layer = Rows.random(PLAIN, T), Layer.random(PLAIN)
    own = {"x": rows.x, "weight": layer.weight, "conv_state": layer.conv_pool(4)[:slots]}
    records = torch.zeros(4, plan("kda_verify", PLAIN).records_bytes, dtype=torch.uint8)
    state = {"state": layer.pool(4)[:slots], "records": records}
    return own | gates(PLAIN, rows) | state | cut(N, T, slots, checkpoints=False)


def committed(plan: Callable[..., Any], N: int = 2, slots: int = 4) -> dict[str, Any]:
    """Return operands of a commit."""
    layer = Layer.random(PLAIN)
    return {
        "conv_states": [layer.conv_pool(4)[:slots]],
        "states": [layer.pool(4)[:slots]],
        "records": [torch.zeros(4, plan("kda_verify", PLAIN).records_bytes, dtype=torch.uint8)],
        "A_logs": [layer.A_log],
        "dt_biases": [layer.dt_bias],
        "state_ids": torch.arange(N, dtype=torch.int32),
        "accepted": torch.ones(N, dtype=torch.int32),
    }


def routed(plan: Callable[..., Any]) -> dict[str, Any]:
    """Return operands of experts on no rows."""
    fmt, sizes = formats.experts(EXPERTS.weights), ((64, 64), (64, 32))
    checkpoint = [t for out, width in sizes for t in fmt.encode(torch.randn(2, out, width))]
    return {
        "x": some(0, 64),
        "topk_weights": torch.zeros(0, 2),
        "topk_ids": torch.zeros(0, 2, dtype=torch.int32),
        "weights": plan("prepare_moe_weights", EXPERTS).run(*checkpoint),
    }


def always(operands: Callable[[], dict[str, Any]]) -> Callable[[Callable[..., Any]], dict[str, Any]]:
    """Return operands that depend on no implementation."""
    return lambda plan: operands()


def rows_of_scores(T: int, L: int) -> dict[str, Any]:
    """Return operands of a selection."""
    return {"scores": torch.randn(T, L), "row_len": torch.full((T,), 5, dtype=torch.int32)}


_STORE_INDEX, _STORE_LATENT = StoreIndexSpec(index=INDEX), StoreLatentSpec(latent=FP8, page=4)
_SELECT = {
    emit: IndexerTopKSpec(index=INDEX, num_heads=1, topk=4, emit=emit, return_selected=True)
    for emit in ("local", "slot")
}


def _stored(T: int, pages: int) -> dict[str, Any]:
    cache = torch.full((pages, formats.index(INDEX).page_bytes), 7, dtype=torch.uint8)
    return {"k": some(8, 128), "slots": torch.arange(T), "cache": cache}


def _stored_latent(T: int, pages: int) -> dict[str, Any]:
    cache = torch.full((pages, 4 * formats.latent(FP8).row_bytes), 7, dtype=torch.uint8)
    own = {"kv_c": some(8, 512), "k_pe": some(8, 64), "slots": torch.arange(T), "cache": cache}
    return own | {"k_scale": torch.ones(1)}


#: By what is empty: calls that return nothing and write nothing.
IDLE: dict[str, Case] = {
    "quantize_index_query/T": (
        "quantize_index_query",
        IndexQuerySpec(index=INDEX, num_heads=1),
        always(lambda: {"q": some(0, 1, 128), "weights": torch.zeros(0, 1)}),
    ),
    "store_index_keys/T": ("store_index_keys", _STORE_INDEX, always(lambda: _stored(0, 2))),
    "store_index_keys/pages": ("store_index_keys", _STORE_INDEX, always(lambda: _stored(8, 0))),
    "indexer_logits/T": (
        "indexer_logits",
        IndexerSpec(index=INDEX, num_heads=1),
        always(lambda: indexed(T=0)),
    ),
    "indexer_topk/T": ("indexer_topk", _SELECT["slot"], always(lambda: indexed(T=0))),
    "topk_select/T": (
        "topk_select",
        TopKSpec(topk=4, return_selected=True),
        always(lambda: rows_of_scores(0, 6)),
    ),
    "store_latent/T": ("store_latent", _STORE_LATENT, always(lambda: _stored_latent(0, 2))),
    "store_latent/pages": ("store_latent", _STORE_LATENT, always(lambda: _stored_latent(8, 0))),
    "sparse_mla/T": ("sparse_mla", attention(FP8), always(lambda: attended(FP8, T=0))),
    "merge_attn_states/T": (
        "merge_attn_states",
        MergeSpec(parts=2, num_heads=1, dim=4, return_lse=True),
        always(lambda: {"outs": torch.zeros(2, 0, 1, 4).bfloat16(), "lses": torch.zeros(2, 0, 1)}),
    ),
    "kda_gate/T": ("kda_gate", PLAIN, always(lambda: gates(PLAIN, Rows.random(PLAIN, 0)))),
    "kda_conv/T": ("kda_conv", PLAIN, always(lambda: convolved(PLAIN, T=0))),
    "kda_conv/TN": ("kda_conv", KDA, always(lambda: convolved(KDA, T=0, N=0))),
    "kda_prefill/T": ("kda_prefill", PLAIN, always(lambda: prefilled(PLAIN, T=0))),
    "kda_prefill/TN": ("kda_prefill", KDA, always(lambda: prefilled(KDA, T=0, N=0))),
    "kda_decode/T": ("kda_decode", PLAIN, always(lambda: decoded(T=0))),
    "kda_verify/T": ("kda_verify", PLAIN, lambda plan: verified(plan, T=0)),
    "kda_commit/N": ("kda_commit", PLAIN, lambda plan: committed(plan, N=0)),
    "kda_commit/slots": ("kda_commit", PLAIN, lambda plan: committed(plan, slots=0)),
    "moe_route/T": (
        "moe_route",
        RouteSpec(num_experts=4, topk=2),
        always(lambda: {"logits": torch.zeros(0, 4), "bias": torch.zeros(4)}),
    ),
    "moe_experts/T": ("moe_experts", EXPERTS, routed),
    "topk_merge/T": (
        "topk_merge",
        TopKMergeSpec(dcp=DCP(), topk=4, return_global=True),
        always(
            lambda: {
                "scores": torch.zeros(0, 4),
                "indices": torch.zeros(0, 4, dtype=torch.int32),
                "row_len": ids(),
            }
        ),
    ),
}
#: By what is empty: calls that return or write something all the same.
BUSY: dict[str, Case] = {
    **{
        f"indexer_topk/{emit}/{'.'.join(sizes)}": (
            "indexer_topk",
            spec,
            always(lambda sizes=sizes: indexed(**dict.fromkeys(sizes, 0))),
        )
        for emit, spec in _SELECT.items()
        for sizes in (("R",), ("columns",), ("pages",), ("R", "columns", "pages"))
    },
    "topk_select/L": (
        "topk_select",
        TopKSpec(topk=4, return_selected=True),
        always(lambda: rows_of_scores(8, 0)),
    ),
    **{
        f"sparse_mla/{latent}/{'.'.join(sizes)}": (
            "sparse_mla",
            attention(latent),
            always(lambda latent=latent, sizes=sizes: attended(latent, **dict.fromkeys(sizes, 0))),
        )
        for latent in (FP8, "latent.bf16")
        for sizes in (("k",), ("pages",))
    },
    **{
        f"sparse_mla/{space}/{'.'.join(sizes)}": (
            "sparse_mla",
            attention("latent.bf16", space),
            always(lambda sizes=sizes: attended("latent.bf16", **({"R": 2} | dict.fromkeys(sizes, 0)))),
        )
        for space in ("position", "local")
        for sizes in (("R",), ("blocks",), ("pages",), ("k", "R", "blocks", "pages"))
    },
    "kda_conv/N": ("kda_conv", KDA, always(lambda: convolved(KDA, N=0))),
    "kda_conv/T-checkpoints": ("kda_conv", KDA, always(lambda: convolved(KDA, T=0))),
    "kda_conv/slots": ("kda_conv", KDA, always(lambda: convolved(KDA, slots=0))),
    "kda_prefill/N": ("kda_prefill", KDA, always(lambda: prefilled(KDA, N=0))),
    "kda_prefill/T-checkpoints": ("kda_prefill", KDA, always(lambda: prefilled(KDA, T=0))),
    "kda_prefill/slots": ("kda_prefill", KDA, always(lambda: prefilled(KDA, slots=0))),
    "kda_decode/slots": ("kda_decode", PLAIN, always(lambda: decoded(slots=0))),
    "kda_verify/N": ("kda_verify", PLAIN, lambda plan: verified(plan, N=0)),
    "kda_verify/slots": ("kda_verify", PLAIN, lambda plan: verified(plan, slots=0)),
    **{
        f"all_gather/{layout}": (
            "all_gather",
            GatherSpec(layout=layout, dtype="float32"),
            always(lambda: {"x": torch.zeros(0, 3)}),
        )
        for layout in ("rank_major", "token_order", "last_dim")
    },
}

#: By what is empty: calls of which no row has a key, so that what is returned may be anything.
ANYTHING: dict[str, Case] = {
    f"indexer_logits/{size}": (
        "indexer_logits",
        IndexerSpec(index=INDEX, num_heads=1),
        always(lambda size=size: indexed(**{size: 0})),
    )
    for size in ("R", "columns", "pages")
}


def copied(value: Any, device: str) -> Any:
    """Return an operand's own copy on a device, lists too."""
    if isinstance(value, list):
        return [copied(one, device) for one in value]
    return value.clone().to(device) if isinstance(value, Tensor) else value


def tensors(value: Any) -> list[Tensor]:
    """Return a value's tensors on the CPU."""
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors(one)]
    return [] if value is None else [value.cpu()]


def planned(implementation: str, device: str) -> Callable[..., Any]:
    """Return a function that plans an operator."""

    def plan(operator: str, spec: Spec) -> Any:
        pair = {"pair": plan("kda_verify", spec)} if operator == "kda_commit" else {}
        return hal.plan(operator, spec, LIMITS, device=device, implementation=implementation, **pair)

    return plan


def ran(case: Case, implementation: str, device: str) -> list[Tensor]:
    """Return what a call returns and what it leaves in what it mutates; of records only that they are there."""
    operator, spec, operands = case
    torch.manual_seed(7)
    plan = planned(implementation, device)
    given = {name: copied(value, device) for name, value in operands(plan).items()}
    returned = plan(operator, spec).run(**given)
    written = [given[name] for name in get(operator).mutated if name != "records"]
    return tensors(returned) + tensors(written)
