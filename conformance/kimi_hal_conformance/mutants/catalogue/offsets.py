"""Mutants whose product of an index and a stride is formed in 32 bits (fault class 8), one an access.

What wraps is taken modulo the buffer, so that it is read or written somewhere and nothing dies of it.
"""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

PAGES = "https://github.com/sgl-project/sglang/pull/34725"
SCRATCH = "https://github.com/sgl-project/sglang/pull/38851"
ROWS = "https://github.com/ROCm/aiter/pull/4244"
MLA, INDEX = "reference/sparse_mla.py", "reference/indexer.py"
STEP, CONV = "reference/recurrence.py", "reference/convolution.py"

CACHES = (
    Mutant(
        id="latent_store_offset_in_32_bits",
        file=MLA,
        old="fmt.write(cache, spec.page, slots[part][keep], latent, pe, k_scale)",
        new=(
            "fmt.write(cache, spec.page, (slots[part][keep] * fmt.row_bytes).int().long() // fmt.row_bytes "
            "% (len(cache) * spec.page), latent, pe, k_scale)"
        ),
        breaks="The byte offset of a slot is formed in 32 bits: a latent is written elsewhere.",
        imitates=PAGES,
        passes="flashmla",
        operators=("store_latent",),
        fault=8,
    ),
    Mutant(
        id="latent_read_offset_in_32_bits",
        file=MLA,
        old="return torch.where(index < cache.shape[0] * spec.page, index, -1)",
        new=(
            "row = formats.latent(spec.latent).row_bytes; far = (index * row).int().long() // row "
            "% (len(cache) * spec.page); return torch.where(index < cache.shape[0] * spec.page, "
            "far.where(index >= 0, -1), -1)"
        ),
        breaks="The byte offset of a selected slot is formed in 32 bits: another latent is read.",
        imitates=SCRATCH,
        passes="flashmla",
        operators=("sparse_mla", "dsa_decode"),
        fault=8,
    ),
    Mutant(
        id="latent_read_offset_unsigned",
        file=MLA,
        old="return torch.where(index < cache.shape[0] * spec.page, index, -1)",
        new=(
            "row = formats.latent(spec.latent).row_bytes; far = (index * row) % (1 << 32) // row; "
            "return torch.where(index < cache.shape[0] * spec.page, far.where(index >= 0, -1), -1)"
        ),
        breaks="The byte offset of a selected slot is unsigned and of 32 bits: right to 2^32, another's behind it.",
        imitates=SCRATCH,
        passes="flashmla",
        operators=("sparse_mla", "dsa_decode"),
        fault=8,
    ),
    Mutant(
        id="index_store_offset_in_32_bits",
        file=INDEX,
        old="fmt.write(cache, slots[live], k[: slots.shape[0]][live].float())",
        new=(
            "fmt.write(cache, (slots[live] // fmt.page * fmt.page_bytes).int().long() // fmt.page_bytes "
            "% len(cache) * fmt.page + slots[live] % fmt.page, k[: slots.shape[0]][live].float())"
        ),
        breaks="The byte offset of a page is formed in 32 bits: a key is written elsewhere.",
        imitates=PAGES,
        passes="deepgemm",
        operators=("store_index_keys",),
        fault=8,
    ),
)

STATES = (
    Mutant(
        id="state_read_offset_in_32_bits",
        file=STEP,
        old="states = pool[slot].to(dtype)",
        new=(
            "step = pool.stride(0); states = pool[(slot * step).int().long() // step % len(pool)].to(dtype)"
        ),
        breaks="The offset of a state is formed in 32 bits: another request's state is read.",
        imitates=PAGES,
        passes="fla",
        operators=("kda_decode", "kda_prefill", "kda_verify", "kda_layer_decode"),
        fault=8,
    ),
    Mutant(
        id="state_write_offset_in_32_bits",
        file=STEP,
        old="pool[slot[kept]] = states[kept]",
        new=(
            "step = pool.stride(0); pool[(slot[kept] * step).int().long() // step % len(pool)] = states[kept]"
        ),
        breaks="The offset of a state is formed in 32 bits: another request's state is overwritten.",
        imitates=PAGES,
        passes="fla",
        operators=("kda_decode", "kda_prefill", "kda_layer_decode"),
        fault=8,
    ),
    Mutant(
        id="history_offset_in_32_bits",
        file=CONV,
        old="past[live] = by_width(spec, conv_state)[slot[live]]",
        new=(
            "step = conv_state.stride(0); past[live] = by_width(spec, conv_state)[(slot[live] * step).int().long() "
            "// step % len(conv_state)]"
        ),
        breaks="The offset of a convolution's history is formed in 32 bits.",
        imitates=PAGES,
        passes="fla",
        operators=("kda_conv", "kda_verify", "kda_layer_decode"),
        fault=8,
    ),
)

LINES = (
    Mutant(
        id="scores_row_offset_in_32_bits",
        file="reference/selection.py",
        old="picked[rows] = _select(scores[rows], first[rows], count[rows], k, score)",
        new=(
            "line = [n if n * scores.stride(0) < 1 << 31 else 0 for n in range(len(scores))][rows]; "
            "picked[rows] = _select(scores[line], first[rows], count[rows], k, score)"
        ),
        breaks="The offset of a row of scores is formed in 32 bits: rows behind it select from another's scores.",
        imitates=ROWS,
        passes="sorted-scores",
        operators=("topk_select",),
        fault=8,
    ),
    Mutant(
        id="logits_rows_dropped_behind_2_to_the_31",
        file=INDEX,
        old="out[row, :kept] = line[:kept]",
        new="out[row, :kept] = line[:kept] if row * out.stride(0) < 1 << 31 else out[row, :kept]",
        breaks="Rows of scores whose offset does not fit 32 bits are never stored.",
        imitates=ROWS,
        passes="deepgemm",
        operators=("indexer_logits",),
        fault=8,
    ),
    Mutant(
        id="part_offset_in_32_bits",
        file=MLA,
        old="for weight, logit, piece in zip(weights, clean, outs[:, part], strict=True):",
        new=(
            "for weight, logit, piece in zip(weights, clean, outs[[m if m * outs.stride(0) < 1 << 31 else 0 "
            "for m in range(len(outs))]][:, part], strict=True):"
        ),
        breaks="The offset of a part is formed in 32 bits: the first part's output stands for it.",
        imitates=ROWS,
        passes="flashmla",
        operators=("merge_attn_states",),
        fault=8,
    ),
    Mutant(
        id="router_row_offset_in_32_bits",
        file="reference/moe.py",
        old="weights[part], ids[part] = _route(spec, logits[part], bias, dtype)",
        new=(
            "near = [n if n * logits.stride(0) < 1 << 31 else 0 for n in range(rows)][part]; "
            "weights[part], ids[part] = _route(spec, logits[near], bias, dtype)"
        ),
        breaks="The offset of a row of logits is formed in 32 bits: rows behind it get another's experts.",
        imitates=ROWS,
        passes="set",
        operators=("moe_route",),
        fault=8,
    ),
)

add(CACHES)
add(STATES)
add(LINES)
