"""Claims of ``topk_merge``, as data. Imports no Triton."""

from __future__ import annotations

import dataclasses

from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, ELEMENT, EXECUTION, FLAG, FLOAT, LAST, REQUIRES, ROW

SPEC: dict[str, Domain] = {
    "topk": Range(1, 1 << 20),
    "score": FLOAT,
    "ordered": FLAG,
    "return_global": FLAG,
    "quota": Range(1, 1 << 20),
    **DCP,
}
#: Ranks meet on one stream: calls of one group on two would cross.
WHOLE = dataclasses.replace(ROW, concurrent=False)
#: A second message is as large as the first one says, which the host has to read.
WAITING = dataclasses.replace(WHOLE, capture="none")
PROTOCOLS = {("full",): WHOLE, ("compact", "scores_only"): WAITING}
SOURCE = ("topk_merge", "protocols", "winners", "order", "shards")


def topk_merge(arch: tuple[str, ...]) -> tuple[Implementation, ...]:
    """Return the portable implementation of ``topk_merge`` for these architectures."""
    return (
        Implementation(
            operator="topk_merge",
            name="triton",
            build="kimi_hal.triton.topk_merge:build_topk_merge",
            compile="kimi_hal.triton.winners_kernels:topk_merge",
            capabilities=tuple(
                Capability(
                    arch=arch,
                    spec=SPEC | {"protocol": OneOf(names)},
                    tensors={"scores": ELEMENT, "indices": ELEMENT},
                    properties=properties,
                    requires=REQUIRES,
                )
                for names, properties in PROTOCOLS.items()
            ),
            preferences=LAST,
            execution=EXECUTION,
            source=(*(f"kimi_hal/triton/{name}.py" for name in SOURCE), "kimi_hal/parallel/*.py"),
        ),
    )
