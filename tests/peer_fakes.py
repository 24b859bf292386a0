"""Other libraries' operators with their exact signatures, in plain torch on the CPU, as strict as the real ones.

The schemas are those that DeepGEMM 2.8.1, vLLM 0.33.0 and sgl-flash-mla 1.0.0 register.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DEEPGEMM = (
    "fp8_fp4_mqa_logits(Tensor q, Tensor? q_sf, Tensor kv, Tensor kv_sf, Tensor weights, "
    "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, int max_seqlen_k, Tensor? schedule_meta=None) -> Tensor",
    "get_paged_mqa_logits_metadata(Tensor context_lens, int block_kv, int num_sms, Tensor? indices=None) -> Tensor",
    "fp8_fp4_paged_mqa_logits(Tensor q, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, Tensor schedule_meta, int max_context_len, Tensor? indices=None) -> Tensor",
)
VLLM = (
    "persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()",
    "cooperative_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()",
)
_DECODE = (
    "Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "{a} tile_scheduler_metadata, {b} num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, "
)
SGL_FLASHMLA = (
    f"sparse_decode_fwd({_DECODE.format(a='Tensor(a!)?', b='Tensor(b!)?')}str? kv_format=None) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)",
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink=None, "
    "Tensor? topk_length=None, bool return_log2_stats=False, bool return_stats=True) -> Tensor?[]",
)
VLLM_FLASHMLA = (
    f"sparse_decode_fwd({_DECODE.format(a='Tensor(a)?', b='Tensor(b)?')}Tensor(c!)? out_=None, "
    "bool enable_batch_invariant=False) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)",
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]",
)
PROCESSORS = 132
_KEPT: list[torch.library.Library] = []


def register(namespace: str, schemas: tuple[str, ...], **made: Any) -> None:
    """Define operators under a namespace; they live as long as the process."""
    library = torch.library.Library(namespace, "DEF")
    for schema in schemas:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, made[name], "CompositeExplicitAutograd")
    _KEPT.append(library)


def _packed(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} is not contiguous"


def paged_logits(
    q: Tensor,
    q_sf: None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    indices: None = None,
) -> Tensor:
    """Score ``q [B, n, H, 128]`` against pages; rows have a stride of whole kilobytes."""
    batch, each, heads, dim = q.shape
    assert heads in (32, 64)
    assert dim == 128
    assert q_sf is None
    assert q.dtype == torch.float8_e4m3fn
    _packed(q=q, weights=weights, context_lens=context_lens, schedule_meta=schedule_meta)
    assert kv_cache.shape[1:] == (64, 1, 132)
    assert kv_cache.stride(1) == 132
    assert kv_cache.stride(0) % 4 == 0
    assert weights.shape == (batch * each, heads)
    assert weights.dtype == torch.float32
    assert context_lens.shape == (batch, each)
    assert context_lens.dtype == torch.int32
    assert block_table.shape[0] == batch
    assert block_table.dtype == torch.int32
    assert block_table.stride(1) == 1
    assert schedule_meta.shape == (PROCESSORS + 1, 2)
    assert schedule_meta[0, 0] == context_lens.sum()
    stride = -(-max_context_len // 256) * 256
    scores = q.new_full((batch * each, stride), math.nan, dtype=torch.float32)[:, :max_context_len]
    cache = kv_cache.as_strided((kv_cache.shape[0], 8448), (kv_cache.stride(0), 1))
    for row in range(batch * each):
        length = int(context_lens.view(-1)[row])
        for column in range(-(-length // 64)):
            page = int(block_table[row // each, column])
            inside = 0 <= page < cache.shape[0]  # beyond, the copy engine fills in zeros
            keys = _keys(cache[page] if inside else torch.zeros_like(cache[0]))
            dots = (q[row // each, row % each].float() @ keys.T).clamp(min=0)
            scores[row, column * 64 : column * 64 + 64] = weights[row] @ dots
    return scores


def _keys(page: Tensor) -> Tensor:
    elements = page[:8192].view(torch.float8_e4m3fn).view(64, 128).float()
    return elements * page[8192:8448].contiguous().view(torch.float32)[:, None]


def schedule(context_lens: Tensor, block_kv: int, num_sms: int, indices: None = None) -> Tensor:
    """Return a schedule that says for which lengths it was made."""
    assert context_lens.dim() == 2
    assert block_kv == 64
    _packed(context_lens=context_lens)
    return context_lens.sum().int().expand(num_sms + 1, 2).contiguous()


def gathered_logits(
    q: Tensor,
    q_sf: None,
    kv: Tensor,
    kv_sf: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    max_seqlen_k: int,
    schedule_meta: None = None,
) -> Tensor:
    """Score ``q [T, H, 128]`` against each row's range of gathered keys, from column 0 on."""
    rows, heads, _ = q.shape
    _packed(q=q, kv=kv, kv_sf=kv_sf, starts=cu_seq_len_k_start, ends=cu_seq_len_k_end)
    assert heads in (32, 64)
    assert kv.dtype == torch.float8_e4m3fn
    assert kv_sf.dtype == torch.float32
    assert cu_seq_len_k_start.dtype == cu_seq_len_k_end.dtype == torch.int32
    stride = -(-max_seqlen_k // 256) * 256
    scores = q.new_full((rows, stride), math.nan, dtype=torch.float32)[:, :max_seqlen_k]
    for row, (start, end) in enumerate(
        zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)
    ):
        keys = kv[start:end].float() * kv_sf[start:end, None]
        scores[row, : end - start] = weights[row] @ (q[row].float() @ keys.T).clamp(min=0)
    return scores


