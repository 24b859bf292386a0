"""``dsa_decode`` by CUDA kernels: query, scores, selection, attention; each begins while the one before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.check import WORKSPACE_ALIGN
from kimi_hal.ops.composites import part_specs
from kimi_hal.ops.operator import get, torch_dtype
from kimi_hal_nvidia.attention_plan import cut
from kimi_hal_nvidia.indexer import Searcher
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.quantize_query import Quantizer
from kimi_hal_nvidia.scores import Operands, Scorer
from kimi_hal_nvidia.sizes import TICKETS, Held
from kimi_hal_nvidia.sparse_mla import Attention, words_of
from kimi_hal_nvidia.streams import device_index, on_device

#: Where the scales stand among the operands, which not every Spec has.
SCALES = 9
#: What addresses of the caches are multiples of.
ALIGN = 16


class Given(NamedTuple):
    """The operands of a call."""

    q: Tensor
    index_q: Tensor
    index_w: Tensor
    latent_cache: Tensor
    index_cache: Tensor
    latent_table: Tensor
    index_table: Tensor
    row_req: Tensor
    row_len: Tensor
    k_scale: Any
    q_scale: Any


class Decoder:
    """Selects and attends, for one plan.

    What stands between its kernels is in workspace, and each of them writes there what the next one alone reads, behind
    a wait for the one before it: so all that is older than that one is done when a kernel begins.
    """

    def __init__(self, ctx: BuildContext) -> None:
        spec, index = ctx.spec, device_index(ctx.device)
        query, indexer = spec.query, spec.indexer
        limits = part_specs("dsa_decode", spec, ctx.limits)["indexer_topk"].limits
        self.quantize = Quantizer(query, ctx.arch, index)
        search = replace(ctx, operator="indexer_topk", spec=indexer, limits=limits)
        self.search = Searcher(search, Scorer(search, follows=True))
        way = cut(spec.attn, ctx.limits, ctx.configuration)
        words = None if ctx.persistent is None else ctx.persistent[TICKETS:]
        words = words_of(spec.attn, ctx.limits, way, words)
        self.attend = Attention(spec.attn, ctx.limits, way, ctx.arch, index, words, follows=True)
        self.held, self.size = Held.of(spec, ctx.limits), ctx.sizes.workspace
        dims = query.dims()
        self.quantised = torch_dtype(query.query_dtype), (query.num_heads, dims["Q"])
        self.scales = torch.uint8, (query.num_heads, dims["S"])
        self.folded = torch_dtype(query.weights_dtype), (query.num_heads,)
        self.selected = torch.int32, (indexer.topk,)
        self.kept = (
            torch_dtype(indexer.score),
            (indexer.topk if indexer.return_selected else 0,),
        )
        self.layout, self.lock = Layout(), threading.Lock()
        self.facts: tuple[Any, ...] = ()

    def again(self, given: Given, out: Any, lse_out: Any, workspace: Any) -> bool:
        """Do what was done last, if all of these are laid out like those of then; else nothing. Tell which."""
        with self.lock:
            if not self.layout.same(*given[:SCALES], *filled(given), out, lse_out, workspace):
                return False
            at = workspace.data_ptr()
            index_cache, latent_cache = given.index_cache.data_ptr(), given.latent_cache.data_ptr()
            if at % WORKSPACE_ALIGN or (index_cache | latent_cache) % ALIGN:
                return False
            q_out, scale_out, weights_out, indices, kept, partials, scores = [
                at + start for start in self.held
            ]
            row_req, row_len = given.row_req.data_ptr(), given.row_len.data_ptr()
            self.quantize.start(
                given.index_q.data_ptr(), given.index_w.data_ptr(), q_out, scale_out, weights_out
            )
            self.search.start(
                q_out,
                scale_out,
                weights_out,
                index_cache,
                given.index_table.data_ptr(),
                row_req,
                row_len,
                indices,
                kept,
                scores,
            )
            self.attend.start(
                given.q.data_ptr(),
                latent_cache,
                indices,
                0 if given.k_scale is None else given.k_scale.data_ptr(),
                0 if given.q_scale is None else given.q_scale.data_ptr(),
                0,
                given.latent_table.data_ptr(),
                row_req,
                out.data_ptr(),
                lse_out.data_ptr(),
                partials=partials,
            )
        return True

    def __call__(self, given: Given, out: Tensor, lse_out: Tensor, workspace: Tensor | None) -> None:
        """Fill ``out`` and ``lse_out``; there is at least one row."""
        room = given.q.new_empty((self.size,), dtype=torch.uint8) if workspace is None else workspace
        tensors = (*given[:SCALES], *filled(given), out, lse_out, room)
        facts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        with self.lock:
            known, self.facts = facts == self.facts, ()
            if not known:
                self.layout.forget()
            at_once = self.decode(given, out, lse_out, room)
            self.facts = facts
            if known and at_once and workspace is not None:
                self.layout.learn(*tensors)

    def decode(self, given: Given, out: Tensor, lse_out: Tensor, room: Tensor) -> bool:
        """Do so, and return whether scores of all rows were there at once."""
        rows = given.q.shape[0]
        kinds = (self.quantised, self.scales, self.folded, self.selected, self.kept)
        parts = [viewed(room, at, rows, *kind) for at, kind in zip(self.held, kinds, strict=False)]
        *quantised, indices, kept = parts
        self.quantize(given.index_q, given.index_w, *quantised)
        operands = Operands(*quantised, given.index_cache, given.index_table, given.row_req, given.row_len)
        at_once = self.search.search(operands, indices, kept, room[self.held.scores :], None)
        self.attend(
            given.q,
            given.latent_cache,
            indices,
            given.k_scale,
            given.q_scale,
            None,
            given.latent_table,
            given.row_req,
            out,
            lse_out,
            room[self.held.partials : self.held.scores],
        )
        return at_once


def filled(given: Given) -> list[Tensor]:
    """Return the scales that there are."""
    return [tensor for tensor in given[SCALES:] if tensor is not None]


def viewed(room: Tensor, at: int, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes of a buffer from ``at`` on as ``[rows, *shape]``."""
    size = rows * dtype.itemsize
    for n in shape:
        size *= n
    return room[at : at + size].view(dtype).view(rows, *shape)


