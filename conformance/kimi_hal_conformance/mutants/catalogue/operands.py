"""Mutants that only operands nobody draws at random show: broken slots, ends of scales, subnormals, counts."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

add(
    (
        Mutant(
            id="kda_fresh_state_times_zero",
            file="reference/recurrence.py",
            old="states[fresh] = 0",
            new="states[fresh] *= 0",
            breaks="A fresh state is what the slot holds, times 0: NaN of an earlier request stays.",
            imitates="https://github.com/ggml-org/llama.cpp/issues/29092",
            passes="fla",
            operators=("kda_prefill",),
            fault=10,
        ),
        Mutant(
            id="kda_conv_fresh_history_times_zero",
            file="reference/convolution.py",
            old="empty = slot < 0 if fresh is None else fresh | (slot < 0)",
            new=(
                "empty = slot < 0 if fresh is None else (slot < 0) | (fresh & "
                "by_width(spec, conv_state)[slot.clamp(min=0)].isfinite().flatten(1).all(1))"
            ),
            breaks="A fresh history is zero only where the slot holds numbers: NaN of an earlier request stays.",
            imitates="https://github.com/ggml-org/llama.cpp/issues/29092",
            passes="fla",
            operators=("kda_conv",),
            fault=10,
        ),
        Mutant(
            id="flashmla_scale_clamped",
            file="formats/latent_bytes.py",
            old="factor = flashmla_scales(fmt, rows).to(dtype)",
            new="factor = flashmla_scales(fmt, rows).to(dtype).clamp(min=FLASHMLA_FLOOR)",
            breaks="A record's scales below this writer's floor are raised to it when they are read.",
            imitates="https://github.com/deepseek-ai/FlashMLA/pull/184",
            passes="flashmla",
            operators=("sparse_mla",),
            fault=20,
        ),
        Mutant(
            id="select_flushes_subnormals",
            file="reference/selection.py",
            old="bits = scores.float().contiguous().view(torch.int32)",
            new=(
                "bits = scores.float().masked_fill(scores.float().abs() < 2.0**-126, 0.0).contiguous()"
                ".view(torch.int32)"
            ),
            breaks="Subnormal scores are flushed to 0, so that position decides between them.",
            imitates="https://github.com/1CatAI/1Cat-vLLM/pull/222",
            passes="sorted-scores",
            operators=("topk_select",),
            fault=6,
        ),
        Mutant(
            id="experts_multiply_unread_weights",
            file="reference/moe.py",
            old="y = x.new_zeros(x.shape, dtype=dtype)",
            new="y = x.to(dtype) * 0 + (topk_weights * 0).sum(-1, keepdim=True).to(dtype)",
            breaks="Rows and weights that count nothing are multiplied by 0: their NaN reaches the result.",
            imitates="https://github.com/trymirai/lalamo/pull/310",
            passes="cosine",
            operators=("moe_experts",),
            fault=18,
        ),
        Mutant(
            id="attend_scale_kept",
            file="reference/sparse_mla.py",
            old="_attend(spec, q[row].to(dtype), scale, cache, row_slots, k_scale)",
            new=(
                "_attend(spec, q[row].to(dtype), scale, cache, row_slots, k_scale if k_scale is None"
                ' else globals().setdefault(f"at{k_scale.data_ptr()}", k_scale.clone()))'
            ),
            breaks="The scale of the latents is read once at each address and kept.",
            imitates="https://github.com/flashinfer-ai/flashinfer/pull/4014",
            passes="flashmla",
            operators=("sparse_mla",),
        ),
        Mutant(
            id="cuts_taken_as_dense",
            file="reference/sequences.py",
            old="bounds = cu_seqlens.long().clamp(0, rows)",
            new="bounds = torch.as_strided(cu_seqlens, cu_seqlens.shape, (1,)).long().clamp(0, rows)",
            breaks="The offsets of sequences are read one behind the other, whatever their stride is.",
            imitates="https://github.com/NVIDIA/cudnn-frontend/pull/1183",
            passes="fla",
            operators=("kda_conv", "kda_prefill", "kda_verify"),
        ),
        Mutant(
            id="records_taken_as_dense",
            file="reference/records.py",
            old="buffer[sequence, : packed.shape[1]] = packed",
            new=(
                "torch.as_strided(buffer, buffer.shape, (buffer.shape[1], 1))[sequence, : packed.shape[1]] = packed"
            ),
            breaks="Records are written one row behind the other, whatever the buffer's stride is.",
            imitates="https://github.com/vllm-project/vllm-xpu-kernels/pull/397",
            passes="fla",
            operators=("kda_commit",),
        ),
        Mutant(
            id="latent_page_masked",
            file="formats/latent_bytes.py",
            old="_pages(fmt, cache, page)[where // page, where % page] = packed",
            new="_pages(fmt, cache, page)[where // page, where & (page - 1)] = packed",
            breaks="A token's place in its page is cut out by a mask, as if every page length were a power of two.",
            imitates="https://github.com/tenstorrent/tt-metal/issues/12841",
            passes="bitwise",
            operators=("store_latent",),
        ),
        Mutant(
            id="key_part_in_the_latents_dtype",
            file="reference/sparse_mla.py",
            old="latent, pe = kv_c[part][keep].float(), k_pe[part][keep].float()",
            new="latent, pe = kv_c[part][keep].float(), k_pe[part][keep].to(kv_c.dtype).float()",
            breaks="The key part is taken to have the latent's dtype, and is rounded to it before it is stored.",
            imitates="https://github.com/tenstorrent/tt-metal/issues/57364",
            passes="bitwise",
            operators=("store_latent",),
        ),
        Mutant(
            id="conv_silu_overflows",
            file="reference/convolution.py",
            old="y[inputs.sequences.start[some] + where] = silu(total)",
            new="y[inputs.sequences.start[some] + where] = total * torch.exp(total) / (1.0 + torch.exp(total))",
            breaks="SiLU is formed by an exponential that overflows for a large sum.",
            imitates="https://github.com/antirez/ds4/pull/498",
            passes="fla",
            operators=("kda_conv",),
            fault=19,
        ),
        Mutant(
            id="merge_all_plus_inf",
            file="reference/sparse_mla.py",
            old="lse[part] = log_sum(top, total)",
            new=(
                "lse[part] = torch.where((lses[:, part] == torch.inf).all(0), torch.inf, log_sum(top, total))"
            ),
            breaks="Where every part says +inf, so does the result.",
            imitates="https://github.com/Dao-AILab/flash-attention/pull/978",
            passes="flashmla",
            operators=("merge_attn_states",),
            fault=2,
        ),
    )
)
