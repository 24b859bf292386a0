"""What the claims of several adapters have in common. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Preference
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.triton.claim_terms import DCP, FLAG

#: Behind everything of this backend's own: taken by name, or where a Spec admits what it rounds and nothing else fits
#: or a table of measurements puts it first.
BEHIND = (Preference(rank=-30),)
#: What their index kernels serve of any library's attention.
ATTENTION: dict[str, Domain] = {
    **DCP,
    "num_heads": Range(1, 128),
    "softmax_scale": Range(2.0**-12, 16),
    "index_space": OneOf(("slot", "position", "local")),
    "has_index_len": FLAG,
}
#: FlashInfer, from the version on whose calls these are.
FLASHINFER = {"flashinfer-python": ">=0.7.4"}
