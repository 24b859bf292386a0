"""FlashInfer's attention over latents with its exact signatures, in plain torch on the CPU, as strict as the real one.

What is refused and what is computed is read off FlashInfer 0.7.4: ``mla/_core.py`` and ``_batch_mla/`` for arguments,
``trtllm_fmha_kernel_launcher.cu``, ``kernelParams.h`` and ``lse.cuh`` for TRT-LLM's kernels, ``sparse_mla_sm120/`` for
records, ``xqa/mla_sm120.cu`` for XQA.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: The signatures as FlashInfer 0.7.4 has them.
SIGNATURES = {
    "trtllm_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
        "max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto', is_var_seq=True, "
        "uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto', kv_scale_format='auto', "
        "cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, "
        "enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None, "
        "return_lse_base=None"
    ),
    "xqa_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
        "max_seq_len, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None"
    ),
}
LN2 = math.log(2)
#: The sm_120 kernels' mark of no key, and from where on a logit counts as one.
MARK, REACHED = -1e30, -1e29
MULTIPROCESSORS = 148
#: Bytes of a workspace that are written over at most: all of it takes its time.
DIRTY = 1 << 20


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Attend each query to the rows that its line of ``block_tables`` names."""
    assert not any((sinks, skip_softmax_threshold_scale_factor, enable_dcp, use_fp16_softmax, cum_seq_lens_q))
    batch, each, heads, dim = query.shape
    assert (each, dim, kv_lora_rank, qk_rope_head_dim) == (1, 576, 512, 64)
    assert qk_nope_head_dim in (128, 192)
    assert block_tables.shape == (batch, 1, sparse_mla_top_k)
    assert block_tables.dtype == torch.int32
    assert block_tables.is_contiguous()
    assert query.is_contiguous()
    assert return_lse_base in (None, "base2", "basee")
    if lse is not None:
        assert lse.shape == (batch, heads)
        assert lse.dtype == torch.float32
    base = LN2 if return_lse_base == "basee" else 1.0
    arguments = (query[:, 0], kv_cache, workspace_buffer, block_tables[:, 0], seq_lens, max_seq_len)
    if backend == "trtllm-gen":
        found, sums = _rows(*arguments, bmm1_scale, bmm2_scale, return_lse, multi_ctas_kv_counter_buffer)
    else:
        assert backend == "sparse"
        assert multi_ctas_kv_counter_buffer is None
        assert isinstance(bmm1_scale, float)
        assert bmm2_scale == 1.0
        found, sums = _records(*arguments, bmm1_scale, kv_scale_format)
    made = found[:, None] if out is None else out.copy_(found[:, None])
    if not return_lse:
        return made
    sums = torch.where(sums == MARK, sums, sums * base)
    return made, sums if lse is None else lse.copy_(sums)


