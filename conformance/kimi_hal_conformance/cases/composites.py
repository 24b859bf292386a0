"""Cases of the composites: whole steps of a layer, on one rank and over ranks of a loopback group.

Specs are the model's own at a tensor-parallel size (``kimi_hal/presets.py``), of a model that is smaller in
every width. A selection inside a composite is discrete: operands whose best scores are too close at the cut
are drawn again, so that every right kernel selects alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import RouteSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel import ownership
from kimi_hal.presets import Deployment
from kimi_hal.reference.indexer import indexer_logits, quantize_index_query
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD, Case, Checkpoint, Make, Operands, add
from kimi_hal_conformance.cases.kda import conv_pool, gate_parameters, rows_of, settle, state_pool
from kimi_hal_conformance.cases.moe import checkpoint
from kimi_hal_conformance.draws import (
    close_cut,
    ints,
    normal,
    own_pages,
    owned_slots,
    stale_pages,
    strided,
)

BF16, F64 = torch.bfloat16, torch.float64
LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024)
SMALL = dataclasses.replace(
    K3_1_PRO,
    name="small",
    mla_heads=8,
    index_heads=8,
    topk=48,
    hidden=192,
    experts=12,
    experts_per_token=4,
    moe_hidden=64,
    moe_intermediate=128,
)
#: Draws until no row has close scores at its cut; where bfloat16 scores are selected 15 are usual, and 64 once too few.
ATTEMPTS = 1024
#: Tokens that long requests have in common, as of one system prompt: a page of keys on one rank.
PREFIX = 64


# --- dsa_decode -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Context:
    """The tokens of some requests: latents ``[n, 576]`` and index keys ``[n, 128]`` of each.

    Those of more than ``PREFIX`` tokens begin alike, and so name the pages that these fill together.
    """

    latents: list[Tensor]
    keys: list[Tensor]

    @classmethod
    def draw(cls, g: torch.Generator, lengths: Sequence[int]) -> Context:
        """Draw normal tokens."""
        found = cls([normal(g, n, 576) for n in lengths], [normal(g, n, 128) for n in lengths])
        for tokens in (found.latents, found.keys):
            longer = [own for own in tokens if len(own) > PREFIX]
            for own in longer[1:]:
                own[:PREFIX] = longer[0][:PREFIX]
        return found

    def latent(
        self, g: torch.Generator, spec: DSASpec, dcp: DCP, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return a rank's latent cache and the block table of the requests."""
        own = [tokens[owned(len(tokens), dcp)] for tokens in self.latents]
        table, slots, pages = layout(g, own, spec.attn.page)
        tokens = torch.cat(own)
        fmt = formats.latent(spec.attn.latent)
        cache = stale_pages(pages, spec.attn.page * fmt.row_bytes, stride_pad=64)
        fmt.write(cache, spec.attn.page, slots, tokens[:, :512], tokens[:, 512:], scale)
        return cache, table

    def index(self, g: torch.Generator, spec: DSASpec, dcp: DCP) -> tuple[Tensor, Tensor]:
        """Return a rank's index-key cache and the block table of the requests."""
        own = [keys[owned(len(keys), ownership.of_keys(dcp))] for keys in self.keys]
        fmt = formats.index(spec.indexer.index)
        table, slots, pages = layout(g, own, fmt.page)
        cache = stale_pages(pages, fmt.page_bytes, stride_pad=128)
        fmt.write(cache, slots, torch.cat(own))
        return cache, table


def owned(length: int, dcp: DCP) -> Tensor:
    """Return the positions below ``length`` that a rank owns."""
    position = torch.arange(length)
    return position[ownership.owner(position, dcp) == dcp.rank]


