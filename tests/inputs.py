"""A small legal call of every operator: ``example("sparse_mla") -> Example(spec, limits, args, kwargs)``.

One rank, every operand that the Spec asks for, values that pass ``KIMI_HAL_CHECK=args``, results that are
finite. Operands are fresh at each call, so that a test may write them. Outputs are not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from composite_cases import DSACase, KDACase, MoECase
from index_cases import POW2, Index
from kda_cases import Layer, Rows, cuts, flags, ids
from latent_cases import FP8, Latents, queries

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.reference import sizes

LIMITS = Limits(max_rows=16, max_reqs=8, max_context=256, rows_per_req=4, uniform=False)
KDA = KDASpec(num_heads=2, head_dim=8, scale=8**-0.5, num_layers=2)
MOE = MoESpec(num_experts=4, num_local=4, topk=2, hidden=64, intermediate=32, out_dtype="float32")


class Example(NamedTuple):
    """One call: ``plan(op, spec, limits).run(*args, **kwargs)``."""

    spec: Spec
    limits: Limits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def example(operator: str, **variant: Any) -> Example:
    """Return a small call of an operator; the four of the indexer take ``index=``, a format's name."""
    spec, args, kwargs = CALLS[operator](**variant)
    return Example(spec, LIMITS, tuple(args), kwargs)


Call = tuple[Spec, list[Any], dict[str, Any]]
CALLS: dict[str, Callable[..., Call]] = {}


def call(make: Callable[..., Call]) -> Callable[..., Call]:
    """Register the call of the operator that a function is named after."""
    CALLS[make.__name__] = make
    return make


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@call
def quantize_index_query(index: str = POW2) -> Call:
    return (
        IndexQuerySpec(index=index, num_heads=4),
        [randn(3, 4, 128).bfloat16(), randn(3, 4, seed=1)],
        {},
    )


@call
def store_index_keys(index: str = POW2) -> Call:
    keys = Index([100], index)
    return StoreIndexSpec(index=index), [randn(4, 128), torch.tensor([5, -1, 64]), keys.cache], {}


def _scored(index: str) -> tuple[Index, list[Any]]:
    keys = Index([100, 7], index)
    return keys, [*keys.query(3), keys.cache, keys.table, ids(0, 1, 0), ids(100, 7, 0)]


@call
def indexer_logits(index: str = POW2) -> Call:
    keys, operands = _scored(index)
    return keys.spec(), operands, {}


@call
def indexer_topk(index: str = POW2) -> Call:
    keys, operands = _scored(index)
    return keys.topk_spec(16, ordered=True, return_selected=True), operands, {}


@call
def topk_select() -> Call:
    spec = TopKSpec(topk=4, return_selected=True, has_row_start=True)
    return spec, [randn(3, 20), ids(20, 3, 10), ids(0, 5, 10)], {}


@call
def topk_merge() -> Call:
    scores = randn(2, 4)
    indices = torch.tensor([[0, 3, 5, 9], [2, 1, -1, -1]], dtype=torch.int32)
    scores[indices < 0] = -torch.inf
    return TopKMergeSpec(dcp=DCP(), topk=4), [scores, indices, ids(10, 3)], {}


@call
def store_latent() -> Call:
    latents = Latents(FP8, pages=3)
    spec = StoreLatentSpec(latent=FP8, page=latents.page)
    return (
        spec,
        [randn(4, 512), randn(4, 64, seed=1), torch.tensor([3, -1, 20]), latents.cache, latents.k_scale],
        {},
    )


@call
def sparse_mla() -> Call:
    latents = Latents(FP8, pages=3)
    latents.fill(torch.arange(20))
    indices = torch.tensor([[0, 5, -1, 19], [-1, -1, -1, -1], [7, 7, 2, -1]], dtype=torch.int32)
    return latents.spec(2, topk=4), [queries(3, 2), latents.cache, indices, latents.k_scale], {}


