"""``sparse_mla`` by FlashInfer's XQA on sm_120, which reads whole pages: selected rows are first put beside each other.

They stay in their format, bfloat16 or FP8 as the queries are. XQA takes 128 heads and returns no LSE. Its second factor
is the cache's scale and goes to logits and outputs alike (``mla_sm120.cu``: ``qScale · kvCacheScale``), so that the
first must not hold it.

Not run: no such device was here. What it does is read off FlashInfer's source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_nvidia.adapters import flashinfer_calls, flashinfer_sizes, gathered, libraries
from kimi_hal_nvidia.adapters.flashinfer import MODULE, NOPE, RANK, SHARED
from kimi_hal_nvidia.adapters.flashinfer_calls import Operands, padded

GIVEN = (
    *("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale"),
)
#: Heads that it takes, and tokens of the pages that rows are gathered into.
HEADS, PAGE = 128, 64


class Pages:
    """Attends to gathered rows."""

    def __init__(self, spec: SparseMLASpec) -> None:
        self.spec = spec
        self.attend = libraries.function(MODULE, "xqa_batch_decode_with_kv_cache_mla", GIVEN)
        self.row_bytes = formats.latent(spec.latent).row_bytes

    def __call__(self, given: Operands, workspace: Tensor) -> tuple[Tensor, Any]:
        """Attend; a row without a key gets zeros for one."""
        spec, rows, width = self.spec, *given.index.shape
        q = padded(given.q, HEADS)
        own, room = flashinfer_sizes.cut(workspace, flashinfer_sizes.XQA_OWN)
        own[: flashinfer_sizes.XQA_MARKS].zero_()
        held = room[: rows * width * self.row_bytes]
        gathered.gather(given.index, given.cache, spec.page, self.row_bytes, held)
        pages = width // PAGE
        table = torch.arange(rows * pages, dtype=torch.int32, device=q.device).view(rows, pages)
        fp8 = given.k_scale is not None
        out = self.attend(
            query=q[:, None],
            kv_cache=held.view(q.dtype).view(rows * pages, PAGE, RANK + SHARED),
            workspace_buffer=own,
            qk_nope_head_dim=NOPE,
            kv_lora_rank=RANK,
            qk_rope_head_dim=SHARED,
            block_tables=table,
            seq_lens=given.count.clamp(min=1),
            max_seq_len=width,
            bmm1_scale=given.q_scale * spec.softmax_scale if fp8 else spec.softmax_scale,
            bmm2_scale=given.k_scale if fp8 else 1.0,
        )
        return out[:, 0, : given.q.shape[1]], None


def build_pages(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function over gathered rows."""
    return flashinfer_calls.built(ctx, Pages(ctx.spec), flashinfer_sizes.XQA_ROWS)