def _rows(
    query: Tensor,
    cache: Tensor,
    workspace: Tensor,
    table: Tensor,
    lengths: Any,
    longest: int,
    first: Any,
    second: Any,
    return_lse: bool,
    counters: Any,
) -> tuple[Tensor, Tensor]:
    """Attend as TRT-LLM's kernels do: rows of the whole cache by one stride; base-2 sums."""
    batch, heads, _ = query.shape
    assert not 64 < heads < 128
    assert query.dtype == cache.dtype
    assert query.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    assert cache.shape[-2] in (32, 64)
    assert cache.shape[-1] == 576
    assert cache.stride()[-2:] == (576, 1)
    assert cache.stride(0) == 576 * cache.shape[-2]
    assert table.shape[1] % 4 == 0
    assert longest >= int(lengths.max())
    assert lengths.shape == (batch,)
    assert lengths.dtype == torch.int32
    assert counters.data_ptr() % 16 == 0
    assert counters.numel() >= 4 * -(-max(batch * heads, MULTIPROCESSORS) // 8) * 8
    assert not counters.any()
    slab = 8 * heads * batch * 256 + (1 << 20) if return_lse else 0
    assert workspace.numel() >= slab + 2 * MULTIPROCESSORS * 128 * 512 * 2
    workspace[:DIRTY].fill_(0xFF)  # a NaN of any float
    for scale in (first, second):
        assert isinstance(scale, float) or (scale.dtype == torch.float32 and scale.numel() == 1)
    keys = cache.reshape(-1, 576)
    out, sums = query.new_empty((batch, heads, 512), dtype=torch.bfloat16), torch.empty(batch, heads)
    for row, length in enumerate(lengths.tolist()):
        assert length >= 1
        index = table[row, :length].long()
        assert ((index >= 0) & (index < len(keys))).all()
        assert (table[row, length:] == -1).all()
        logits = query[row].float() @ keys[index].float().T * float(first)
        sums[row] = logits.logsumexp(1) / LN2
        out[row] = (logits.softmax(1) @ keys[index, :512].float() * float(second)).to(out.dtype)
    return out, sums


def _records(
    query: Tensor,
    cache: Tensor,
    workspace: Tensor,
    table: Tensor,
    lengths: Any,
    longest: int,
    scale: float,
    scales: str,
) -> tuple[Tensor, Tensor]:
    """Attend as the sm_120 kernels for few rows do: queries in FP8, a mark where nothing was reached; base-2 sums."""
    batch, heads, _ = query.shape
    assert batch <= 64  # more go to other kernels
    assert heads <= 128
    assert cache.shape[-2] == 64
    assert query.dtype == torch.bfloat16
    assert cache.dtype == torch.uint8
    assert cache.shape[-1] == 656
    assert cache.stride()[-2:] == (656, 1)
    assert cache.data_ptr() % 16 == 0
    assert cache.stride(0) % 16 == 0
    assert lengths is None or (lengths.shape == (batch,) and lengths.dtype == torch.int32)
    heads_held, splits = -(-heads // 16) * 16, -(-table.shape[1] // 64)
    assert workspace.numel() >= batch * heads_held * splits * 1028
    workspace[:DIRTY].fill_(0xFF)
    records = cache.reshape(-1, 656)
    factor = records[:, 512:528].contiguous().view(torch.float32)
    if scales in ("auto", "pow2_fp32"):  # the exponent alone is looked at
        factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    else:
        assert scales == "arbitrary_fp32"
    nope = records[:, :512].contiguous().view(torch.float8_e4m3fn).float() * factor.repeat_interleave(128, 1)
    keys = torch.cat((nope, records[:, 528:].contiguous().view(torch.bfloat16).float()), 1)
    out, sums = query.new_zeros((batch, heads, 512)), torch.full((batch, heads), MARK)
    for row in range(batch):
        index = table[row] if lengths is None else table[row, : int(lengths[row])]
        index = index[index >= 0].long()
        assert (index < len(keys)).all()
        q = torch.cat((blocks(query[row, :, :512].float()), query[row, :, 512:].float()), 1)
        logits = q @ keys[index].T * (scale / LN2)
        logits = torch.where(logits <= REACHED, -math.inf, logits)
        live = (logits != -math.inf).any(1)
        out[row, live] = ((logits[live] * LN2).softmax(1) @ keys[index, :512]).to(out.dtype)
        sums[row, live] = (logits[live] * LN2).logsumexp(1) / LN2
    return out, sums


def blocks(x: Tensor) -> Tensor:
    """Return numbers rounded to FP8, each 128 with a scale of their own."""
    held = x.reshape(-1, 128)
    scale = held.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
    return ((held / scale).to(torch.float8_e4m3fn).float() * scale).view(x.shape)


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Attend each query to the pages of its line, whole ones: what lies behind its keys is multiplied by 0."""
    batch, each, heads, dim = query.shape
    assert (each, heads, dim, kv_lora_rank, qk_rope_head_dim) == (1, 128, 576, 512, 64)
    assert query.dtype == kv_cache.dtype
    assert query.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    assert sinks is None
    page = kv_cache.shape[-2]
    assert page in (16, 32, 64, 128)
    assert block_tables.shape[0] == batch
    assert block_tables.shape[1] % (128 // page) == 0
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert seq_lens.shape == (batch,)
    marks, exchanged = workspace_buffer[: 4 * batch], workspace_buffer[8 << 20 :]
    assert not marks.any()
    assert exchanged.numel() >= batch * 2 * (128 * 64 + 1024)
    exchanged[:DIRTY].fill_(0xFF)
    first, second = float(bmm1_scale), float(bmm2_scale)
    made = query.new_empty((batch, 1, heads, 512), dtype=torch.bfloat16)
    for row, length in enumerate(seq_lens.tolist()):
        assert 1 <= length <= max_seq_len
        keys = kv_cache[block_tables[row].long()].reshape(-1, 576)[: -(-length // page) * page].float()
        logits = query[row, 0].float() @ keys.T * (first * second)
        logits[:, length:] = -math.inf
        made[row, 0] = (logits.softmax(1) @ keys[:, :512] * second).to(made.dtype)
    return made if out is None else out.copy_(made[:, 0])


def install() -> None:
    """Make ``import flashinfer.mla`` find these."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    for made in (trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla):
        setattr(module, made.__name__, made)
    package.mla = module  # type: ignore[attr-defined]
    sys.modules |= {"flashinfer": package, "flashinfer.mla": module}
