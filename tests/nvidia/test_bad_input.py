"""Bad input gets a sentence from every kernel of this backend, before anything is launched.

Out of memory is tried on a device (``test_gpu_memory.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inputs import example
from kimi_hal.dispatch import matching
from kimi_hal.dispatch.contract import Implementation, Sizes
from kimi_hal.errors import ContractError, KimiHalError
from kimi_hal.ops import check
from kimi_hal.ops.operator import get
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

OPERATORS = (
    "quantize_index_query",
    "store_index_keys",
    "indexer_logits",
    "topk_select",
    "indexer_topk",
    "store_latent",
    "sparse_mla",
    "merge_attn_states",
)
KERNELS = {
    f"{i.operator}-{i.name}": i
    for i in IMPLEMENTATIONS
    if i.operator in OPERATORS and "native" in i.execution and i not in ADAPTERS
}
FACTS = {"nvidia-driver": "580.159", "triton": "3.6.0"}
OLD = {"nvidia-driver": "550.54", "triton": "3.5.1"}
#: Kernel -> fields beyond what it claims, and what is said of them. The portable ones claim all that a Spec admits.
BEYOND: dict[str, tuple[dict[str, Any], list[str]]] = {
    "quantize_index_query-triton": ({"num_heads": 129}, ["IndexQuerySpec: num_heads=129 is not 1 to 128"]),
    "quantize_index_query-cuda": (
        {"index": "index.mxfp4.gfx950.page64"},
        [
            "index='index.mxfp4.gfx950.page64' is not 'index.fp8.e4m3fn.f32.page64' | "
            "'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64' | 'index.mxfp4.page64'"
        ],
    ),
    "store_index_keys-triton": (
        {"index": "index.fp9"},
        [
            "StoreIndexSpec: unknown index format 'index.fp9'; did you mean 'index.mxfp4.page64'? Known: "
            "index.fp8.e4m3fn.f32.page64, index.fp8.e4m3fn.pow2.page64, index.fp8.e4m3fn.ue8m0x4.page64, "
            "index.fp8.e4m3fnuz.f32.page64, index.fp8.e4m3fnuz.f32.shuffled.page64, index.mxfp4.gfx950.page64, "
            "index.mxfp4.page64"
        ],
    ),
    "indexer_logits-triton": ({"num_heads": 129}, ["IndexerSpec: num_heads=129 is not 1 to 128"]),
    "indexer_logits-cuda": (
        {"num_heads": 65, "index": "index.mxfp4.gfx950.page64"},
        [
            "index='index.mxfp4.gfx950.page64' is not 'index.fp8.e4m3fn.f32.page64' | "
            "'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64' | 'index.mxfp4.page64'",
            "num_heads=65 is not 1 to 64",
        ],
    ),
    "indexer_logits-cuda_fp8_sum": (
        {"num_heads": 65, "index": "index.mxfp4.page64"},
        [
            "index='index.mxfp4.page64' is not 'index.fp8.e4m3fn.f32.page64' | "
            "'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64'",
            "num_heads=65 is not 1 to 64",
        ],
    ),
    "indexer_topk-triton": ({"topk": 2**21}, ["IndexerTopKSpec: topk=2097152 is not 1 to 1048576"]),
    "indexer_topk-cuda": (
        {"topk": 2049, "num_heads": 65},
        ["num_heads=65 is not 1 to 64", "topk=2049 is not 1 to 2048"],
    ),
    "indexer_topk-cuda_fp8_sum": (
        {"topk": 2049, "index": "index.mxfp4.page64"},
        [
            "index='index.mxfp4.page64' is not 'index.fp8.e4m3fn.f32.page64' | "
            "'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64'",
            "topk=2049 is not 1 to 2048",
        ],
    ),
    "topk_select-triton": ({"topk": 2**21}, ["TopKSpec: topk=2097152 is not 1 to 1048576"]),
    "topk_select-cuda": ({"topk": 2049}, ["topk=2049 is not 1 to 2048"]),
    "store_latent-triton": (
        {"latent": "latent.fp9"},
        [
            "StoreLatentSpec: unknown latent format 'latent.fp9'; did you mean 'latent.bf16'? Known: "
            "latent.bf16, latent.flashmla.656, latent.fp8.e4m3fn.tensor, latent.fp8.e4m3fnuz.tensor, latent.nvfp4.352"
        ],
    ),
    "sparse_mla-triton": ({"num_heads": 129}, ["SparseMLASpec: num_heads=129 is not 1 to 128"]),
    "sparse_mla-triton_p16": ({"out_dtype": "float32"}, ["out_dtype='float32' is not 'bfloat16'"]),
    "sparse_mla-cuda": (
        {"latent": "latent.flashmla.656", "out_dtype": "float32"},
        [
            "latent='latent.flashmla.656' is not 'latent.fp8.e4m3fn.tensor' | 'latent.nvfp4.352'",
            "out_dtype='float32' is not covered, only its default 'bfloat16'",
        ],
    ),
    "merge_attn_states-triton": ({"parts": 65}, ["MergeSpec: parts=65 is not 1 to 64"]),
    "merge_attn_states-cuda": (
        {"dim": 256, "dtype": "float32"},
        ["dim=256 is not 512", "dtype='float32' is not 'bfloat16'"],
    ),
}
#: Operator -> the operand whose layout matters to its kernels.
LAID_OUT = {
    "quantize_index_query": "q",
    "topk_select": "scores",
    "merge_attn_states": "outs",
}


def refusals(kernel: Implementation, spec: Any, target: matching.Target) -> list[str]:
    return list(matching.refusals(get(kernel.operator), spec, None, kernel.capabilities[0], target))


def called(kernel: Implementation, name: str, value: Any, workspace: torch.Tensor | None = None) -> list[str]:
    """Return what the check of a plan of a kernel says of its operands with one of them changed."""
    operator, one = get(kernel.operator), example(kernel.operator)
    operands = dict(zip(operator.signature.parameters, one.args, strict=False)) | one.kwargs
    if name:
        operands[name] = value(operands[name])
    if workspace is not None:
        operands["workspace"] = workspace
    sizes = Sizes(workspace=1024)
    checked = check.compiled(operator, one.spec, one.limits, sizes, capability=kernel.capabilities[0])
    with pytest.raises(ContractError) as caught:
        checked(**operands)
    return list(caught.value.reasons)


def late(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins one element behind a multiple of 256 bytes."""
    room = torch.zeros(x.numel() + 512, dtype=x.dtype)
    first = -room.data_ptr() // x.element_size() % 256 + 1
    return room[first : first + x.numel()].view(x.shape).copy_(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose numbers stand two apart."""
    return torch.stack((x, x), dim=-1).flatten(-2)[..., ::2]


def test_every_kernel_of_both_families_is_tried() -> None:
    assert {*BEYOND} == {*KERNELS}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_architecture_without_the_instructions_is_named(kernel: Implementation) -> None:
    covered = " | ".join(kernel.capabilities[0].arch)
    ampere = matching.Target("sm_80", FACTS)
    assert refusals(kernel, example(kernel.operator).spec, ampere)[:1] == [f"arch sm_80 is not {covered}"]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_what_a_kernel_needs_is_named_with_the_version_that_is_there(
    kernel: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = example(kernel.operator).spec
    monkeypatch.setattr(matching, "distribution", lambda name: None)
    ((name, version),) = kernel.capabilities[0].requires.items()
    old, bare = matching.Target("sm_90", OLD), matching.Target("sm_90", {})
    assert refusals(kernel, spec, old)[-1] == f"{name} {OLD[name]} is installed; it needs {name}{version}"
    assert refusals(kernel, spec, bare)[-1] == f"{name} is not installed; it needs {name}{version}"


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_beyond_a_claim_is_named_with_what_is_claimed(name: str) -> None:
    kernel, (fields, sentences) = KERNELS[name], BEYOND[name]
    try:
        said = refusals(
            kernel, replace(example(kernel.operator).spec, **fields), matching.Target("sm_90", FACTS)
        )
    except KimiHalError as error:
        said = [str(error)]
    assert said == sentences


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(k, id=n)
        for n, k in KERNELS.items()
        if any(t.align > 1 for t in k.capabilities[0].tensors.values())
    ],
)
def test_an_operand_at_an_address_that_cannot_be_read_in_one_piece_is_refused(kernel: Implementation) -> None:
    name = LAID_OUT.get(kernel.operator, "cache")
    past = 1 if name == "cache" else 2
    assert called(kernel, name, late) == [
        f"{name} must start at a multiple of 16 bytes, starts {past} past one"
    ]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_operand_whose_numbers_do_not_stand_together_is_refused(kernel: Implementation) -> None:
    name = LAID_OUT.get(kernel.operator, "cache")
    said = called(kernel, name, every_second)
    assert said == [
        f"{name} must have stride 1 in its last dimension, got strides {said[0].split('strides ')[1]}"
    ]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(k, id=n)
        for n, k in KERNELS.items()
        if "workspace" in get(k.operator).signature.parameters
    ],
)
def test_a_workspace_that_is_too_small_is_refused(kernel: Implementation) -> None:
    room = torch.zeros(2048, dtype=torch.uint8)
    first = -room.data_ptr() % 256
    said = called(kernel, "", None, room[first : first + 512])
    assert said == ["workspace has 512 bytes, the plan needs 1024 (plan.workspace_bytes)"]
