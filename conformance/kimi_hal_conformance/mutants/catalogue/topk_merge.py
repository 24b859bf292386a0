"""Mutants of selection and of its merge over ranks."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

ORDER = "reference/selection.py"
SELECT = "reference/topk_merge.py"
PROTOCOLS = "reference/protocols.py"
EVERY = ("topk_select", "topk_merge", "indexer_topk")
ALONE = ("topk_select", "indexer_topk")
MERGE = ("topk_merge",)

#: The keys of a row that tie with the k-th, or share its leading 16 bits, counted from the left.
CAPPED = (
    "best(key.masked_fill((near := (key >> {bits}) == (best(key, k)[:, -1:] >> {bits})) & "
    "(near.cumsum(1) > {cap}), NO_KEY), k)"
)

ORDERS = (
    Mutant(
        id="select_ties_to_larger",
        file=ORDER,
        old="taken = key.topk(min(k, key.shape[-1]), dim=-1).values",
        new="taken = (key ^ LAST).topk(min(k, key.shape[-1]), dim=-1).values ^ LAST",
        breaks="Equal scores go to the larger position.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="sorted-scores",
        operators=EVERY,
        fault=5,
    ),
    Mutant(
        id="select_tie_buffer_of_1024",
        file=ORDER,
        old="return ascending(positions(best(key, k)))",
        new=f"return ascending(positions({CAPPED.format(bits=32, cap=1024)}))",
        breaks="No more than 1,024 keys that tie with the k-th are kept; -1 stands for the others.",
        imitates="https://github.com/sgl-project/sglang/pull/30645",
        passes="sorted-scores",
        operators=ALONE,
        fault=5,
    ),
    Mutant(
        id="select_bin_of_4096",
        file=ORDER,
        old="return ascending(positions(best(key, k)))",
        new=f"return ascending(positions({CAPPED.format(bits=48, cap=4096)}))",
        breaks="Keys beyond the first 4,096 whose scores share their leading 16 bits with the k-th are lost.",
        imitates="https://github.com/vllm-project/vllm/pull/55314",
        passes="sorted-scores",
        operators=ALONE,
        fault=6,
    ),
    Mutant(
        id="select_nan_above_inf",
        file=ORDER,
        old="return ordered.masked_fill_(torch.isnan(scores), NAN)",
        new="return ordered",
        breaks="NaN ranks by its bits: a positive one above +inf.",
        imitates="https://github.com/sgl-project/sglang/pull/37970",
        passes="sorted-scores",
        operators=EVERY,
        fault=19,
    ),
    Mutant(
        id="select_minus_zero_below_zero",
        file=ORDER,
        old="ordered.masked_fill_(bits == MINUS_ZERO, 0)",
        new="ordered.masked_fill_(bits == MINUS_ZERO, -1)",
        breaks="-0 ranks below +0, so that the tie rule does not decide between them.",
        imitates="https://github.com/vllm-project/vllm/pull/47348",
        passes="sorted-scores",
        operators=EVERY,
        fault=19,
    ),
    Mutant(
        id="select_row_start_ignored",
        file=ORDER,
        old="if starts is None else starts.long()",
        new="if starts is None else torch.zeros_like(starts, dtype=torch.int64)",
        breaks="A row's window begins at its first column.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/4421",
        passes="sorted-scores",
        operators=("topk_select",),
        fault=7,
    ),
    Mutant(
        id="select_one_key_too_many",
        file=ORDER,
        old="column.masked_fill_(column >= count[:, None], -1)",
        new="column.masked_fill_(column > count[:, None], -1)",
        breaks="The column behind a row's last key is a key.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/4421",
        passes="sorted-scores",
        operators=ALONE,
        fault=7,
    ),
    Mutant(
        id="select_length_ignored",
        file=ORDER,
        old="column.masked_fill_(column >= count[:, None], -1)",
        new="column.masked_fill_(count[:, None] <= 0, -1)",
        breaks="The stale tail of a row of scores is selected from.",
        imitates="https://github.com/vllm-project/vllm/pull/33568",
        passes="sorted-scores",
        operators=("topk_select",),
        fault=4,
    ),
    Mutant(
        id="select_bfloat16_by_truncation",
        file=ORDER,
        old="return scores.to(torch.float32).to(score)",
        new=(
            "return (scores.float().view(torch.int32) & (-1 if score == torch.float32 else "
            "-65536)).view(torch.float32).to(score)"
        ),
        breaks="Scores become bfloat16 by cutting bits off.",
        imitates="https://github.com/FlashML-org/FreeToken/pull/103",
        passes="sorted-scores",
        operators=ALONE,
    ),
    Mutant(
        id="select_bfloat16_rounded_twice",
        file=ORDER,
        old="return scores.to(torch.float32).to(score)",
        new="return scores.to(torch.float32 if score == torch.float32 else torch.float16).to(score)",
        breaks="Scores become float16 on their way to bfloat16: they are rounded twice, and overflow.",
        imitates="https://github.com/FlashML-org/FreeToken/pull/103",
        passes="sorted-scores",
        operators=ALONE,
    ),
    Mutant(
        id="select_minus_one_inside",
        file=ORDER,
        old="ordered = index.masked_fill(index < 0, top).sort(dim=-1).values",
        new=(
            "ordered = index.masked_fill(index < 0, 0).sort(dim=-1).values.masked_fill((index < "
            "0).sort(dim=-1, descending=True).values, top)"
        ),
        breaks="Unused entries stand in front of the selected positions.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="sorted-scores",
        operators=EVERY,
        fault=5,
    ),
    Mutant(
        id="select_end_overflows",
        file=ORDER,
        old="return first, torch.minimum(lengths.long(), width - first).clamp(min=0)",
        new=(
            "return first, ((first + lengths.clamp(min=0)).int().long().clamp(max=width) - first).clamp(min=0)"
        ),
        breaks="The end of a row's window is its start plus its length in 32 bits, which wraps near 2^31.",
        imitates="https://github.com/deepseek-ai/DeepSelect/pull/2",
        passes="sorted-scores",
        operators=("topk_select",),
        fault=7,
    ),
    Mutant(
        id="select_local_length_floored",
        file=SELECT,
        old="lengths = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))",
        new="lengths = row_len.long() // ownership.of_keys(spec.dcp).world",
        breaks="A rank's number of keys is the global length divided, rounded down.",
        imitates="https://github.com/lightseekorg/tokenspeed/pull/364",
        passes="sorted-scores",
        operators=("topk_select",),
        fault=11,
    ),
)

MERGES = (
    Mutant(
        id="merge_ids_as_float32",
        file=PROTOCOLS,
        old="sent = torch.stack((ordinals, position.int()), dim=-1)",
        new="sent = torch.stack((ordinals, position.float().int()), dim=-1)",
        breaks="Global positions travel as float32, which holds integers to 2^24.",
        imitates="https://github.com/vllm-project/vllm/pull/47348",
        passes="set",
        operators=MERGE,
        fault=8,
    ),
    Mutant(
        id="merge_never_sent_again",
        file=PROTOCOLS,
        old="return winners(best), beyond | undecided(key, best, holds)",
        new="return winners(best), beyond",
        breaks="A rank that holds more winners than its quota loses the rest.",
        imitates="https://github.com/vllm-project/vllm/pull/55314",
        passes="set",
        operators=MERGE,
        fault=6,
    ),
    Mutant(
        id="merge_quota_held_not_compared",
        file=PROTOCOLS,
        old="more = (last != NO_KEY) & (held > key.shape[-1])",
        new="more = (last != NO_KEY) & (held > 2 * key.shape[-1])",
        breaks="A rank says that it holds more than it sent only from twice its quota on.",
        imitates="https://github.com/vllm-project/vllm/pull/55314",
        passes="set",
        operators=MERGE,
        fault=6,
    ),
    Mutant(
        id="merge_context_beyond_header",
        file=PROTOCOLS,
        old="beyond = row_len > candidates.CONTEXT",
        new="beyond = row_len > 16 * candidates.CONTEXT",
        breaks="Rows longer than the header's segments reach are packed as if they fitted.",
        imitates="https://github.com/sgl-project/sglang/issues/36807",
        passes="set",
        operators=MERGE,
        fault=8,
    ),
    Mutant(
        id="merge_segment_border",
        file="parallel/candidates.py",
        old="ends = torch.searchsorted(filled, bounds.expand(len(filled), -1).contiguous())",
        new="ends = torch.searchsorted(filled, bounds.expand(len(filled), -1).contiguous(), right=True)",
        breaks="The first position of a segment is counted with the segment before.",
        imitates="https://github.com/sgl-project/sglang/issues/36807",
        passes="set",
        operators=MERGE,
        fault=8,
    ),
    Mutant(
        id="merge_positions_in_15_bits",
        file="parallel/candidates.py",
        old="words = (scores.int() << 16) | (positions.int() & (SEGMENT - 1))",
        new="words = (scores.int() << 16) | (positions.int() & (SEGMENT // 2 - 1))",
        breaks="A candidate's position loses its highest bit.",
        imitates="https://github.com/sgl-project/sglang/issues/36807",
        passes="set",
        operators=MERGE,
        fault=8,
    ),
    Mutant(
        id="merge_padding_scores_zero",
        file=PROTOCOLS,
        old="mine = torch.where(local >= 0, ordinals, none)",
        new="mine = torch.where(local >= 0, ordinals, 0)",
        breaks="Unused candidates travel with a score of 0, which outranks every negative one.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="set",
        operators=MERGE,
        fault=2,
    ),
    Mutant(
        id="merge_ties_kept_by_all",
        file=PROTOCOLS,
        old="return self.ties.sum(dim=0) > self.wanted",
        new="return self.ties.sum(dim=0) < self.wanted.clamp(max=0)",
        breaks="Every rank keeps its keys that tie with the threshold, so that more than k win.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="set",
        operators=MERGE,
        fault=5,
    ),
    Mutant(
        id="merge_ties_rank_major",
        file=PROTOCOLS,
        old="position = torch.where(tied, ownership.position(local, spec.dcp), -1)",
        new="position = torch.where(tied, local + (spec.dcp.rank << 20), -1)",
        breaks="Ties across the cut go to the lower rank and not to the smaller position.",
        imitates="https://github.com/ROCm/ATOM/pull/1832",
        passes="set",
        operators=MERGE,
        fault=5,
    ),
    Mutant(
        id="merge_stale_indices",
        file=SELECT,
        old="torch.where(index < keys[:, None], index, -1).clamp(min=-1)",
        new="index.clamp(min=-1)",
        breaks="Stale entries behind a row's own candidates take part.",
        imitates="https://github.com/tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark/issues/2",
        passes="set",
        operators=MERGE,
        fault=4,
    ),
    Mutant(
        id="merge_interleave_1_in_positions",
        file="parallel/ownership.py",
        old="return index // dcp.interleave * run + dcp.rank * dcp.interleave + index % dcp.interleave",
        new="return index * dcp.world + dcp.rank",
        breaks="Global positions are formed as if the interleave were 1.",
        imitates="https://github.com/ROCm/ATOM/pull/2008",
        passes="set",
        operators=MERGE,
        areas=("ownership",),
        fault=11,
    ),
)

add(ORDERS)
add(MERGES)
