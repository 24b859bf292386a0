"""What the claims of this backend's own kernels have in common. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Preference

#: Compiled code of CUDA 13 needs its driver.
REQUIRES = {"nvidia-driver": ">=580"}
#: The suite has passed; a table of measurements says where the portable kernels are faster.
PASSED = (
    Preference(
        rank=0,
        measured="benchmarks/results/h200/summary.json; benchmarks/results/h200_conformance_nvidia.json",
    ),
)
#: Behind the portable kernels: the code is looked at, and nothing can plan it.
COMPILED = (Preference(rank=-20, measured="compiled, not run"),)
#: Name -> architectures, how their code runs, and what is known of it.
RUN = {
    "cuda": (("sm_90",), "native", PASSED),
    "cuda_blackwell": (("sm_100", "sm_103"), "compile_only", COMPILED),
}
