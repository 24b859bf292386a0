"""Claims of this backend's own ``dsa_decode``, as data. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.domain import Domain
from kimi_hal.triton.claim_terms import DCP, ELEMENT, ROW
from kimi_hal_nvidia import indexer_claims, sparse_mla_claims
from kimi_hal_nvidia.claim_terms import REQUIRES, RUN
from kimi_hal_nvidia.indexer_claims import PAGES

#: Parts by their field of the Spec, and what each covers.
PARTS = {
    "query": indexer_claims.SPECS["quantize_index_query"],
    "indexer": indexer_claims.SPECS["indexer_topk"],
    "attn": sparse_mla_claims.SPEC,
}
#: Positions that its selection gives, of keys that are all on one rank.
LEFT_OUT = (*DCP, "emit", "has_index_len")
SPEC: dict[str, Domain] = {
    f"{part}.{name}": domain
    for part, covered in PARTS.items()
    for name, domain in covered.items()
    if name not in LEFT_OUT
}
OPERANDS = {
    **dict.fromkeys(("q", "index_q", "index_w"), ELEMENT),
    "latent_cache": sparse_mla_claims.OPERANDS["cache"],
    "index_cache": PAGES,
}

DECODE = tuple(
    Implementation(
        operator="dsa_decode",
        name=name,
        build="kimi_hal_nvidia.decode:build_dsa_decode",
        capabilities=(Capability(arch=arch, spec=SPEC, tensors=OPERANDS, properties=ROW, requires=REQUIRES),),
        preferences=preferences,
        size="kimi_hal_nvidia.sizes:dsa_decode",
        execution=(execution,),
        source=(
            *indexer_claims.SOURCE,
            *(
                f"kimi_hal_nvidia/{name}"
                for name in ("attention_plan.py", "cubins/sparse_mla*", "decode.py", "sparse_mla.py")
            ),
        ),
        compile="kimi_hal_nvidia.decode_kernels:dsa_decode",
        configurations="kimi_hal_nvidia.attention_plan:decode_configurations",
    )
    for name, (arch, execution, preferences) in RUN.items()
)
