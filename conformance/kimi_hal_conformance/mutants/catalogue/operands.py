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
            old="factor = scale.clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)",
            new=(
                "factor = scale.clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)"
                ".clamp(min=FLASHMLA_FLOOR)"
            ),
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
    )
)
