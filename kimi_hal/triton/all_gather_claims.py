"""Claims of ``all_gather``, as data. Imports no Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation, TensorCap
from kimi_hal.domain import OneOf, Range
from kimi_hal.ops.all_gather import DTYPES
from kimi_hal.triton.claim_terms import DCP, EXECUTION, LAST, REQUIRES
from kimi_hal.triton.topk_merge_claims import WHOLE

#: What is sent may have any strides: the group sends it as it is seen.
ANY_STRIDES = TensorCap(align=1, contiguous=())


def all_gather(arch: tuple[str, ...]) -> tuple[Implementation, ...]:
    """Return the portable implementation of ``all_gather`` for these architectures."""
    return (
        Implementation(
            operator="all_gather",
            name="triton",
            build="kimi_hal.triton.all_gather:build_all_gather",
            compile="kimi_hal.triton.all_gather_kernels:all_gather",
            capabilities=(
                Capability(
                    arch=arch,
                    spec={
                        "layout": OneOf(("rank_major", "token_order", "last_dim")),
                        "dtype": OneOf(DTYPES),
                        "ndim": Range(1, 8),
                        **DCP,
                    },
                    tensors={"x": ANY_STRIDES},
                    properties=WHOLE,
                    requires=REQUIRES,
                ),
            ),
            preferences=LAST,
            execution=EXECUTION,
            source=("kimi_hal/triton/all_gather.py", "kimi_hal/triton/shards.py", "kimi_hal/parallel/*.py"),
        ),
    )
