"""The code of this backend's own attention and of its merge, and what it must hold."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal_nvidia.compiling import described
from kimi_hal_nvidia.indexer_kernels import BULK_COPY, CLUSTER, CONVERTED
from kimi_hal_nvidia.merge_states import ANY, FEW, STEM
from kimi_hal_nvidia.sparse_mla import KERNELS

SCALED = Instruction(r"HMUL2", "a latent is multiplied by its scale, two at a time")
NO_FP8_PRODUCTS = Instruction(
    r"QGMMA|QMMA|UTCQMMA", "FP8 products are added with fewer bits than the contract asks for"
)
#: Bytes a thread that registers do not suffice for, at most: NVFP4 latents by 32 heads.
SPILLED = 112


def products(target: Target) -> Instruction:
    """Return float16 products added in float32: of a warpgroup on Hopper, of a warp elsewhere."""
    pattern = r"HGMMA\.64x\d+x16\.F32" if target.arch == "sm_90" else r"HMMA\.16816\.F32"
    return Instruction(pattern, "float16 is multiplied by the matrix unit and added in float32")


def sparse_mla(target: Target) -> tuple[Kernel, ...]:
    """Return the kernels of each latent format, form by form."""
    return tuple(
        described(
            "sparse_mla",
            name,
            target,
            expected=[
                *(products(target), CONVERTED, CLUSTER, BULK_COPY),
                *([SCALED] if name.startswith("nvfp4") else []),
            ],
            forbidden=[NO_FP8_PRODUCTS],
            spilled=SPILLED,
            shared=shared,
        )
        for kernels in KERNELS.values()
        for name, shared in kernels.values()
    )


WIDE_PARTS = Instruction(r"LDG\.E\.128", "a part's numbers are read sixteen bytes a thread at a time")


def merge_attn_states(target: Target) -> tuple[Kernel, ...]:
    """Return the kernels of merging."""
    return tuple(described(STEM, form.name, target, expected=[WIDE_PARTS], shared=0) for form in (ANY, FEW))
