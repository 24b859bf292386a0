"""Every mutant as an implementation of the operators that it gets wrong. Imports no torch.

Each claims all that the reference claims: whatever the suite asks, a mutant may not refuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kimi_hal import ops
from kimi_hal.dispatch.contract import Implementation
from kimi_hal.reference.capabilities import implementation
from kimi_hal_conformance.mutants.catalogue import load
from kimi_hal_conformance.mutants.mutant import Mutant

BUILDERS = "kimi_hal_conformance.mutants.builders"
#: An operator -> the operator without which no case of it can run.
NEEDED = {"kda_commit": "kda_verify", "prepare_moe_weights": "moe_experts"}


def declared(mutant: Mutant) -> Iterator[Implementation]:
    """Yield a mutant's implementations: the reference's declarations under its own name and builders."""
    names = {*mutant.operators, *(NEEDED[o] for o in mutant.operators if o in NEEDED)}
    for name in sorted(names):
        like = implementation(ops.get(name))
        yield dataclasses.replace(
            like,
            name=mutant.id,
            build=f"{BUILDERS}:build_{mutant.id}",
            weights=like.weights and f"{BUILDERS}:weights_{mutant.id}",
            size=f"{BUILDERS}:sizes_{mutant.id}" if like.size or mutant.workspace or mutant.step else None,
            prepare=f"{BUILDERS}:prepare_{mutant.id}" if mutant.step else None,
            source=(),
            # What a mutant prepares or records is for itself: another one's fault is not its own.
            weights_format=like.weights_format and f"{like.weights_format}.{mutant.id}",
            records=like.records and f"{like.records}.{mutant.id}",
        )


IMPLEMENTATIONS = tuple(i for mutant in load().values() for i in declared(mutant))