def build_dsa_decode(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``dsa_decode``."""
    spec, check = ctx.spec, ctx.check
    decode = Decoder(ctx)
    heads, rank, lse_width = spec.heads, spec.attn.kv_rank, spec.dims()["L"]
    presence = get("dsa_decode").presence
    scaled = presence(spec) if presence else {}

    def run(
        q: Any,
        index_q: Any,
        index_w: Any,
        latent_cache: Any,
        index_cache: Any,
        latent_table: Any,
        index_table: Any,
        row_req: Any,
        row_len: Any,
        k_scale: Any = None,
        q_scale: Any = None,
        *,
        step: Any = None,
        out: Any = None,
        lse_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        given = Given(
            q,
            index_q,
            index_w,
            latent_cache,
            index_cache,
            latent_table,
            index_table,
            row_req,
            row_len,
            k_scale,
            q_scale,
        )
        unusual = step is not None or any(
            (getattr(given, name) is None) == needed for name, needed in scaled.items()
        )
        if not unusual and decode.again(given, out, lse_out, workspace):
            return out, lse_out
        check(**given._asdict(), step=step, out=out, lse_out=lse_out, workspace=workspace)
        rows = q.shape[0]
        if out is None:
            out = q.new_empty((rows, heads, rank), dtype=torch.bfloat16)
        if lse_out is None:
            lse_out = q.new_empty((rows, lse_width), dtype=torch.float32)
        if rows:
            decode(given, out, lse_out, workspace)
        return out, lse_out

    return on_device(ctx.device, run)
