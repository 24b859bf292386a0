"""Mutants of Kimi Delta Attention: convolution, gate, recurrence, and the verify and commit pair."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

KDA = "reference/kda.py"
CONV = "reference/convolution.py"
STEP = "reference/recurrence.py"
POINT = "reference/pointwise.py"
ROWS = "reference/sequences.py"
RECURRENT = ("kda_prefill", "kda_decode", "kda_verify")
BOTH = ("kda_prefill", "kda_decode")

GATES = (
    Mutant(
        id="kda_bias_per_head",
        file=STEP,
        old="dt_bias.to(dtype).view(spec.num_heads, spec.head_dim)",
        new="dt_bias.to(dtype)[: spec.num_heads, None]",
        breaks="One bias a head is read where every channel has its own.",
        imitates="https://github.com/ml-explore/mlx-lm/issues/1792",
        passes="flashinfer-bench",
        operators=("kda_decode",),
    ),
    Mutant(
        id="kda_lower_bound_ignored",
        file=STEP,
        old="if spec.lower_bound is None:",
        new="if spec.lower_bound is None or spec.lower_bound < 0:",
        breaks="The bounded gate is computed as the unbounded one.",
        imitates="https://github.com/flashserve/flash-linear-attention-npu/issues/448",
        passes="flashinfer-bench",
        operators=("kda_decode",),
    ),
    Mutant(
        id="kda_softplus_overflows",
        file=POINT,
        old="return torch.where(x > threshold, x, torch.log1p(torch.exp(x.clamp(max=threshold))))",
        new="return torch.log1p(torch.exp(x.float())).to(x.dtype)",
        breaks="Softplus has no linear branch: exp overflows from 89 on.",
        imitates="https://github.com/vllm-project/vllm/pull/28293",
        passes="fla",
        operators=("kda_gate",),
    ),
    Mutant(
        id="kda_sigmoid_twice",
        file=STEP,
        old='beta = sigmoid(beta) if spec.gate == "raw" else beta',
        new="beta = sigmoid(beta)",
        breaks="A finished beta goes through the sigmoid once more.",
        imitates="https://github.com/sgl-project/sglang/pull/33926",
        passes="fla",
        operators=BOTH,
    ),
    Mutant(
        id="kda_gate_strides_ignored",
        file=STEP,
        old="beta = self.raw_beta[rows].to(dtype)",
        new=(
            "beta = torch.as_strided(self.raw_beta, self.raw_beta.shape, (spec.num_heads, 1))[rows].to(dtype)"
        ),
        breaks="Rows of beta that are further apart than they are long are read as if they were contiguous.",
        imitates="https://github.com/sgl-project/sglang/pull/21836",
        passes="fla",
        operators=RECURRENT,
        fault=23,
    ),
    Mutant(
        id="kda_norm_eps_on_mean",
        file=POINT,
        old="return x * torch.rsqrt(tree_sum(x * x, -1) + eps)[..., None]",
        new="return x * torch.rsqrt(tree_sum(x * x, -1) + eps * x.shape[-1])[..., None]",
        breaks="The norm's epsilon is added to the mean of squares and not to their sum.",
        imitates="https://github.com/ml-explore/mlx-lm/pull/1624",
        passes="fla",
        operators=BOTH,
    ),
    Mutant(
        id="kda_norm_flag_ignored",
        file=STEP,
        old="return l2_normalized(k.to(dtype)) if spec.qk_norm else k.to(dtype)",
        new="return l2_normalized(k.to(dtype))",
        breaks="Keys are normalised although the Spec says that they are.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/5255",
        passes="fla",
        operators=RECURRENT,
    ),
)

STEPS = (
    Mutant(
        id="kda_state_read_transposed",
        file=STEP,
        old="states = pool[slot].to(dtype).transpose(-1, -2).contiguous()",
        new="states = pool[slot].to(dtype).contiguous()",
        breaks="The state is read as [K, V] where the pool holds [V, K]: legal in shape, since both are 128.",
        imitates="https://github.com/vllm-project/vllm/issues/41292",
        passes="fla",
        operators=("kda_prefill",),
        fault=13,
    ),
    Mutant(
        id="kda_fresh_state_not_reset",
        file=STEP,
        old="if fresh is not None:",
        new="if fresh is not None and not fresh.numel():",
        breaks="A request without an initial state continues from what its slot holds.",
        imitates="https://github.com/ggml-org/llama.cpp/issues/29092",
        passes="fla",
        operators=("kda_prefill",),
        fault=10,
    ),
    Mutant(
        id="kda_delta_before_decay",
        file=STEP,
        old="u = beta[..., None] * (v - read(S, k))",
        new="u = beta[..., None] * (v - read(S / fade[..., None], k))",
        breaks="The correction is taken against the state before its decay.",
        imitates="https://github.com/vllm-project/vllm/issues/43301",
        passes="flashinfer-bench",
        operators=BOTH,
        fault=9,
    ),
    Mutant(
        id="kda_state_in_bfloat16",
        file=STEP,
        old="pool[slot[kept]] = states[kept].transpose(-1, -2).to(pool.dtype)",
        new="pool[slot[kept]] = states[kept].transpose(-1, -2).to(torch.bfloat16).to(pool.dtype)",
        breaks="The state is rounded to bfloat16 when it is stored, a rounding that is not declared.",
        imitates="https://github.com/vllm-project/vllm/issues/43301",
        passes="fla",
        operators=BOTH,
    ),
    Mutant(
        id="kda_padding_advances_slot_0",
        file=ROWS,
        old="return wide.where((wide >= 0) & (wide < size), -1)",
        new="return wide.clamp(min=0).where(wide < size, -1)",
        breaks="A padding row's slot of -1 is clamped to 0, and advances the request that lives there.",
        imitates="https://github.com/lightseekorg/tokenspeed/pull/700",
        passes="fla",
        operators=(*RECURRENT, "kda_conv"),
        fault=3,
    ),
    Mutant(
        id="kda_slot_0_is_padding",
        file=ROWS,
        old="return wide.where((wide >= 0) & (wide < size), -1)",
        new="return wide.where((wide > 0) & (wide < size), -1)",
        breaks="Slot 0 is taken for the null slot: the request in it gets zeros and never advances.",
        imitates="https://github.com/weicj/vLLM-2080Ti-Definitive/pull/93",
        passes="fla",
        operators=(*BOTH, "kda_conv"),
        fault=3,
    ),
    Mutant(
        id="kda_slot_strides_ignored",
        file=ROWS,
        old="wide = ids.long()",
        new="wide = torch.as_strided(ids, ids.shape, (1,)).long()",
        breaks="A column of a table of slots is read as if it were contiguous.",
        imitates="https://github.com/vllm-project/vllm/issues/52792",
        passes="fla",
        operators=("kda_decode",),
        fault=23,
    ),
    Mutant(
        id="kda_skipped_result_in_last_slot",
        file=STEP,
        old="    kept = slot >= 0\n    pool[slot[kept]] = states[kept].transpose(-1, -2).to(pool.dtype)",
        new="    kept = slot >= -1\n    pool[slot[kept]] = states[kept].transpose(-1, -2).to(pool.dtype)",
        breaks="What is to be stored nowhere goes to the last slot.",
        imitates="https://github.com/vllm-project/vllm/issues/43810",
        passes="fla",
        operators=("kda_prefill",),
        fault=3,
    ),
    Mutant(
        id="kda_empty_sequence_resets",
        file=KDA,
        old="save(state, slot.where(length > 0, -1), states)",
        new="save(state, slot, states)",
        breaks="An empty sequence without an initial state clears its slot.",
        imitates="https://github.com/meta-pytorch/attention-gym/pull/317",
        passes="fla",
        operators=("kda_prefill",),
        fault=12,
    ),
    Mutant(
        id="kda_rows_behind_last_sequence",
        file=ROWS,
        old="bounds = cu_seqlens.long().clamp(0, rows)",
        new=(
            "bounds = torch.cat((cu_seqlens[:-1].long().clamp(0, rows), cu_seqlens.new_full((1,), "
            "rows).long()))"
        ),
        breaks="Padding rows behind the last sequence are taken for its own.",
        imitates="https://github.com/flashserve/flash-linear-attention-npu/pull/266",
        passes="fla",
        operators=("kda_prefill", "kda_conv"),
        fault=12,
    ),
    Mutant(
        id="kda_checkpoint_one_token_early",
        file=ROWS,
        old="count = counts.long()",
        new="count = counts.long() - 1",
        breaks="A checkpoint holds the state of one token before its offset.",
        imitates="https://github.com/raullenchai/Rapid-MLX/pull/14",
        passes="fla",
        operators=("kda_prefill", "kda_conv"),
        fault=10,
    ),
    Mutant(
        id="kda_chunk_tail_dropped",
        file=STEP,
        old="longest, width = max(rows_of, default=0), tokens.spec.num_heads * tokens.spec.head_dim",
        new="longest, width = max(rows_of, default=0) // 64 * 64 or max(rows_of, default=0), "
        "tokens.spec.num_heads * tokens.spec.head_dim",
        breaks="Rows behind the last whole chunk of 64 are not computed.",
        imitates="https://github.com/fla-org/flash-linear-attention/issues/1142",
        passes="fla",
        operators=("kda_prefill",),
        fault=9,
    ),
)

CONVOLUTION = (
    Mutant(
        id="conv_history_newest_first",
        file=CONV,
        old="past[live] = by_width(spec, conv_state)[slot[live]]",
        new="past[live] = by_width(spec, conv_state)[slot[live]].flip(1)",
        breaks="The inputs before a sequence are read newest first.",
        imitates="https://github.com/vllm-project/vllm/issues/52909",
        passes="fla",
        operators=("kda_conv",),
        fault=13,
    ),
    Mutant(
        id="conv_fresh_history_read",
        file=CONV,
        old="empty = slot < 0 if fresh is None else fresh | (slot < 0)",
        new="empty = slot < 0",
        breaks="A request without an initial state is convolved with the inputs of the one before it.",
        imitates="https://github.com/ggml-org/llama.cpp/issues/29092",
        passes="fla",
        operators=("kda_conv",),
        fault=10,
    ),
    Mutant(
        id="conv_layout_ignored",
        file=CONV,
        old='return conv_state if spec.conv_layout == "width_channel" else conv_state.transpose(1, 2)',
        new="return conv_state.view(conv_state.shape[0], spec.conv_width - 1, spec.channels)",
        breaks="A channel-major conv state is read as a width-major one of the same size.",
        imitates="https://github.com/ROCm/aiter/issues/3291",
        passes="fla",
        operators=("kda_conv",),
        fault=13,
    ),
    Mutant(
        id="conv_short_sequence_forgets",
        file=CONV,
        old="found = self.past[sequence, place.clamp(max=-1) + width].to(self.x.dtype)",
        new=(
            "found = self.past[sequence, place.clamp(max=-1) + width].to(self.x.dtype).where((place >= "
            "1 - width)[:, None], 0.0)"
        ),
        breaks="The oldest input before a sequence is taken for zero.",
        imitates="https://github.com/fla-org/flash-linear-attention/issues/88",
        passes="fla",
        operators=("kda_conv",),
        fault=9,
    ),
)

SPECULATION = (
    Mutant(
        id="verify_advances_state",
        file=KDA,
        old="_recorded(tokens, x, u, start, length).write(records, part)",
        new=(
            "_recorded(tokens, x, u, start, length).write(records, part), save(state, runs.slot[part], "
            "states)"
        ),
        breaks="A verify leaves the speculated rows in the state.",
        imitates="https://github.com/sgl-project/sglang/pull/26206",
        passes="fla",
        operators=("kda_verify",),
        fault=10,
    ),
    Mutant(
        id="kda_conv_taps_in_bfloat16",
        file=CONV,
        old="taps = weight.to(dtype).unbind(1)",
        new="taps = weight.bfloat16().to(dtype).unbind(1)",
        breaks="Float32 taps are rounded to bfloat16 before they are multiplied.",
        imitates="https://github.com/vllm-project/vllm/issues/52887",
        passes="fla",
        operators=("kda_conv",),
    ),
    Mutant(
        id="verify_in_wider_convolution",
        file=KDA,
        old="q, k, v = y.to(torch.bfloat16).view(-1, 3, spec.num_heads, spec.head_dim).unbind(1)",
        new=(
            "q, k, v = y.to(torch.float16).view(-1, 3, spec.num_heads, "
            "spec.head_dim).to(torch.bfloat16).unbind(1)"
        ),
        breaks="The convolution inside a verify rounds twice, and not as the convolution of a decode.",
        imitates="https://github.com/vllm-project/vllm/issues/43301",
        passes="fla",
        operators=("kda_verify", "kda_commit"),
        fault=9,
    ),
    Mutant(
        id="commit_one_row_too_many",
        file=KDA,
        old="length = accepted.long().clamp(0, room(spec, buffer, dtype)).where(slot >= 0, 0)",
        new="length = (accepted.long() + 1).clamp(0, room(spec, buffer, dtype)).where(slot >= 0, 0)",
        breaks="The token that follows the accepted drafts is committed although it was not verified.",
        imitates="https://github.com/raullenchai/Rapid-MLX/pull/14",
        passes="fla",
        operators=("kda_commit",),
        fault=10,
    ),
    Mutant(
        id="commit_ignores_out_ids",
        file=KDA,
        old="target = slot if out_ids is None else in_range(out_ids, slots).where(slot >= 0, -1)",
        new="target = slot",
        breaks="The result goes to the slot it started from, whatever slot was to receive it.",
        imitates="https://github.com/vllm-project/vllm/issues/53142",
        passes="fla",
        operators=("kda_commit",),
        fault=10,
    ),
    Mutant(
        id="commit_conv_state_of_verify_end",
        file=KDA,
        old="ends = ((saved[part], count[part]), (target[part], length[part]))",
        new="ends = ((saved[part], count[part]), (target[part], length[part] * 0 + found.x.shape[1]))",
        breaks="The conv state after a commit is that of all recorded rows, accepted or not.",
        imitates="https://github.com/Luce-Org/lucebox/pull/210",
        passes="fla",
        operators=("kda_commit",),
        fault=10,
    ),
    Mutant(
        id="commit_layers_share_gate",
        file=KDA,
        old="(A_logs[layer], dt_biases[layer])",
        new="(A_logs[0], dt_biases[0])",
        breaks="Every layer is committed with the gate of the first.",
        imitates="https://github.com/inclusionAI/cuLA/pull/43",
        passes="fla",
        operators=("kda_commit",),
    ),
)

add(GATES)
add(STEPS)
add(CONVOLUTION)
add(SPECULATION)
