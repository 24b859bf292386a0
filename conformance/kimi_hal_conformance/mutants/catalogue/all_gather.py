"""Mutants of gathering, and of who owns a position."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

REFERENCE = "reference/all_gather.py"
OWNERSHIP = "parallel/ownership.py"
GATHER = ("all_gather",)

MUTANTS = (
    Mutant(
        id="gather_of_vectors_interleaved",
        file="reference/all_gather.py",
        old="return parts.movedim(0, -2).flatten(-2)",
        new="return parts.movedim(0, -2).flatten(-2) if parts.ndim > 2 else parts.T.reshape(-1)",
        breaks="Vectors are put together element by element: only tensors of more dimensions were thought of.",
        imitates="https://github.com/tenstorrent/tt-metal/pull/51239",
        passes="bitwise",
        operators=("all_gather",),
    ),
    Mutant(
        id="gather_interleave_ignored",
        file=REFERENCE,
        old="picked = data[ownership.owner(position, spec.dcp), ownership.local(position, spec.dcp)]",
        new="picked = data[position % world, position // world]",
        breaks="Token order is made as if the interleave were 1.",
        imitates="https://github.com/ROCm/ATOM/pull/2008",
        passes="bitwise",
        operators=GATHER,
        fault=11,
    ),
    Mutant(
        id="gather_last_dim_interleaved",
        file=REFERENCE,
        old="return parts.movedim(0, -2).flatten(-2)",
        new="return parts.movedim(0, -1).flatten(-2)",
        breaks="Along the last dimension the ranks' elements alternate.",
        imitates="https://github.com/vllm-project/vllm/pull/29887",
        passes="bitwise",
        operators=GATHER,
    ),
    Mutant(
        id="gather_total_ignored",
        file=REFERENCE,
        old="return token_order(spec, parts, gathered_rows(spec, x.shape[0], total))",
        new="return token_order(spec, parts, gathered_rows(spec, x.shape[0], None))",
        breaks="A ragged total is not read: padding rows are gathered as tokens.",
        imitates="https://github.com/vllm-project/vllm-ascend/pull/16775",
        passes="bitwise",
        operators=GATHER,
        fault=12,
    ),
    Mutant(
        id="gather_minus_zero_is_not_arrived",
        file=REFERENCE,
        old="parts = require(group, spec.dcp).all_gather(x)",
        new=(
            "parts = require(group, spec.dcp).all_gather(x + 0.0 if x.element_size() > 1 and "
            "x.is_floating_point() else x)"
        ),
        breaks="-0 marks what has not arrived, so that a sender's own -0 is sent as +0.",
        imitates="https://github.com/flashinfer-ai/flashinfer/issues/3053",
        passes="bitwise",
        operators=GATHER,
        fault=24,
    ),
    Mutant(
        id="gather_strides_ignored",
        file=REFERENCE,
        old="parts = require(group, spec.dcp).all_gather(x)",
        new=(
            "parts = require(group, spec.dcp).all_gather(torch.as_strided(x, x.shape, "
            "x.new_empty(x.shape).stride()))"
        ),
        breaks="A view of wider rows is read as if it were contiguous.",
        imitates="https://github.com/flagos-ai/Torch-FL/issues/173",
        passes="bitwise",
        operators=GATHER,
        fault=23,
    ),
    Mutant(
        id="owner_interleave_ignored",
        file=OWNERSHIP,
        old="return position // dcp.interleave % dcp.world",
        new="return position % dcp.world",
        breaks="The owner of a position is found as if the interleave were 1.",
        imitates="https://github.com/vllm-project/vllm/pull/26696",
        passes="bitwise",
        operators=(*GATHER, "topk_merge", "sparse_mla"),
        areas=("ownership",),
        fault=11,
    ),
    Mutant(
        id="local_offset_in_run_lost",
        file=OWNERSHIP,
        old="return position // (dcp.world * dcp.interleave) * dcp.interleave + position % dcp.interleave",
        new="return position // (dcp.world * dcp.interleave) * dcp.interleave",
        breaks="A position's offset in its run is lost.",
        imitates="https://github.com/vllm-project/vllm-ascend/pull/14876",
        passes="bitwise",
        operators=(*GATHER, "topk_merge", "sparse_mla"),
        areas=("ownership",),
        fault=11,
    ),
    Mutant(
        id="local_length_last_run_lost",
        file=OWNERSHIP,
        old="over = (bound % run - dcp.rank * dcp.interleave).clamp(0, dcp.interleave)",
        new="over = (bound % run - (dcp.rank + 1) * dcp.interleave).clamp(0, dcp.interleave)",
        breaks="A partly filled last run is not counted.",
        imitates="https://github.com/vllm-project/vllm/pull/56722",
        passes="bitwise",
        operators=("indexer_logits", "topk_merge"),
        areas=("ownership",),
        fault=11,
    ),
    Mutant(
        id="local_length_of_python_ints",
        file=OWNERSHIP,
        old="return whole // run * dcp.interleave + min(max(rest, 0), dcp.interleave)",
        new="return whole // run * dcp.interleave + min(max(rest, 0), 1)",
        breaks="A scheduler that counts with Python numbers gets another length than a worker with tensors.",
        imitates="https://github.com/LMCache/LMCache/pull/4936",
        passes="same",
        areas=("ownership",),
        fault=11,
    ),
    Mutant(
        id="replicated_keys_taken_for_sharded",
        file=OWNERSHIP,
        old='return DCP() if dcp.index == "replicated" else dcp',
        new="return dcp",
        breaks="Index keys that every rank holds whole are taken for this rank's share.",
        imitates="https://github.com/LMCache/LMCache/pull/4834",
        passes="deepgemm",
        operators=("indexer_logits",),
        areas=("ownership",),
        fault=11,
    ),
)

add(MUTANTS)
