"""The calls of one DSA layer's decode step, between the input projections and the value projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.spec import Limits
from kimi_hal.presets import Deployment
from kimi_hal.step.call import Call, Steps
from kimi_hal.step.inputs import Inputs

#: k_scale of an FP8 latent: 448 · 2⁻⁶ is 7 root mean squares of a normalised latent.
K_SCALE = 2.0**-6
#: Tokens that are stored in one call when the caches are filled.
FILL_ROWS = 4096


class AttentionStep:
    """``batch`` queries over one sequence: row t is the token at position ``context − batch + t``.

    All rows share the sequence's pages, as requests with a common prefix do.
    """

    def __init__(self, inputs: Inputs, deployment: Deployment, batch: int, context: int, device: str) -> None:
        self.inputs, self.deployment, self.device = inputs, deployment, device
        self.batch, self.context = batch, context
        self.rows = slice(context - batch, context)
        self.limits = Limits(max_rows=max(batch, FILL_ROWS), max_reqs=batch, max_context=context)
        self.specs = deployment.specs()
        self.index, self.latent = formats.index(deployment.index), formats.latent(deployment.latent)
        self.index_cache = self._pool(self.index.page, self.index.page_bytes)
        self.latent_cache = self._pool(deployment.page, deployment.page * self.latent.row_bytes)
        self.k_scale = self._on(torch.tensor([K_SCALE])) if self.latent.needs_scale else None

    def _pool(self, page: int, page_bytes: int) -> Tensor:
        pages = -(-self.context // page)
        return torch.zeros((pages, page_bytes), dtype=torch.uint8, device=self.device)

    def _on(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _scaled(self) -> dict[str, Tensor]:
        return {} if self.k_scale is None else {"k_scale": self.k_scale}

    def _table(self, page: int) -> Tensor:
        pages = torch.arange(-(-self.context // page), dtype=torch.int32, device=self.device)
        return pages.expand(self.batch, -1).contiguous()

    def fill(self, advance: Callable[[int], None] = lambda tokens: None) -> None:
        """Store the tokens before the batch's own, a few thousand at a time."""
        end = self.context - self.batch
        for start in range(0, end, FILL_ROWS):
            stop = min(start + FILL_ROWS, end)
            for call in self._stores(start, stop):
                plan(call.operator, call.spec, call.limits, device=self.device).run(**call.operands)
            advance(stop - start)

    def _stores(self, start: int, stop: int) -> Steps:
        slots = torch.arange(start, stop, device=self.device)
        count = stop - start
        kv_c, k_pe = map(self._on, self.inputs.latents(start, stop))
        keys = self._on(self.inputs.index_keys(slice(start, stop)))
        yield Call(
            "store_index_keys",
            self.specs["store_index_keys"],
            self.limits,
            {"k": keys, "slots": slots, "cache": self.index_cache},
            {"cache": count * self.index.row_bytes},
        )
        yield Call(
            "store_latent",
            self.specs["store_latent"],
            self.limits,
            {"kv_c": kv_c, "k_pe": k_pe, "slots": slots, "cache": self.latent_cache, **self._scaled()},
            {"cache": count * self.latent.row_bytes},
        )

    def calls(self) -> Steps:
        """Yield the step's calls; what a call returned is sent back, since later calls are made of it."""
        index_q, index_w = map(self._on, self.inputs.index_query(self.rows))
        q = self._on(self.inputs.mla_query(self.rows, self.deployment.model.heads(self.deployment.tp)))
        yield from self._stores(self.context - self.batch, self.context)
        quantised = yield self._call("quantize_index_query", {"q": index_q, "weights": index_w})
        picks = yield self._call("indexer_topk", self.scored(*quantised), self._keys_read())
        self.picks = picks[0]
        yield self._call("sparse_mla", self._attended(q), self._latents_read())
        yield self._call("dsa_decode", self._whole(q, index_q, index_w), self._all_read())

    def _call(self, operator: str, operands: dict[str, Any], touched: dict[str, int] | None = None) -> Call:
        return Call(operator, self.specs[operator], self.limits, operands, touched or {})

    def _row_operands(self) -> dict[str, Tensor]:
        ends = torch.arange(self.context - self.batch + 1, self.context + 1, dtype=torch.int32)
        requests = torch.arange(self.batch, dtype=torch.int32)
        return {"row_req": self._on(requests), "row_len": self._on(ends)}

    def scored(self, q: Tensor, q_scale: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Return the operands of the scoring of a quantised query against the whole context."""
        operands = {"q": q, "q_scale": q_scale, "weights": weights, "cache": self.index_cache}
        return operands | {"block_table": self._table(self.index.page)} | self._row_operands()

    def _attended(self, q: Tensor) -> dict[str, Tensor]:
        operands = {"q": q, "cache": self.latent_cache, "indices": self.picks, **self._scaled()}
        table = self._table(self.deployment.page)
        return operands | {"block_table": table, "row_req": self._row_operands()["row_req"]}

    def _whole(self, q: Tensor, index_q: Tensor, index_w: Tensor) -> dict[str, Tensor]:
        operands = {"q": q, "index_q": index_q, "index_w": index_w, **self._scaled(), **self._row_operands()}
        caches = {"latent_cache": self.latent_cache, "index_cache": self.index_cache}
        tables = {
            "latent_table": self._table(self.deployment.page),
            "index_table": self._table(self.index.page),
        }
        return operands | caches | tables

    def _keys_read(self) -> dict[str, int]:
        return {"cache": self.batch * self.context * self.index.row_bytes}

    def _latents_read(self) -> dict[str, int]:
        return {"cache": int((self.picks >= 0).sum()) * self.latent.row_bytes}

    def _all_read(self) -> dict[str, int]:
        return {"index_cache": self._keys_read()["cache"], "latent_cache": self._latents_read()["cache"]}