def topk(
    logits: Tensor, lengths: Tensor, output: Tensor, workspace: Tensor, k: int, max_seq_len: int
) -> None:
    """Select ``k`` of each row, larger positions first where scores are equal; −1 behind them."""
    _packed(logits=logits, lengths=lengths, output=output)
    assert k in (512, 1024, 2048)
    assert logits.dtype == torch.float32
    assert lengths.dtype == torch.int32
    assert workspace.dtype == torch.uint8
    assert workspace.numel() == 1 << 20
    assert not workspace.any()
    for row, length in enumerate(lengths.tolist()):
        assert 0 <= length <= logits.shape[1]
        order = logits[row, :length].flip(0).argsort(descending=True, stable=True)[:k]
        output[row] = -1
        output[row, : len(order)] = (length - 1 - order).int()


def _attended(q: Tensor, keys: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend as FlashMLA does: out in bfloat16, natural LSE, +inf where a row has no key."""
    out, lse = q.new_zeros((*q.shape[:2], 512)), q.new_full(q.shape[:2], math.inf, dtype=torch.float32)
    for row in range(q.shape[0]):
        live = index[row][index[row] != -1].long()
        assert ((live >= 0) & (live < keys.shape[0])).all()
        if len(live):
            logits = q[row].float() @ keys[live].T * scale
            lse[row] = logits.logsumexp(1)
            out[row] = (logits.softmax(1) @ keys[live, :512]).to(out.dtype)
    return out, lse


def flashmla_decode(
    q: Tensor, kv: Tensor, indices: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Attend ``q [B, 1, H, 576]`` to records."""
    assert rest[:7] == (None,) * 7
    assert rest[7] == 512
    batch, each, heads, dim = q.shape
    assert each == 1
    assert heads in (64, 128)
    assert dim == 576
    assert q.stride(-1) == 1
    assert kv.dtype == torch.float8_e4m3fn
    assert kv.shape[2:] == (1, 656)
    assert kv.stride(1) == 656
    assert indices.shape[:2] == (batch, 1)
    assert not indices.shape[2] % 64
    assert indices.dtype == torch.int32
    records = kv.view(torch.uint8).contiguous().view(-1, 656)
    scales = records[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    nope = records[:, :512].contiguous().view(torch.float8_e4m3fn).float() * scales
    keys = torch.cat((nope, records[:, 528:].contiguous().view(torch.bfloat16).float()), 1)
    out, lse = _attended(q[:, 0], keys, indices[:, 0], rest[8])
    return out[:, None], lse[:, :, None], None, None


def flashmla_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, *rest: Any
) -> list[Tensor]:
    """Attend ``q [T, H, 576]`` to bfloat16 rows."""
    assert not any(rest[:2])
    assert d_v == 512
    assert q.shape[1] in (64, 128)
    assert q.is_contiguous()
    assert kv.shape[1:] == (1, 576)
    assert kv.dtype == torch.bfloat16
    assert not indices.shape[2] % 128
    out, lse = _attended(q, kv[:, 0].float(), indices[:, 0], sm_scale)
    return [out, lse.clone(), lse]


def install() -> None:
    """Register every library's operators, as if each were installed and loaded."""
    register(
        "deep_gemm",
        (*DEEPGEMM, "get_num_sms() -> int"),
        fp8_fp4_mqa_logits=gathered_logits,
        get_paged_mqa_logits_metadata=schedule,
        fp8_fp4_paged_mqa_logits=paged_logits,
        get_num_sms=lambda: PROCESSORS,
    )
    sys.modules["deep_gemm"] = ModuleType("deep_gemm")
    register("_C", VLLM, persistent_topk=topk, cooperative_topk=topk)
    for namespace, schemas in (("flash_mla_legacy", SGL_FLASHMLA), ("_flashmla_C", VLLM_FLASHMLA)):
        register(namespace, schemas, sparse_decode_fwd=flashmla_decode, sparse_prefill_fwd=flashmla_prefill)
