"""What every Spec refuses, whatever its operator."""

from __future__ import annotations

import pytest

from kimi_hal.errors import SpecError
from kimi_hal.ops.sparse_mla import SparseMLASpec


def test_an_unknown_class_of_rounding_names_the_nearest():
    with pytest.raises(SpecError) as caught:
        SparseMLASpec(num_heads=12, latent="latent.bf16", numerics=("attn.p=bf61",))
    assert str(caught.value) == (
        "SparseMLASpec: numerics: unknown class 'attn.p=bf61'; did you mean 'attn.p=bf16'? Known: attn.k=bf16, "
        "attn.p=bf16, attn.p=fp8, attn.q=fp8_block, attn.dots=fp8_sum, kda.state=bf16, kda.chunk=bf16, logits=bf16, "
        "logits=fp8_sum, moe.act=mxfp8, moe.act=fp8_block, moe.act=fp8_tensor"
    )


def test_classes_of_rounding_are_a_tuple():
    with pytest.raises(
        SpecError, match=r"^SparseMLASpec: numerics must be tuple\[str, \.\.\.\], got str 'attn\.p=bf16'$"
    ):
        SparseMLASpec(num_heads=12, latent="latent.bf16", numerics="attn.p=bf16")
