"""An engine in a page: Kimi K3.1 Pro's attention, planned once, over one packed cache, by rows of tokens.

    python examples/minimal_engine.py                           # on what is here
    KIMI_HAL_BACKEND=nvidia python examples/minimal_engine.py   # on another chip: nothing else changes
    torchrun --nproc-per-node 2 examples/minimal_engine.py      # over processes

Chunked prefill, prefix caching, decode, speculation, DCP over any group. Its model (``tiny_model.py``) has no
experts, it samples greedily, and it gives no block back. ``docs/integrator.md`` walks through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from tiny_model import MODEL, TinyModel
from torch import Tensor

import kimi_hal as hal
from kimi_hal.parallel import Group
from kimi_hal.parallel.exchange import exchange_heads, gather_heads, sum_in_rank_order
from kimi_hal.presets import Deployment
from kimi_hal.specs import DCP, Limits

DEVICE = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
BLOCK, BLOCKS, REQUESTS, DRAFTS = 256, 40, 4, 3
LIMITS = Limits(max_rows=512, max_reqs=REQUESTS, max_context=2048, rows_per_req=512, uniform=False)
SHORT = dataclasses.replace(LIMITS, rows_per_req=1 + DRAFTS)
ALONE = "store_index_keys store_latent quantize_index_query indexer_topk sparse_mla kda_conv kda_prefill kda_decode"


@dataclasses.dataclass
class Request:
    """Tokens, how many of them the caches hold, and block ids: of tokens, of live states, of states kept."""

    tokens: list[int]
    done: int
    stop: int  # how many tokens stand in whole blocks, which later requests may share
    blocks: list[int]
    live: list[int]  # one a group of KDA layers; a state id is a block id
    kept: list[int]  # likewise: the states after ``stop`` tokens


class Engine:
    """One rank. A group makes it one of W, which divide the heads (TP) and the cache's tokens (DCP)."""

    def __init__(self, group: Group | None = None) -> None:
        world, self.rank = group.size() if group else 1, group.rank() if group else 0
        self.group = group if world > 1 else None
        self.span = BLOCK * world  # tokens of a block, over all ranks
        dcp = DCP(world=world, rank=self.rank)
        deployment = Deployment(tp=world, dcp=dcp, model=MODEL, page=BLOCK)
        formats = {"latent": deployment.latent, "index": deployment.index}
        self.layout = hal.cache.plan(MODEL, block_size=BLOCK, num_blocks=BLOCKS, tp=world, dcp=dcp, **formats)
        self.model = TinyModel(world, self.rank, DEVICE)
        self.pool = torch.empty(self.layout.bytes, dtype=torch.uint8, device=DEVICE).fill_(0xFF)  # NaN
        self.views, self.free = self.layout.views(self.pool), iter(range(BLOCKS))
        self.prefixes: dict[tuple[int, ...], Request] = {}
        self.plan(deployment.specs())

    def plan(self, specs: dict[str, Any]) -> None:
        """Decide once who computes what; a missing kernel is an error here, and never a wrong token later."""
        kda = specs["kda_verify"]
        specs["kda_conv"] = specs["kda_prefill"] = dataclasses.replace(kda, checkpoints=True)
        self.plans = {name: hal.plan(name, specs[name], LIMITS, device=DEVICE) for name in ALONE.split()}
        verify = self.plans["kda_verify"] = hal.plan("kda_verify", kda, SHORT, device=DEVICE)
        for name, group in (
            {"topk_merge": self.group, "merge_attn_states": None}.items() if self.group else ()
        ):
            self.plans[name] = hal.plan(name, specs[name], LIMITS, device=DEVICE, group=group)
        self.run: dict[str, Callable[..., Any]] = {name: plan.run for name, plan in self.plans.items()}
        self.steps = {name: self.plans[name].new_step() for name in ("indexer_topk", "sparse_mla")}
        self.groups = [[place.layer for place in group.places] for group in self.layout.groups[1:]]
        self.group_of = {layer: i for i, layers in enumerate(self.groups) for layer in layers}
        self.commits = []
        for layers in self.groups:
            spec = dataclasses.replace(kda, num_layers=len(layers))
            self.commits.append(hal.plan("kda_commit", spec, SHORT, device=DEVICE, pair=verify))
        records = torch.empty(MODEL.layers, REQUESTS, verify.records_bytes, dtype=torch.uint8, device=DEVICE)
        self.records, self.k_scale = records.unbind(), torch.tensor([2.0**-6], device=DEVICE)

    def add(self, prompt: Sequence[int], room: int = 64) -> Request:
        """Give a request blocks. Those of a known prefix are shared; its states are copied, a row of the pool each."""
        whole = (len(prompt) - 1) // self.span * self.span  # one token at least is computed, for its logits
        heads = (tuple(prompt[:end]) for end in range(whole, 0, -self.span))
        known = next((self.prefixes[head] for head in heads if head in self.prefixes), None)
        shared = known.blocks[: known.stop // self.span] if known else []
        own = -(-(len(prompt) + room) // self.span) - len(shared)
        blocks, live, kept = ([next(self.free) for _ in range(n)] for n in (own, *2 * [len(self.groups)]))
        if known:
            rows = self.pool.view(BLOCKS, -1)
            rows[live] = rows[known.kept]
        return Request(list(prompt), known.stop if known else 0, whole, shared + blocks, live, kept)

    def begin(self, work: Sequence[tuple[Request, int]], kind: str) -> SimpleNamespace:
        """Return what a step's kernels are told, the same for all layers: each request's next n tokens are rows."""
        m = SimpleNamespace(kind=kind, tokens=[t for r, n in work for t in r.tokens[r.done : r.done + n]])
        positions = on([p for r, n in work for p in range(r.done, r.done + n)])
        m.row_req, m.row_len = on([i for i, (_, n) in enumerate(work) for _ in range(n)]), positions + 1
        width = max(len(r.blocks) for r, _ in work)
        m.table = on([r.blocks + [-1] * (width - len(r.blocks)) for r, _ in work])
        m.slots = hal.cache.slots(m.table, m.row_req, positions, self.layout, "latent", rank=self.rank)
        m.index_table, m.index_slots = hal.cache.translate(m.table, m.slots, self.layout, "index")
        for name, table in (("indexer_topk", m.index_table), ("sparse_mla", m.table)):
            self.plans[name].prepare(m.row_req, m.row_len, table, step=self.steps[name])
        m.cu_seqlens = on([0, *(n for _, n in work)]).cumsum(0, dtype=torch.int32)
        m.begun = on([r.done for r, _ in work]) > 0  # else a slot is read as zero, whatever it holds
        m.stop = on([r.stop - r.done if r.done < r.stop <= r.done + n else -1 for r, n in work])
        m.live, kept = on([r.live for r, _ in work]).T, on([r.kept for r, _ in work]).T
        m.kept = torch.where(m.stop < 0, -1, kept)
        return m

    def step(self, work: Sequence[tuple[Request, int]], kind: str) -> tuple[Tensor, SimpleNamespace]:
        """Run all layers over a step's rows; returns logits ``[T, vocabulary]`` and what the step was."""
        m = self.begin(work, kind)
        x = self.model.embed(m.tokens)
        for layer in range(MODEL.layers):
            attend = self.dsa if layer in MODEL.full_attention_layers else self.kda
            own = self.model.output(layer, attend(layer, x, m))
            x = x + (sum_in_rank_order(self.group, own) if self.group else own).bfloat16()
        return self.model.logits(x), m

    def dsa(self, layer: int, x: Tensor, m: SimpleNamespace) -> Any:
        """Store the rows' tokens, select, attend; over a group each rank to its own tokens, for all heads."""
        latents, keys = self.views["latent"][layer], self.views["index"][layer]
        kv, pe, key, query, weight, q = self.model.dsa(layer, x)
        self.run["store_index_keys"](key, m.index_slots, keys)
        self.run["store_latent"](kv, pe, m.slots, latents, self.k_scale)
        query = self.run["quantize_index_query"](query, weight)
        keyed, step = (keys, m.index_table, m.row_req, m.row_len), self.steps["indexer_topk"]
        (picked, scores), count = self.run["indexer_topk"](*query, *keyed, step=step), None
        if self.group:
            picked, count, _ = self.run["topk_merge"](scores, picked, m.row_len)
            q = gather_heads(self.group, q)
        named, step = (self.k_scale, None, count, m.table, m.row_req), self.steps["sparse_mla"]
        out, lse = self.run["sparse_mla"](q, latents, picked, *named, step=step)
        if self.group:
            out, _ = self.run["merge_attn_states"](*exchange_heads(self.group, out, lse))
        return out

    def kda(self, layer: int, x: Tensor, m: SimpleNamespace) -> Any:
        """Advance each request's states by its rows; to verify, compute the rows and leave the states."""
        conv, state, group = self.views["conv"][layer], self.views["recurrent"][layer], self.group_of[layer]
        x, weight, *gate = self.model.kda(layer, x)
        rows: tuple[Any, ...] = (m.live[group], m.cu_seqlens)
        if m.kind == "verify":
            return self.run["kda_verify"](x, weight, *gate, conv, state, *rows, self.records[layer])
        rows += (m.begun, m.stop, m.kept[group])
        q, k, v = self.run["kda_conv"](x, weight, conv, *rows).unflatten(1, (3, -1, MODEL.kda_dim)).unbind(1)
        rows = rows[:1] if m.kind == "decode" else rows
        return self.run[f"kda_{m.kind}"](q, k, v, *gate, state, *rows)

    def prefill(self, request: Request, chunk: int) -> Tensor:
        """Compute a prompt, ``chunk`` rows at a time; returns the last logits."""
        assert chunk % self.plans["kda_prefill"].checkpoint_multiple == 0, "a state is stored at such offsets"
        while request.done < len(request.tokens):
            rows = min(chunk, len(request.tokens) - request.done)
            logits, _ = self.step([(request, rows)], "prefill")
            request.done += rows
        self.prefixes.setdefault(tuple(request.tokens[: request.stop]), request)
        request.tokens.append(int(logits[-1].argmax()))
        return logits[-1]

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Compute each request's newest token; returns logits ``[R, vocabulary]``."""
        logits, _ = self.step([(r, 1) for r in requests], "decode")
        for request, token in zip(requests, logits.argmax(1).tolist(), strict=True):
            request.done += 1
            request.tokens.append(token)
        return logits

    def verify(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> list[int]:
        """Compute newest tokens and guesses of what follows them; returns how many guesses were kept."""
        work = [(r, 1 + len(guesses)) for r, guesses in zip(requests, drafts, strict=True)]
        for request, guesses in zip(requests, drafts, strict=True):
            request.tokens += guesses
        logits, m = self.step(work, "verify")
        best, right = logits.argmax(1).tolist(), []
        for r, (start, end) in zip(requests, pairwise(m.cu_seqlens.tolist()), strict=True):
            said, guessed = (
                best[start:end],
                [*r.tokens[r.done + 1 :], -1],
            )  # after the last guess nothing is right
            right.append(next(i for i, (a, b) in enumerate(zip(said, guessed, strict=True)) if a != b))
            r.done += 1 + right[-1]
            r.tokens[r.done :] = [said[right[-1]]]
        accepted = on(right) + 1  # the newest token was a verified row too
        for layers, ids, commit in zip(self.groups, m.live, self.commits, strict=True):
            pools = [[self.views[kind][n] for n in layers] for kind in ("conv", "recurrent")]
            gates = [[self.model.layers[n][name].flatten() for n in layers] for name in ("A_log", "dt_bias")]
            commit.run(*pools, [self.records[n] for n in layers], *gates, ids, accepted)
        return right


def on(values: Any) -> Tensor:
    """Return int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


if __name__ == "__main__":
    import sys

    from engine_story import main

    main(sys.argv[1:])
