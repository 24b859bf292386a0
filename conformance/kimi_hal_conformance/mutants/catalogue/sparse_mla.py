"""Mutants of attention over selected rows, of the latent store, and of merging attention states."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

REFERENCE = "reference/sparse_mla.py"
ATTENTION = ("sparse_mla",)
MERGE = ("merge_attn_states",)

ATTEND = (
    Mutant(
        id="attn_scale_of_absorbed_width",
        file=REFERENCE,
        old="q_scale is not None else spec.softmax_scale",
        new="q_scale is not None else (spec.kv_rank + spec.pe_dim) ** -0.5",
        breaks="The softmax scale is 576^-1/2, the absorbed width's, and not that of the head before absorption.",
        imitates="https://github.com/ollama/ollama/pull/13893",
        passes="flashinfer-bench",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_finite_maximum",
        file=REFERENCE,
        old="top = q.new_full((spec.num_heads,), -torch.inf)",
        new="top = q.new_full((spec.num_heads,), -5e4)",
        breaks="The running maximum starts at -50,000, so that a row of lower scores has no weight left.",
        imitates="https://github.com/flashinfer-ai/flashinfer/issues/4267",
        passes="flashmla",
        operators=ATTENTION,
        fault=1,
    ),
    Mutant(
        id="attn_padding_reads_slot_0",
        file=REFERENCE,
        old="chosen = slots[slots >= 0]",
        new="chosen = slots.clamp(min=0)",
        breaks="An index of -1 is clamped to slot 0, whose key then has a weight.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/3395",
        passes="flashmla",
        operators=ATTENTION,
        fault=3,
    ),
    Mutant(
        id="attn_large_finite_maximum",
        file=REFERENCE,
        old="top = q.new_full((spec.num_heads,), -torch.inf)",
        new="top = q.new_full((spec.num_heads,), -1e30)",
        breaks="The running maximum starts at -10^30, which bfloat16 queries and keys get below.",
        imitates="https://github.com/flashinfer-ai/flashinfer/issues/4267",
        passes="flashmla",
        operators=("sparse_mla",),
        fault=1,
    ),
    Mutant(
        id="attn_padding_reads_last_slot",
        file=REFERENCE,
        old="chosen = slots[slots >= 0]",
        new="chosen = slots % (cache.shape[0] * spec.page)",
        breaks="An index of -1 is dereferenced: it addresses a row that no one selected.",
        imitates="https://github.com/radixark/miles/pull/2079",
        passes="flashmla",
        operators=ATTENTION,
        fault=1,
    ),
    Mutant(
        id="attn_out_of_range_clamped",
        file=REFERENCE,
        old="return torch.where(index < cache.shape[0] * spec.page, index, -1)",
        new="return index.clamp(max=cache.shape[0] * spec.page - 1)",
        breaks="An index beyond the cache is clamped to the last row instead of contributing nothing.",
        imitates="https://github.com/deepseek-ai/FlashMLA/pull/184",
        passes="flashmla",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_page_of_one_request",
        file=REFERENCE,
        old="    block = block_table[line[live], local[live] // page].long()",
        new=(
            "    block = torch.stack([own.where(~torch.isin(own, block_table[:i]), -1) for i, own in "
            "enumerate(block_table)])[line[live], local[live] // page].long()"
        ),
        breaks="A page that an earlier request names too is not read for a later one.",
        imitates="https://github.com/Wenyueh/MinivLLM/pull/98",
        passes="flashmla",
        operators=(*ATTENTION, "dsa_decode"),
    ),
    Mutant(
        id="attn_duplicates_removed",
        file=REFERENCE,
        old="chosen = slots[slots >= 0]",
        new="chosen = slots[slots >= 0].unique()",
        breaks="A key that is given twice counts once.",
        imitates="https://github.com/NVIDIA/TensorRT-LLM/pull/18044",
        passes="flashmla",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_last_key_dropped",
        file=REFERENCE,
        old="chosen = slots[slots >= 0]",
        new="chosen = slots[slots >= 0][: max(1, slots.shape[0] - 1)]",
        breaks="A row whose indices are all live loses the last of them: the tail of its last chunk is cut.",
        imitates="https://github.com/inclusionAI/cuLA/pull/43",
        passes="flashinfer-bench",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_page_tail_times_zero",
        file=REFERENCE,
        old="    return out / denominator(total)[:, None], log_sum(top, total)",
        new="    return (out + 0.0 * formats.latent(spec.latent).read(cache, spec.page, chosen // spec.page * spec.page"
        " + spec.page - 1, k_scale, dtype=q.dtype)[:, : spec.kv_rank].sum(0)) / denominator(total)[:, None], "
        "log_sum(top, total)",
        breaks="The last slot of a page is read with weight 0: what stands there may be NaN.",
        imitates="https://github.com/flashinfer-ai/flashinfer/issues/941",
        passes="flashmla",
        operators=ATTENTION,
        fault=4,
    ),
    Mutant(
        id="attn_lse_base_2",
        file=REFERENCE,
        old="return torch.where(torch.isinf(top), top, top + torch.log(total))",
        new="return torch.where(torch.isinf(top), top, top * 1.4426950408889634 + torch.log2(total))",
        breaks="The LSE is in base 2 where the contract says natural logarithm.",
        imitates="https://github.com/sgl-project/sglang/pull/33926",
        passes="flashmla",
        operators=(*ATTENTION, *MERGE),
        fault=11,
    ),
    Mutant(
        id="attn_empty_lse_plus_inf",
        file=REFERENCE,
        old="return torch.where(torch.isinf(top), top, top + torch.log(total))",
        new="return torch.where(torch.isinf(top), top.abs(), top + torch.log(total))",
        breaks="A row without a key has an LSE of +inf.",
        imitates="https://github.com/deepseek-ai/FlashMLA/pull/77",
        passes="flashmla",
        operators=(*ATTENTION, *MERGE),
        fault=2,
    ),
    Mutant(
        id="attn_empty_row_nan",
        file=REFERENCE,
        old="return total.masked_fill(total == 0, 1.0)",
        new="return total",
        breaks="A row without a key is 0 / 0.",
        imitates="https://github.com/radixark/miles/pull/2079",
        passes="flashmla",
        operators=(*ATTENTION, *MERGE),
        fault=1,
    ),
    Mutant(
        id="attn_empty_row_times_scale",
        file=REFERENCE,
        old="return out / denominator(total)[:, None], log_sum(top, total)",
        new=(
            "return out / denominator(total)[:, None] + (0.0 if k_scale is None or len(chosen) "
            "else 0.0 * k_scale.to(out.dtype)), log_sum(top, total)"
        ),
        breaks="The 0 of a row without a key is multiplied by the cache's scale, which may be NaN or infinite.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/4401",
        passes="flashmla",
        operators=ATTENTION,
        fault=7,
    ),
    Mutant(
        id="attn_nan_behind_infinity",
        file=REFERENCE,
        old="new_top = torch.maximum(top, logits.amax(dim=1))",
        new="new_top = torch.maximum(top, logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(dim=1))",
        breaks="A maximum that leaves NaN out gives a row of a NaN and a logit of +inf an LSE of +inf.",
        imitates="https://github.com/openxla/xla/issues/21461",
        passes="flashmla",
        operators=ATTENTION,
        fault=19,
    ),
    Mutant(
        id="attn_values_scaled_twice",
        file=REFERENCE,
        old="out = out * kept[:, None] + weights @ keys[:, : spec.kv_rank]",
        new=(
            "out = out * kept[:, None] + weights @ keys[:, : spec.kv_rank] * (1.0 if k_scale is None "
            "else k_scale)"
        ),
        breaks="The cache's scale is applied to the values when they are read and again when they are added.",
        imitates="https://github.com/modular/modular/issues/6600",
        passes="flashmla",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_index_len_ignored",
        file=REFERENCE,
        old="if index_len is None:",
        new="if index_len is None or index.numel():",
        breaks="Entries at and beyond index_len are attended to.",
        imitates="https://github.com/pegainfer-project/pegainfer/pull/489",
        passes="flashmla",
        operators=ATTENTION,
        fault=7,
    ),
    Mutant(
        id="attn_owner_ignored",
        file=REFERENCE,
        old="owned = (index >= 0) & (ownership.owner(index, spec.dcp) == spec.dcp.rank)",
        new="owned = index >= 0",
        breaks="A rank attends to positions that another rank owns, at its own place for them.",
        imitates="https://github.com/vllm-project/vllm/issues/41623",
        passes="flashmla",
        operators=ATTENTION,
        fault=11,
    ),
    Mutant(
        id="attn_block_table_column_unchecked",
        file=REFERENCE,
        old=(
            "live = (local >= 0) & (local < columns * page) & ((row_req >= 0) & (row_req < "
            "requests))[:, None]"
        ),
        new="live, local = local >= 0, local.clamp(max=columns * page - 1)",
        breaks="A position beyond the block table reads the table's last column.",
        imitates="https://github.com/tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark/issues/2",
        passes="flashmla",
        operators=ATTENTION,
        fault=4,
    ),
    Mutant(
        id="attn_heads_folded_to_16",
        file=REFERENCE,
        old="logits = q @ keys.T * scale",
        new="logits = q[torch.arange(q.shape[0], device=q.device) % 16] @ keys.T * scale",
        breaks="Heads from 16 on are computed with the queries of the first 16.",
        imitates="https://github.com/vllm-project/vllm/pull/46952",
        passes="flashmla",
        operators=ATTENTION,
        fault=15,
    ),
    Mutant(
        id="attn_probabilities_in_fp8",
        file=REFERENCE,
        old="out = out * kept[:, None] + weights @ keys[:, : spec.kv_rank]",
        new=(
            "out = out * kept[:, None] + weights.to(torch.float8_e4m3fn).to(q.dtype) @ keys[:, : "
            "spec.kv_rank]"
        ),
        breaks="Probabilities are rounded to FP8, a rounding that is not declared.",
        imitates="https://github.com/vllm-project/vllm/issues/49546",
        passes="flashinfer-bench",
        operators=ATTENTION,
    ),
    Mutant(
        id="attn_q_scale_ignored",
        file=REFERENCE,
        old="scale = spec.softmax_scale * q_scale.to(dtype) if q_scale is not None else spec.softmax_scale",
        new="scale = spec.softmax_scale",
        breaks="The scale of FP8 queries is not applied.",
        imitates="https://github.com/vllm-project/vllm/pull/52501",
        passes="flashmla",
        operators=ATTENTION,
    ),
)

STORE = (
    Mutant(
        id="latent_padding_writes_last_slot",
        file=REFERENCE,
        old="live = (slots >= 0) & (slots < cache.shape[0] * spec.page)",
        new=(
            "live = (slots := slots.where(slots >= 0, cache.shape[0] * spec.page - 1)) "
            "< cache.shape[0] * spec.page"
        ),
        breaks="A slot of -1 is a Python-style index: the last slot of the cache is overwritten.",
        imitates="https://github.com/vllm-project/vllm/issues/43810",
        passes="flashmla",
        operators=("store_latent",),
        fault=3,
    ),
    Mutant(
        id="latent_slot_0_reserved",
        file=REFERENCE,
        old="live = (slots >= 0) & (slots < cache.shape[0] * spec.page)",
        new="live = (slots > 0) & (slots < cache.shape[0] * spec.page)",
        breaks="Slot 0 is taken for padding and never written.",
        imitates="https://github.com/ROCm/aiter/pull/5010",
        passes="flashmla",
        operators=("store_latent",),
        fault=3,
    ),
)

STATES = (
    Mutant(
        id="merge_lse_clamped",
        file=REFERENCE,
        old="clean = lses[:, part].to(dtype).masked_fill(",
        new="clean = lses[:, part].to(dtype).clamp(min=-1e4).masked_fill(",
        breaks="A finite LSE below -10,000 is raised to it.",
        imitates="https://github.com/vllm-project/vllm/issues/27491",
        passes="flashmla",
        operators=MERGE,
        fault=2,
    ),
    Mutant(
        id="merge_plus_inf_is_a_value",
        file=REFERENCE,
        old="masked_fill(~torch.isfinite(lses[:, part]), -torch.inf)",
        new="masked_fill(torch.isnan(lses[:, part]), -torch.inf)",
        breaks="An LSE of +inf, which some kernels give an empty part, is read as a value.",
        imitates="https://github.com/Dao-AILab/flash-attention/pull/978",
        passes="flashmla",
        operators=MERGE,
        fault=2,
    ),
    Mutant(
        id="merge_nan_times_zero",
        file=REFERENCE,
        old="filled = piece.to(dtype).masked_fill((logit == -torch.inf)[..., None], 0.0)",
        new="filled = piece.to(dtype)",
        breaks="The output of an empty part is multiplied by a weight of 0, and it may hold NaN.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="flashmla",
        operators=MERGE,
        fault=2,
    ),
    Mutant(
        id="merge_all_empty_nan",
        file=REFERENCE,
        old="return top.masked_fill(top == -torch.inf, 0.0)",
        new="return top",
        breaks="Where every part is empty, -inf is subtracted from -inf.",
        imitates="https://github.com/flashinfer-ai/flashinfer/issues/4051",
        passes="flashmla",
        operators=MERGE,
        fault=1,
    ),
    Mutant(
        id="merge_weights_base_2",
        file=REFERENCE,
        old="weights, total = torch.exp(clean - finite_base(top)), torch.zeros_like(top)",
        new="weights, total = torch.exp2(clean - finite_base(top)), torch.zeros_like(top)",
        breaks="Natural LSEs are read as if they were in base 2.",
        imitates="https://github.com/sgl-project/sglang/pull/33926",
        passes="deepgemm",
        operators=MERGE,
        fault=11,
    ),
    Mutant(
        id="merge_underflowed_nan_dropped",
        file=REFERENCE,
        old="filled = piece.to(dtype).masked_fill((logit == -torch.inf)[..., None], 0.0)",
        new="filled = piece.to(dtype).masked_fill((weight == 0)[..., None], 0.0)",
        breaks="A part with a finite LSE whose weight underflows is taken for empty, and its NaN disappears.",
        imitates="https://github.com/vllm-project/vllm/pull/39148",
        passes="flashmla",
        operators=MERGE,
        fault=2,
    ),
)

add(ATTEND)
add(STORE)
add(STATES)
