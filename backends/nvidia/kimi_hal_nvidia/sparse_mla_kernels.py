"""The code of this backend's own attention, and what it must hold."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal_nvidia.compiling import described
from kimi_hal_nvidia.indexer_kernels import BULK_COPY, CLUSTER, NO_FP8_PRODUCTS
from kimi_hal_nvidia.sparse_mla import KERNELS

PRODUCTS = Instruction(r"HMMA\.16816\.F32", "float16 is multiplied by the matrix unit and added in float32")
CONVERTED = Instruction(r"F2FP\.F16\.E4M3", "FP8 numbers and scales are converted by instruction")
SCALED = Instruction(r"HMUL2", "a latent is multiplied by its scale, two at a time")


def sparse_mla(target: Target) -> tuple[Kernel, ...]:
    """Return the kernel of each latent format. Nothing of it may spill."""
    return tuple(
        described(
            "sparse_mla",
            name,
            target,
            expected=[PRODUCTS, CONVERTED, BULK_COPY, CLUSTER, *([SCALED] if name == "nvfp4" else [])],
            forbidden=[NO_FP8_PRODUCTS],
            shared=shared,
        )
        for name, shared in KERNELS.values()
    )
