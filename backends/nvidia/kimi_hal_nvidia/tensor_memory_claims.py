"""The claim of Blackwell's ``indexer_logits`` with FP8 and block-scaled products, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, Preference
from kimi_hal.domain import Domain, Range
from kimi_hal.triton.claim_terms import ROW
from kimi_hal_nvidia.indexer_claims import SCORED, TENSORS

#: The rows of a product are heads of one or more rows of the call: 128 at most.
SPEC: dict[str, Domain] = SCORED | {"num_heads": Range(1, 128)}

#: Looked at for Blackwell and interpreted on the CPU, never run on a device: by name alone, behind everything else.
TENSOR_MEMORY = (
    Implementation(
        operator="indexer_logits",
        name="triton_tcgen05",
        build="kimi_hal_nvidia.tensor_memory:build_indexer_logits",
        capabilities=(
            Capability(
                arch=("sm_100", "sm_103"),
                spec=SPEC,
                tensors=TENSORS["indexer_logits"],
                properties=ROW,
                # Before 3.8 its interpreter has no scaled product.
                requires={"triton": ">=3.8"},
            ),
        ),
        preferences=(Preference(rank=-40, measured="compiled, not run"),),
        execution=("interpreted", "compile_only"),
        numerics=("logits=fp8_sum",),
        source=tuple(f"kimi_hal_nvidia/{name}.py" for name in ("tensor_memory", "tensor_memory_scores")),
        compile="kimi_hal_nvidia.tensor_memory_kernels:indexer_logits",
    ),
)
