"""Mutants of the index query, the index-key store, the scores and the fused selection."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

REFERENCE = "reference/indexer.py"
SCORES = ("indexer_logits", "indexer_topk")
STORE = ("store_index_keys",)

MUTANTS = (
    Mutant(
        id="index_page_of_one_request",
        file=REFERENCE,
        old="            yield Part(some, [counts[row] for row in some], block_table[request].long())",
        new=(
            "            yield Part(some, [counts[row] for row in some], block_table[request].where("
            "~torch.isin(block_table[request], block_table[:request]), -1).long())"
        ),
        breaks="A page that an earlier request names too is missing for a later one.",
        imitates="https://github.com/Wenyueh/MinivLLM/pull/98",
        passes="flashmla",
        operators=(*SCORES, "dsa_decode"),
    ),
    Mutant(
        id="index_relu_swallows_nan",
        file=REFERENCE,
        old="terms = dots.relu().to(weight.dtype) * weight[:, None]",
        new="terms = dots.where(dots > 0, 0.0).to(weight.dtype) * weight[:, None]",
        breaks="The rectifier is a maximum with 0 that drops NaN, so that a broken key scores 0.",
        imitates="https://github.com/sgl-project/sglang/pull/37970",
        passes="deepgemm",
        operators=SCORES,
        fault=19,
    ),
    Mutant(
        id="index_scale_of_padded_heads",
        file=REFERENCE,
        old="folded = weights.to(dtype) * spec.folded_scale",
        new=(
            "folded = weights.to(dtype) * spec.folded_scale * (spec.num_heads / (-(-spec.num_heads // "
            "32) * 32)) ** 0.5"
        ),
        breaks="The scale that is folded into the weights is that of the head count padded to 32.",
        imitates="https://github.com/sgl-project/sglang/pull/32738",
        passes="flashmla",
        operators=("quantize_index_query",),
        fault=15,
    ),
    Mutant(
        id="index_query_scale_not_folded",
        file=REFERENCE,
        old=(
            "return encoded, encoded.new_empty((*weights.shape, 0), dtype=torch.uint8), folded * "
            "scale.to(dtype)"
        ),
        new=(
            "return encoded, encoded.new_empty((*weights.shape, 0), dtype=torch.uint8), folded * "
            "scale[..., :1].to(dtype)"
        ),
        breaks="Every head's weight is folded with the query scale of the first head.",
        imitates="https://github.com/vllm-project/vllm/pull/29887",
        passes="flashinfer-bench",
        operators=("quantize_index_query",),
    ),
    Mutant(
        id="index_hadamard_ignored",
        file=REFERENCE,
        old="turned = hadamard(q.to(dtype)) if spec.hadamard else q",
        new="turned = q",
        breaks="A flag of the model is not read: queries are not turned as the cached keys were.",
        imitates="https://github.com/lablup/mlxcel/pull/583",
        passes="flashmla",
        operators=("quantize_index_query",),
    ),
    Mutant(
        id="index_bound_in_local_positions",
        file=REFERENCE,
        old="keys = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))",
        new="keys = row_len.long().clamp(min=0) // ownership.of_keys(spec.dcp).world",
        breaks="The causal bound of a rank is the global one divided, not the number of its own positions.",
        imitates="https://github.com/lightseekorg/tokenspeed/pull/364",
        passes="deepgemm",
        operators=SCORES,
        fault=11,
    ),
    Mutant(
        id="index_missing_page_read",
        file=REFERENCE,
        old="missing = (page < 0) | (page >= cache.shape[0])",
        new="page, missing = page % cache.shape[0], page >= cache.shape[0]",
        breaks="A page of -1 is dereferenced as the last page.",
        imitates="https://github.com/radixark/miles/pull/2079",
        passes="deepgemm",
        operators=SCORES,
    ),
    Mutant(
        id="index_slot_of_a_page_beyond",
        file=REFERENCE,
        old="live = (index >= 0) & (page >= 0) & (page < cache.shape[0])",
        new="live = (index >= 0) & (page >= 0)",
        breaks="A selected key behind an entry that names a page beyond the cache gets the slot of that page.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/4898",
        passes="deepgemm",
        operators=("indexer_topk",),
    ),
    Mutant(
        id="index_page_below_minus_1_read",
        file=REFERENCE,
        old="missing = (page < 0) | (page >= cache.shape[0])",
        new="page, missing = page.where(page >= -1, 0), (page == -1) | (page >= cache.shape[0])",
        breaks="Only a page of -1 is taken for none: one of -2 is dereferenced.",
        imitates="https://github.com/radixark/miles/pull/2079",
        passes="deepgemm",
        operators=SCORES,
    ),
    Mutant(
        id="index_tail_not_stored",
        file=REFERENCE,
        old="kept = min(count, out.shape[1])",
        new="kept = min(count // 64 * 64 or count, out.shape[1])",
        breaks="The scores of a row's last, partly filled page are never stored.",
        imitates="https://github.com/ROCm/aiter/pull/4244",
        passes="deepgemm",
        operators=("indexer_logits",),
        fault=8,
    ),
    Mutant(
        id="index_lone_key_of_a_page_dropped",
        file=REFERENCE,
        old="counts = keys.clamp(max=room if width is None else min(room, width)).tolist()",
        new=(
            "counts = (keys - (keys % spec.page == 1).long()).clamp(0, room if width is None else "
            "min(room, width)).tolist()"
        ),
        breaks="A page that holds one key alone is not reached: the number of pages is rounded down.",
        imitates="https://github.com/inclusionAI/cuLA/pull/43",
        passes="deepgemm",
        operators=SCORES,
        fault=9,
    ),
    Mutant(
        id="index_slot_offset_in_32_bits",
        file=REFERENCE,
        old="slots = page * fmt.page + position % fmt.page",
        new=(
            "slots = ((page * fmt.page_bytes).int() // fmt.page_bytes).long() % cache.shape[0] * fmt.page + position % "
            "fmt.page"
        ),
        breaks="A page's byte offset is formed in 32 bits and wraps at 2^31.",
        imitates="https://github.com/sgl-project/sglang/pull/34725",
        passes="deepgemm",
        operators=(*SCORES, "dsa_decode"),
        areas=("offsets",),
        fault=8,
    ),
    Mutant(
        id="index_emits_positions_as_slots",
        file=REFERENCE,
        old="slots = torch.where(live, page * spec.page + index % spec.page, -1)",
        new="slots = torch.where(live, page * spec.page + index, -1)",
        breaks="A slot is the page plus the position in the request, not in the page.",
        imitates="https://github.com/guqiong96/Lvllm/issues/109",
        passes="deepgemm",
        operators=("indexer_topk",),
        fault=23,
    ),
    Mutant(
        id="index_slots_leave_gaps",
        file=REFERENCE,
        old="order = (~live).int().argsort(dim=1, stable=True)",
        new="order = (~live).int().argsort(dim=1, stable=True).sort(dim=1).values",
        breaks="Where a selected key has no page, -1 stands between the slots of others.",
        imitates="https://github.com/vllm-project/vllm/pull/25945",
        passes="deepgemm",
        operators=("indexer_topk",),
        fault=7,
    ),
    Mutant(
        id="index_pages_of_a_length_overflow",
        file=REFERENCE,
        old="keys = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))",
        new=(
            "keys = torch.minimum(n := ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp)), "
            "(n + spec.page - 1).int().long() // spec.page * spec.page)"
        ),
        breaks="A length's pages are counted as (length + page - 1) / page in 32 bits, which wraps near 2^31.",
        imitates="https://github.com/tensorflow/tensorflow/pull/127118",
        passes="deepgemm",
        operators=SCORES,
        fault=7,
    ),
    Mutant(
        id="index_positions_in_16_bits",
        file=REFERENCE,
        old="best = selection.scores_at(scores, picked)",
        new="best = selection.scores_at(scores, picked := (picked + 1) % (1 << 16) - 1)",
        breaks="Selected positions are kept in 16 bits: from 65,535 on they are another key's.",
        imitates="https://github.com/vllm-project/vllm/pull/30754",
        passes="deepgemm",
        operators=("indexer_topk",),
        fault=9,
    ),
    Mutant(
        id="index_scores_of_float32",
        file=REFERENCE,
        old="scores = selection.as_score(scores, getattr(torch, spec.score))",
        new="scores = scores.float()",
        breaks="The fused selection keeps float32 scores where the Spec says that they are rounded to bfloat16.",
        imitates="https://github.com/vllm-project/vllm-ascend/pull/15053",
        passes="deepgemm",
        operators=("indexer_topk",),
        fault=5,
    ),
    Mutant(
        id="index_padding_writes_last_slot",
        file=REFERENCE,
        old="live = (slots >= 0) & (slots < cache.shape[0] * fmt.page)",
        new=(
            "live = (slots := slots.where(slots >= 0, cache.shape[0] * fmt.page - 1)) "
            "< cache.shape[0] * fmt.page"
        ),
        breaks="A slot of -1 is a Python-style index: the last key of the cache is overwritten.",
        imitates="https://github.com/vllm-project/vllm/issues/43810",
        passes="flashmla",
        operators=STORE,
        fault=3,
    ),
)

add(MUTANTS)