def layout(g: torch.Generator, requests: Sequence[Tensor], page: int) -> tuple[Tensor, Tensor, int]:
    """Return shuffled block tables, the slots of all tokens in order, and the pages of the cache.

    A full first page that an earlier request has too is that one's.
    """
    lengths = [len(tokens) for tokens in requests]
    pages = sum(-(-n // page) for n in lengths) + 2
    columns = max(-(-n // page) for n in lengths) + 1
    table = own_pages(g, lengths, page, pages, columns)
    slots = owned_slots(table, lengths, page)
    for number, tokens in enumerate(requests):
        alike = (i for i, own in enumerate(requests[:number]) if torch.equal(own[:page], tokens[:page]))
        if len(tokens) >= page and (first := next(alike, None)) is not None:
            table[number, 0] = table[first, 0].item()
    return table, slots, pages


def dsa_spec(world: int, interleave: int = 1, replicated: bool = False, **deployment: Any) -> DSASpec:
    """Return rank 0's Spec of the small model over ``world`` ranks."""
    dcp = DCP(world=world, interleave=interleave, index="replicated" if replicated else "sharded")
    model = dataclasses.replace(SMALL, moe_intermediate=64 * world)  # whole groups at any world
    found = Deployment(tp=2 * world, dcp=dcp, page=32, model=model, **deployment).specs()["dsa_decode"]
    assert isinstance(found, DSASpec)
    return found


def dsa_operands(
    spec: DSASpec,
    lengths: Sequence[int],
    grouped: bool,
    draw: Callable[[torch.Generator], Context] | None = None,
) -> Make:
    """Return rows that ask for the whole, a part or nothing of each request; the last row is padding.

    With a ``draw`` of their own the tokens' scores may be equal, never close: nothing is drawn again.
    """
    asked = [(r, n) for r, length in enumerate(lengths) for n in (length, max(1, length - 9))]
    rows = [*asked, (10**6, 0)]

    def make(g: torch.Generator) -> Operands:
        context = draw(g) if draw else Context.draw(g, lengths)
        shared = {"row_req": ints([r for r, _ in rows]), "row_len": ints([n for _, n in rows])}
        shared |= index_query(g, spec, context, shared, attempts=ATTEMPTS if draw is None else 0)
        q = normal(g, len(rows), spec.attn.num_heads, 576, spread=2.0).to(getattr(torch, spec.q_dtype))
        if spec.q_dtype != "bfloat16":
            shared |= {"q_scale": torch.tensor([0.4375])}
        ranks = [rank_operands(g, spec, context, rank, q) | shared for rank in range(spec.dcp.world)]
        return {"ranks": ranks} if grouped else ranks[0]

    return make


def rank_operands(
    g: torch.Generator, spec: DSASpec, context: Context, rank: int, q: Tensor
) -> dict[str, Any]:
    """Return what is a rank's own: its heads of q, and its caches."""
    dcp = dataclasses.replace(spec.dcp, rank=rank)
    scale = torch.tensor([0.03125]) if formats.latent(spec.attn.latent).needs_scale else None
    pages, latent_table = context.latent(g, spec, dcp, scale)
    index_cache, index_table = context.index(g, spec, dcp)
    found = {
        "q": strided(q[:, rank * spec.heads : (rank + 1) * spec.heads]),
        "latent_cache": pages,
        "index_cache": index_cache,
        "latent_table": latent_table,
        "index_table": index_table,
    }
    return found if scale is None else found | {"k_scale": scale}


def index_query(
    g: torch.Generator, spec: DSASpec, context: Context, rows: Operands, attempts: int = ATTEMPTS
) -> dict[str, Tensor]:
    """Return index queries and weights of all rows, drawn until no row has close scores at its cut.

    Scores that the Spec rounds are close where their rounding could make them equal.
    """
    whole = dataclasses.replace(spec.indexer, dcp=DCP(), return_selected=False, score="float32")
    slack = {"float32": 1e-4, "bfloat16": 1.1 * 2.0**-7}[spec.indexer.score]
    cache, table = context.index(g, spec, DCP())
    count = rows["row_len"].numel()
    q, w = normal(g, count, whole.num_heads, 128, dtype=BF16), normal(g, count, whole.num_heads)
    for _ in range(attempts):
        query = quantize_index_query(spec.query, q, w, dtype=F64)
        scores = indexer_logits(whole, *query, cache, table, rows["row_req"], rows["row_len"], dtype=F64)
        again = close_cut(scores, whole.topk, slack)
        if not again.any():
            return {"index_q": q, "index_w": w}
        q[again] = normal(g, int(again.sum()), whole.num_heads, 128, dtype=BF16)
    assert not attempts, "index scores stay close at the cut"
    return {"index_q": q, "index_w": w}


def dsa_cases() -> Iterator[Case]:
    """One rank; two with each protocol, interleaved, with replicated index keys, in other formats."""
    lengths = (200, 1, 77, 48)
    one = dsa_spec(1)
    yield Case(
        "dsa_decode/one-rank", "dsa_decode", one, LIMITS, dsa_operands(one, lengths, False), since=INTERP
    )
    plain = dsa_spec(1, latent="latent.nvfp4.352", index="index.mxfp4.page64")
    yield Case("dsa_decode/one-rank/fp4", "dsa_decode", plain, LIMITS, dsa_operands(plain, lengths, False))
    two = {
        "full": dsa_spec(2),
        "interleave16": dsa_spec(2, interleave=16),
        "replicated": dsa_spec(2, replicated=True),
        "scores-only": merging(dsa_spec(2, interleave=4), protocol="scores_only", return_global=False),
        "all-gather": dataclasses.replace(dsa_spec(2), head_exchange="ag_rs"),
        "mxfp4-bf16": dsa_spec(2, latent="latent.bf16", index="index.mxfp4.page64"),
    }
    for label, spec in two.items():
        make = dsa_operands(spec, lengths, True)
        since = INTERP if label in ("full", "scores-only") else QUICK
        yield Case(f"dsa_decode/two-ranks/{label}", "dsa_decode", spec, LIMITS, make, since=since, ranks=2)


def merging(spec: DSASpec, **fields: Any) -> DSASpec:
    """Return the Spec with other fields of its merge."""
    assert spec.merge is not None
    return dataclasses.replace(spec, merge=dataclasses.replace(spec.merge, **fields))


# --- kda_layer_decode -----------------------------------------------------------------------------------


def kda_operands(spec: KDASpec, rows: int) -> Make:
    """Return one token a row; of four or more rows the last two are padding and out of range."""

    def make(g: torch.Generator) -> Operands:
        channels, state = spec.channels, state_pool(g, spec)
        slots = state.shape[0]
        ids = [(2 * i + 1) % slots for i in range(rows)]
        if rows > 3:
            ids[-2:] = [-1, slots]
        operands = {
            "x": normal(g, rows, channels, dtype=BF16),
            "weight": normal(g, channels, spec.conv_width, dtype=BF16, spread=0.5),
            "conv_state": conv_pool(g, spec),
            "state_ids": ints(ids),
        }
        settle(g, spec, operands | {"cu_seqlens": torch.arange(rows + 1, dtype=torch.int32)})
        gate = rows_of(g, spec, rows)
        parameters = gate_parameters(g, spec) if spec.gate == "raw" else {}
        norm = 1 + normal(g, spec.head_dim, spread=0.2)
        return {
            "x": strided(operands["x"]),
            "raw_g": gate["raw_g"],
            "raw_beta": gate["raw_beta"],
            "out_gate": normal(g, rows, spec.num_heads, spec.head_dim, dtype=BF16, spread=2.0),
            "weights": Checkpoint(conv=operands["weight"], **parameters, norm=norm.to(BF16)),
            "conv_state": operands["conv_state"],
            "state": state,
            "state_ids": operands["state_ids"],
        }

    return make


def kda_cases() -> Iterator[Case]:
    """Heads of TP sizes, the log gate, a channel-major convolution."""
    specs = {
        "tp8": KDASpec(num_heads=12),
        "tp32": KDASpec(num_heads=3),
        "log-gate": KDASpec(num_heads=2, head_dim=32, gate="log"),
        "channel-major": KDASpec(num_heads=2, head_dim=32, conv_layout="channel_width"),
    }
    for label, spec in specs.items():
        for rows in (0, 1, 6):
            name = f"kda_layer_decode/{label}/rows{rows}"
            since = INTERP if label != "tp8" else STANDARD if rows else QUICK
            yield Case(name, "kda_layer_decode", spec, LIMITS, kda_operands(spec, rows), since=since)


# --- moe_layer ------------------------------------------------------------------------------------------


def moe_spec(tp: int = 1, ranks: int = 1, rank: int = 0, **fields: Any) -> MoELayerSpec:
    """Return the Spec of the small model, experts cut by columns over ``tp`` or by expert over ``ranks``."""
    found = Deployment(tp=tp, model=SMALL).specs()["moe_layer"]
    assert isinstance(found, MoELayerSpec)
    per = found.experts.num_experts // ranks
    experts = dataclasses.replace(found.experts, num_local=per, expert_offset=rank * per)
    shared = {"shared_intermediate": 96, **fields}
    return dataclasses.replace(found, experts=experts, tp=tp * ranks, **shared)


def moe_operands(spec: MoELayerSpec, rows: int, live: int | None = None) -> Make:
    """Return rows and each rank's weights, drawn until no row has close scores at its cut."""

    def make(g: torch.Generator) -> Operands:
        whole = dense_weights(g, spec)
        x = separated(g, spec, rows, whole)
        given = {"x": strided(x)} | ({} if live is None else {"num_tokens": ints([live])})
        if spec.tp == 1:
            return given | {"weights": Checkpoint(**whole, **checkpoint(g, spec.experts))}
        own = [rank_weights(whole, spec.tp, rank) for rank in range(spec.tp)]
        return {"ranks": [given | {"weights": Checkpoint(**w, **checkpoint(g, spec.experts))} for w in own]}

    return make


def dense_weights(g: torch.Generator, spec: MoELayerSpec) -> dict[str, Tensor]:
    """Return everything but the routed experts, the shared experts whole."""
    width, hidden = spec.model_dim, spec.experts.hidden

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(g, rows, columns, spread=max(columns, 1) ** -0.5).to(BF16)

    return {
        "gate": normal(g, spec.route.num_experts, width, spread=2 * width**-0.5),
        "bias": normal(g, spec.route.num_experts, spread=0.1),
        "down": matrix(hidden, width),
        "up": matrix(width, hidden),
        "norm": 1 + normal(g, hidden, spread=0.1),
        "shared_w13": matrix(2 * spec.shared_intermediate, width),
        "shared_w2": matrix(width, spec.shared_intermediate),
    }


def rank_weights(whole: dict[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    """Return one rank's share: columns of the shared experts, everything else whole."""
    gate, up = (half.chunk(ranks)[rank] for half in whole["shared_w13"].chunk(2))
    own = {"shared_w13": torch.cat([gate, up]), "shared_w2": whole["shared_w2"].chunk(ranks, dim=1)[rank]}
    return whole | {name: tensor.contiguous() for name, tensor in own.items()}


def separated(g: torch.Generator, spec: MoELayerSpec, rows: int, weights: dict[str, Tensor]) -> Tensor:
    """Return rows whose chosen experts are the same in every precision."""
    x = normal(g, rows, spec.model_dim, dtype=BF16)
    for _ in range(ATTEMPTS):
        scores = torch.sigmoid(x.to(F64) @ weights["gate"].to(F64).T) + weights["bias"]
        again = close_choice(spec.route, scores)
        if not again.any():
            return x
        x[again] = normal(g, int(again.sum()), spec.model_dim, dtype=BF16)
    raise AssertionError("router scores stay close at the cut")


def close_choice(route: RouteSpec, scores: Tensor) -> Tensor:
    """Tell which rows have a group, or an expert of the chosen groups, close behind the last that is chosen."""
    if route.groups == 1:
        return close_cut(scores, route.topk)
    size = route.num_experts // route.groups
    best = scores.view(-1, route.groups, size).topk(min(2, size), dim=2).values.sum(dim=2)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(
        1, best.topk(route.topk_groups, dim=1).indices, True
    )
    reached = scores.where(chosen.repeat_interleave(size, dim=1), -torch.inf)
    return close_cut(best, route.topk_groups) | close_cut(reached, route.topk)


def moe_cases() -> Iterator[Case]:
    """One rank, padding, no shared experts; two ranks by columns and by experts."""
    one = moe_spec()
    for rows in (0, 1, 9):
        yield Case(
            f"moe_layer/one-rank/rows{rows}", "moe_layer", one, LIMITS, moe_operands(one, rows), since=INTERP
        )
    yield Case("moe_layer/one-rank/padded", "moe_layer", one, LIMITS, moe_operands(one, 7, live=4))
    bare = moe_spec(shared_intermediate=0)
    yield Case("moe_layer/one-rank/no-shared", "moe_layer", bare, LIMITS, moe_operands(bare, 5))
    columns = moe_spec(tp=2)
    yield Case("moe_layer/two-ranks/columns", "moe_layer", columns, LIMITS, moe_operands(columns, 9), ranks=2)
    halves = tuple(moe_spec(ranks=2, rank=rank) for rank in range(2))
    by_expert = moe_operands(halves[0], 9, live=8)
    name = "moe_layer/two-ranks/experts"
    yield Case(name, "moe_layer", halves[0], LIMITS, by_expert, ranks=2, rank_specs=halves)


WHY = {
    "dsa_decode/one-rank": "A whole decode step on one rank: selection and attention see the same keys.",
    "dsa_decode/two-ranks": "One rank's selection and output, whatever the protocol, interleave and exchange.",
    "kda_layer_decode/": "One token through a layer at the model's heads and at others: both states advance once.",
    "moe_layer/one-rank": "A whole layer: projections, norm and shared experts around the routed ones.",
    "moe_layer/one-rank/padded": "Rows behind num_tokens: zeros, whatever they hold.",
    "moe_layer/two-ranks": "Partial sums of two ranks, which stand before the norm: adding later is another result.",
}

add(dsa_cases(), WHY)
add(kda_cases(), WHY)
add(moe_cases(), WHY)
