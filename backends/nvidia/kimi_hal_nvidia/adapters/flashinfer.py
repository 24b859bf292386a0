"""``sparse_mla`` by FlashInfer: TRT-LLM's kernels over 576 numbers a token on sm_100, its own over records on sm_120.

``trtllm_batch_decode_with_kv_cache_mla`` with ``sparse_mla_top_k`` takes each row as a request of one query. Its block
table is then rows of the cache: on sm_100 those of a packed cache, and its length says how many count, of which one
must be; on sm_120 −1 counts as none. LSE has base 2 there, unless base e is asked for, as here.

Not run: no such device was here. What it does is read off FlashInfer's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_nvidia.adapters import flashinfer_calls, flashinfer_sizes, libraries
from kimi_hal_nvidia.adapters.flashinfer_calls import Operands, padded

MODULE = "flashinfer.mla"
#: What either path is given, by name.
COMMON = (
    *("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("block_tables", "seq_lens", "max_seq_len", "sparse_mla_top_k", "bmm1_scale", "bmm2_scale"),
    *("backend", "lse", "return_lse", "return_lse_base"),
)
TRTLLM = (*COMMON, "multi_ctas_kv_counter_buffer")
RECORDS = (*COMMON, "kv_scale_format")
#: Numbers of a query's head that are no position, those of a latent, and those of the shared key.
NOPE, RANK, SHARED = 128, 512, 64
#: Tokens of the pages that a packed cache is shown in: it is read row by row all the same.
SHOWN = 32
#: Below it is the sm_120 kernels' mark of a row that no logit reached: the finite −10^30, in base 2 or turned.
NONE = -1e29


def scales(spec: SparseMLASpec, given: Operands) -> tuple[Any, Any]:
    """Return the factors of logits and of outputs, on the device where the operands' are."""
    if given.k_scale is None:
        return spec.softmax_scale, 1.0
    return given.k_scale * given.q_scale * spec.softmax_scale, given.k_scale


class Rows:
    """Attends to 576 numbers a token, bfloat16 or FP8 as the queries are, in a packed cache."""

    def __init__(self, spec: SparseMLASpec) -> None:
        self.spec = spec
        self.attend = libraries.function(MODULE, "trtllm_batch_decode_with_kv_cache_mla", TRTLLM)
        self.heads = flashinfer_sizes.trtllm_heads(spec.num_heads)

    def __call__(self, given: Operands, workspace: Tensor) -> tuple[Tensor, Any]:
        """Attend; a row without a key gets any one."""
        spec, heads = self.spec, given.q.shape[1]
        dtype = torch.bfloat16 if spec.q_dtype == "bfloat16" else torch.float8_e4m3fn
        q = padded(given.q, self.heads)
        index, width = given.index.clone(), given.index.shape[1]
        index[:, 0].clamp_(min=0)
        counters, scratch = flashinfer_sizes.cut(workspace, flashinfer_sizes.COUNTERS)
        logits, outputs = scales(spec, given)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if spec.return_lse else None
        found = self.attend(
            query=q[:, None],
            kv_cache=given.cache.view(dtype).view(-1, SHOWN, RANK + SHARED),
            workspace_buffer=scratch,
            qk_nope_head_dim=NOPE,
            kv_lora_rank=RANK,
            qk_rope_head_dim=SHARED,
            block_tables=index[:, None],
            seq_lens=given.count.clamp(min=1),
            max_seq_len=width,
            sparse_mla_top_k=width,
            bmm1_scale=logits,
            bmm2_scale=outputs,
            backend="trtllm-gen",
            lse=lse,
            return_lse=spec.return_lse,
            return_lse_base="basee",
            multi_ctas_kv_counter_buffer=counters.zero_(),
        )
        out = found[0] if spec.return_lse else found
        return out[:, 0, :heads], None if lse is None else lse[:, :heads]


class Records:
    """Attends to FlashMLA's 656-byte records, whose scales may be any float32."""

    def __init__(self, spec: SparseMLASpec) -> None:
        self.spec = spec
        self.attend = libraries.function(MODULE, "trtllm_batch_decode_with_kv_cache_mla", RECORDS)

    def __call__(self, given: Operands, workspace: Tensor) -> tuple[Tensor, Any]:
        """Attend; a row that no logit reached has LSE −inf."""
        spec, width = self.spec, given.index.shape[1]
        q = given.q.contiguous()
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if spec.return_lse else None
        found = self.attend(
            query=q[:, None],
            kv_cache=given.cache.view(given.cache.shape[0], spec.page, -1),
            workspace_buffer=workspace,
            qk_nope_head_dim=NOPE,
            kv_lora_rank=RANK,
            qk_rope_head_dim=SHARED,
            block_tables=given.index[:, None],
            seq_lens=given.count,
            max_seq_len=width,
            sparse_mla_top_k=width,
            bmm1_scale=spec.softmax_scale,
            bmm2_scale=1.0,
            backend="sparse",
            lse=lse,
            return_lse=spec.return_lse,
            return_lse_base="basee",
            kv_scale_format="arbitrary_fp32",
        )
        out = found[0] if spec.return_lse else found
        return out[:, 0], None if lse is None else lse.masked_fill_(lse <= NONE, -math.inf)


def build_rows(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function over 576 numbers a token."""
    return flashinfer_calls.built(ctx, Rows(ctx.spec), flashinfer_sizes.TRTLLM_ROWS)


def build_records(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function over records."""
    return flashinfer_calls.built(ctx, Records(ctx.spec), flashinfer_sizes.RECORD_ROWS)
