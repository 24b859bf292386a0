"""The code of this backend's own ``dsa_decode``: that of its four kernels, each of which begins early."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Instruction, Kernel, Target
from kimi_hal_nvidia import sparse_mla_kernels
from kimi_hal_nvidia.compiling import described
from kimi_hal_nvidia.indexer_kernels import HEADS, SPILLED
from kimi_hal_nvidia.quantize_query import KERNELS as QUANTIZED
from kimi_hal_nvidia.quantize_query import STEM
from kimi_hal_nvidia.scores import KINDS, RINGS
from kimi_hal_nvidia.sparse_mla import KERNELS as ATTENDED
from kimi_hal_nvidia.topk import FORMS

WAITS = Instruction(r"ACQBULK", "what the kernel before it writes is waited for")
LETS = Instruction(r"PREEXIT", "the kernel behind it may begin")


def dsa_decode(target: Target) -> tuple[Kernel, ...]:
    """Return whatever it may launch of the model's heads and float32 scores."""
    return (
        *(described(STEM, name, target, [LETS]) for name in QUANTIZED.values()),
        *(
            described(
                f"index_scores_{element}",
                ring.kernel(element, kind),
                target,
                [WAITS, LETS],
                spilled=SPILLED,
            )
            for element in ("fp8", "fp4")
            for ring in RINGS
            for kind in KINDS
            if ring.heads == HEADS
        ),
        *(
            described(stem, f"{what}_float32", target, [WAITS, LETS], spilled=SPILLED)
            for what, (stem, *_) in FORMS.items()
        ),
        *(
            described("sparse_mla", name, target, [WAITS], spilled=sparse_mla_kernels.SPILLED)
            for forms in ATTENDED.values()
            for name, _ in forms.values()
        ),
    )
