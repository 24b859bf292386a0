"""The tolerances that the field's own tests use. Every mutant passes one of them on random inputs.

Sources: flashinfer-bench ``bench/config.py``; vLLM ``tests/kernels/allclose_default.py``; FlashMLA
``tests/test_flash_mla_sparse_decoding.py``; DeepGEMM ``tests/test_attention.py``; flash-linear-attention
``fla/utils/testing.py``; aiter ``op_tests/test_flydsl_pa_mqa_logits_fp4_prefill.py`` and its ``topk_per_row``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: (what a kernel gave, what it should have given) -> the test would pass.
Tolerance = Callable[[Tensor, Tensor], bool]


def flashinfer_bench(got: Tensor, wanted: Tensor) -> bool:
    """Every element is off by at most 1e-2, absolutely or relatively."""
    error = (got - wanted).abs()
    return bool(((error <= 1e-2) | (error <= 1e-2 * wanted.abs())).all())


def vllm_bf16(got: Tensor, wanted: Tensor) -> bool:
    """Every element is off by at most 1e-3 + 1.6e-2 of itself."""
    return bool(((got - wanted).abs() <= 1e-3 + 1.6e-2 * wanted.abs()).all())


def flashmla(got: Tensor, wanted: Tensor) -> bool:
    """Elements are off by 1e-3 or 2.01/128 of themselves; 1 − cosine is 5e-6; NaN and inf stand alike."""
    if bool((got.isfinite() != wanted.isfinite()).any()):
        return False
    error = (got - wanted).abs()
    close = bool(((error <= 1e-3) | (error <= 2.01 / 128 * wanted.abs())).all())
    return close and 1 - similarity(got, wanted) <= 5e-6


def deepgemm(got: Tensor, wanted: Tensor) -> bool:
    """``1 − 2⟨x, y⟩ / (⟨x, x⟩ + ⟨y, y⟩)`` is below 1e-3."""
    return 1 - similarity(got, wanted) < 1e-3


def fla(got: Tensor, wanted: Tensor) -> bool:
    """The root mean square of the error is below 0.005 of that of the right answer."""
    return rms(got - wanted) <= 0.005 * rms(wanted) + 1e-8


def cosine(got: Tensor, wanted: Tensor) -> bool:
    """The cosine is above 0.99."""
    norms = float(got.norm() * wanted.norm())
    return norms == 0 or float((got * wanted).sum()) / norms > 0.99


def sorted_scores(got: Tensor, wanted: Tensor) -> bool:
    """The selected scores, sorted, are equal to 1e-5: any choice among ties is right."""
    return bool(((got.sort().values - wanted.sort().values).abs() <= 1e-5).all())


def as_sets(got: Tensor, wanted: Tensor) -> bool:
    """Rows are equal as sets, in any order."""
    return bool(torch.equal(got.sort().values, wanted.sort().values))


def bitwise(got: Tensor, wanted: Tensor) -> bool:
    """Every element is equal."""
    return bool(torch.equal(got, wanted))


def similarity(x: Tensor, y: Tensor) -> float:
    """Return ``2⟨x, y⟩ / (⟨x, x⟩ + ⟨y, y⟩)``, 1 where both are zero."""
    total = float((x * x).sum() + (y * y).sum())
    return 2 * float((x * y).sum()) / total if total else 1.0


def rms(x: Tensor) -> float:
    """Return the root mean square."""
    return float(x.square().mean().sqrt())


FIELD: Mapping[str, Tolerance] = {
    "flashinfer-bench": flashinfer_bench,
    "vllm-bf16": vllm_bf16,
    "flashmla": flashmla,
    "deepgemm": deepgemm,
    "fla": fla,
    "cosine": cosine,
    "sorted-scores": sorted_scores,
    "set": as_sets,
    "bitwise": bitwise,
}
