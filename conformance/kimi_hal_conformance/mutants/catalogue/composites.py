"""Mutants of the composites and of what a layer's ranks exchange."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

REFERENCE = "reference/composites.py"
EXCHANGE = "parallel/exchange.py"

MUTANTS = (
    Mutant(
        id="layer_norm_before_sum",
        file=REFERENCE,
        old='y = whole(parts["moe_experts"](z, *routes, experts, **more.get("moe_experts", {})))',
        new='y = parts["moe_experts"](z, *routes, experts, **more.get("moe_experts", {})).to(wide)',
        breaks="Each rank normalises its own partial sum.",
        imitates="https://github.com/vllm-project/vllm/pull/45683",
        passes="cosine",
        operators=("moe_layer",),
    ),
    Mutant(
        id="layer_shared_experts_not_summed",
        file=REFERENCE,
        old="shared = whole(project(activate(spec.experts, first, second), shared_w2))",
        new="shared = project(activate(spec.experts, first, second), shared_w2).to(wide)",
        breaks="The shared experts' partial sums stay on their ranks.",
        imitates="https://github.com/vllm-project/vllm/pull/45683",
        passes="cosine",
        operators=("moe_layer",),
    ),
    Mutant(
        id="layer_padding_normalised",
        file=REFERENCE,
        old="return result if num_tokens is None else padded(result, num_tokens)",
        new="return result",
        breaks="Padding rows hold the shared experts' output.",
        imitates="https://github.com/trymirai/lalamo/pull/310",
        passes="cosine",
        operators=("moe_layer",),
        fault=3,
    ),
    Mutant(
        id="layer_padding_times_nan",
        file=REFERENCE,
        old=(
            "return gated_rms_norm(o, norm, out_gate, spec.norm_eps, dtype).masked_fill(~live[:, None, "
            "None], 0.0)"
        ),
        new="return gated_rms_norm(o, norm, out_gate, spec.norm_eps, dtype)",
        breaks="A padding row's zeros are multiplied by its gate, which may be NaN.",
        imitates="https://github.com/lightseekorg/tokenspeed/pull/700",
        passes="fla",
        operators=("kda_layer_decode",),
        fault=3,
    ),
    Mutant(
        id="layer_ranks_summed_in_bfloat16",
        file=EXCHANGE,
        old="added = added + part",
        new="added = (added + part).bfloat16().to(part.dtype)",
        breaks="The sum of the ranks is rounded to bfloat16 after each of them.",
        imitates="https://github.com/mlc-ai/TIRx-kernels/pull/208",
        passes="cosine",
        operators=("moe_layer",),
    ),
    Mutant(
        id="layer_gate_in_bfloat16",
        file="reference/kda.py",
        old="sigmoid(gate.to(dtype))",
        new="sigmoid(gate.bfloat16().to(dtype))",
        breaks="A float32 gate is rounded to bfloat16 before its sigmoid.",
        imitates="https://github.com/sgl-project/sglang/pull/40362",
        passes="fla",
        operators=("kda_layer_decode",),
    ),
    Mutant(
        id="layer_norm_eps_on_sum",
        file="reference/kda.py",
        old="return wide * torch.rsqrt(mean + eps)[..., None] * weight.to(dtype) * sigmoid(gate.to(dtype))",
        new=(
            "return wide * torch.rsqrt(mean + eps / x.shape[-1])[..., None] * weight.to(dtype) * "
            "sigmoid(gate.to(dtype))"
        ),
        breaks="The norm's epsilon is added to the sum of squares and not to their mean.",
        imitates="https://github.com/ml-explore/mlx-lm/pull/1624",
        passes="cosine",
        operators=("kda_layer_decode",),
    ),
    Mutant(
        id="layer_norm_eps_constant",
        file=REFERENCE,
        old="out_gate, spec.norm_eps, dtype)",
        new="out_gate, 1e-5, dtype)",
        breaks="The norm's epsilon is a constant, whatever the Spec says.",
        imitates="https://github.com/apache/tvm/pull/15856",
        passes="fla",
        operators=("kda_layer_decode",),
    ),
    Mutant(
        id="dsa_heads_interleaved",
        file=EXCHANGE,
        old="return group.all_gather(q).transpose(0, 1).flatten(1, 2)",
        new="return group.all_gather(q).permute(1, 2, 0, 3).flatten(1, 2)",
        breaks="The gathered heads of all ranks alternate instead of standing in rank order.",
        imitates="https://github.com/vllm-project/vllm/pull/29887",
        passes="flashmla",
        operators=("dsa_decode",),
        areas=("exchange",),
    ),
    Mutant(
        id="dsa_own_heads_by_first_rank",
        file=EXCHANGE,
        old="mine = slice(rank * out.shape[1] // world, (rank + 1) * out.shape[1] // world)",
        new="mine = slice(0, out.shape[1] // world)",
        breaks="Every rank cuts out the heads of rank 0 when it gets the parts back whole.",
        imitates="https://github.com/vllm-project/vllm/pull/29887",
        passes="flashmla",
        operators=("dsa_decode",),
        areas=("exchange",),
    ),
    Mutant(
        id="dsa_message_not_padded",
        file=EXCHANGE,
        old="start += _padded(piece[0].nbytes)",
        new="start += piece[0].nbytes // ALIGN * ALIGN",
        breaks="The LSEs are looked for where an output of whole alignments would end.",
        imitates="https://github.com/ROCm/mori/pull/559",
        passes="flashmla",
        areas=("exchange",),
        fault=24,
    ),
    Mutant(
        id="sum_begins_at_own_rank",
        file=EXCHANGE,
        old="parts = group.all_gather(x[piece])",
        new="parts = group.all_gather(x[piece]).roll(-group.rank(), 0)",
        breaks="Each rank adds from itself on, so that the ranks' sums differ in their last bits.",
        imitates="https://github.com/vllm-project/vllm/issues/51290",
        passes="cosine",
        areas=("exchange",),
        fault=24,
    ),
    Mutant(
        id="dsa_count_of_winners_ignored",
        file=REFERENCE,
        old='indices, count, _ = call("topk_merge", scores, indices, row_len)',
        new='_, count, _ = call("topk_merge", scores, indices, row_len)',
        breaks="A rank attends to its own best keys and not to its share of the group's.",
        imitates="https://github.com/vllm-project/vllm/issues/41623",
        passes="flashmla",
        operators=("dsa_decode",),
        fault=11,
    ),
)

add(MUTANTS)
