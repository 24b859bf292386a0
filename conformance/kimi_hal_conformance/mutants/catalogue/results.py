"""Mutants whose every call is right, and whose results do not last."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

add(
    (
        Mutant(
            id="results_in_one_buffer",
            file="reference/backend.py",
            old="return rounded.clone() if shared and home else rounded",
            new=(
                "return place.__dict__.setdefault((dtype, rounded.shape, __import__('threading').get_ident()), "
                "rounded.clone()).copy_(rounded)"
            ),
            breaks="Without out= each call returns the same buffer, so that the result before is overwritten.",
            imitates="https://github.com/flashinfer-ai/flashinfer/pull/3118",
            passes="flashinfer-bench",
            operators=("kda_decode", "sparse_mla", "moe_experts", "all_gather"),
        ),
    )
)
