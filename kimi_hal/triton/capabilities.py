"""The portable kernels' claims, as data: what a backend registers when it adopts them. Imports no Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.all_gather_claims import all_gather
from kimi_hal.triton.claim_terms import ELEMENT, EXECUTION, LAST, REQUIRES, ROW
from kimi_hal.triton.indexer_claims import indexer
from kimi_hal.triton.sparse_mla_claims import sparse_mla
from kimi_hal.triton.topk_merge_claims import topk_merge

#: An engine builds one KDASpec for all six operators: what these two do not look at may be anything.
KDA: dict[str, Domain] = {
    "lower_bound": OneOf((None, -5.0)),
    "num_heads": Range(1, 128),
    "head_dim": Range(1, 256),
    "checkpoints": OneOf((False, True)),
    "conv_layout": OneOf(("width_channel", "channel_width")),
    "conv_width": Range(1, 16),
    "norm_eps": Range(0.0, 1.0),
    "num_layers": Range(1, 256),
}
GATE_FORMS: dict[str, Domain] = {
    "gate": OneOf(("raw", "log")),
    "qk_norm": OneOf((False, True)),
    "scale": Range(0.0, 1.0),
}


def implementations(arch: tuple[str, ...]) -> tuple[Implementation, ...]:
    """Return the portable implementations for these architectures."""
    return (
        *indexer(arch),
        *sparse_mla(arch),
        *topk_merge(arch),
        *all_gather(arch),
        Implementation(
            operator="kda_gate",
            name="triton",
            build="kimi_hal.triton.kda:build_kda_gate",
            compile="kimi_hal.triton.kda_kernels:kda_gate",
            capabilities=(
                Capability(
                    arch=arch,
                    spec=KDA | GATE_FORMS,
                    tensors={"raw_g": ELEMENT, "raw_beta": ELEMENT},
                    properties=ROW,
                    requires=REQUIRES,
                ),
            ),
            preferences=LAST,
            execution=EXECUTION,
            source=("kimi_hal/triton/kda.py",),
        ),
        Implementation(
            operator="kda_decode",
            name="triton",
            build="kimi_hal.triton.kda:build_kda_decode",
            compile="kimi_hal.triton.kda_kernels:kda_decode",
            capabilities=(
                Capability(
                    arch=arch,
                    spec=KDA | GATE_FORMS,
                    tensors=dict.fromkeys(("q", "k", "v", "raw_g", "raw_beta", "state"), ELEMENT),
                    properties=ROW,
                    requires=REQUIRES,
                ),
            ),
            preferences=LAST,
            execution=EXECUTION,
            source=("kimi_hal/triton/kda.py",),
        ),
    )
