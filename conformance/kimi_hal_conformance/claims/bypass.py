"""Let an implementation be planned for what it does not claim, in this process alone."""

from __future__ import annotations

import dataclasses

from kimi_hal import ops
from kimi_hal.dispatch import policy
from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.reference.capabilities import coverage


def claim_everything(full_name: str) -> None:
    """Widen what an implementation claims to every legal Spec; what it needs of operands stays."""
    backend, _, name = full_name.partition(".")
    registry = policy.registry(policy.settings())  # the very one that plans are made of, frozen or not
    loaded = registry.get(backend)
    found = tuple(_wide(i) if i.name == name else i for i in loaded.implementations)
    registry.backends[backend] = dataclasses.replace(loaded, implementations=found)


def _wide(implementation: Implementation) -> Implementation:
    first = implementation.capabilities[0]
    spec_type = ops.get(implementation.operator).spec_type
    wide = tuple(
        Capability(("*",), covered, tensors=first.tensors, properties=first.properties)
        for covered in coverage(spec_type)
    )
    return dataclasses.replace(implementation, capabilities=wide)