@call
def merge_attn_states() -> Call:
    spec = MergeSpec(parts=2, num_heads=3, dim=16, return_lse=True)
    return spec, [randn(2, 4, 3, 16).bfloat16(), randn(2, 4, 3, seed=1)], {}


def _rows() -> tuple[Layer, Rows]:
    return Layer.random(KDA), Rows.random(KDA, 5)


@call
def kda_conv() -> Call:
    layer, rows = _rows()
    return KDA, [rows.x, layer.weight, layer.conv_pool(4), ids(2, 0), cuts(3, 2), flags(True, False)], {}


@call
def kda_gate() -> Call:
    layer, rows = _rows()
    return KDA, [rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias], {}


def _recurrent(layer: Layer, rows: Rows) -> list[Any]:
    return [rows.q, rows.k, rows.v, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias]


@call
def kda_prefill() -> Call:
    layer, rows = _rows()
    return KDA, [*_recurrent(layer, rows), layer.pool(4), ids(2, 0), cuts(3, 2), flags(True, False)], {}


@call
def kda_decode() -> Call:
    layer, rows = _rows()
    return KDA, [*_recurrent(layer, rows), layer.pool(6), ids(2, 0, -1, 5, 1)], {}


def records() -> torch.Tensor:
    """Return room for the records of the reference's layout."""
    return torch.zeros(2, sizes.records_bytes(KDA, LIMITS.rows_per_req), dtype=torch.uint8)


@call
def kda_verify() -> Call:
    layer, rows = _rows()
    gate = [rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias]
    pools = [layer.conv_pool(4), layer.pool(4)]
    return KDA, [rows.x, layer.weight, *gate, *pools, ids(2, 0), cuts(3, 2), records()], {}


@call
def kda_commit() -> Call:
    layer, rows = _rows()
    conv_states, states = [layer.conv_pool(4), layer.conv_pool(4)], [layer.pool(4), layer.pool(4)]
    written = [records(), records()]
    for conv_state, state, record in zip(conv_states, states, written, strict=True):
        layer.verify(rows, conv_state, state, ids(2, 0), cuts(3, 2), record)
    gate = [[layer.A_log] * 2, [layer.dt_bias] * 2]
    return KDA, [conv_states, states, written, *gate, ids(2, 0), ids(3, 1)], {}


@call
def moe_route() -> Call:
    return RouteSpec(num_experts=8, topk=2), [randn(3, 8), randn(8, seed=1), ids(3)], {}


def _packed() -> list[torch.Tensor]:
    """Return expert weights whose exponents are near 1."""
    generator = torch.Generator().manual_seed(0)

    def bytes_(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    w13 = [bytes_(0, 256, 4, 64, 32), bytes_(122, 126, 4, 64, 2)]
    return [*w13, bytes_(0, 256, 4, 64, 16), bytes_(122, 126, 4, 64, 1)]


@call
def prepare_moe_weights() -> Call:
    return MOE, [*_packed()], {}


@call
def moe_experts() -> Call:
    topk_ids = torch.tensor([[0, 3], [-1, 2], [1, 1]], dtype=torch.int32)
    return MOE, [randn(3, 64).bfloat16(), randn(3, 2, seed=1).abs(), topk_ids, _packed()], {}


@call
def all_gather() -> Call:
    return GatherSpec(layout="token_order", dtype="bfloat16"), [randn(4, 6).bfloat16(), 3], {}


@call
def dsa_decode() -> Call:
    case = DSACase(rows=((0, 200), (1, 1), (2, 77), (0, 0)))
    return case.spec(), list(case.operands().values()), {}


@call
def kda_layer_decode() -> Call:
    case = KDACase()
    return case.spec, list(case.operands().values()), {}


@call
def moe_layer() -> Call:
    case = MoECase()
    weights = case.weights()
    return case.spec(), [case.x, list(weights.values()), ids(4)], {}
