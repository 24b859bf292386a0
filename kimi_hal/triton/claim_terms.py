"""What the portable kernels' claims have in common, as data. Imports no Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Preference, Properties, TensorCap
from kimi_hal.domain import Domain, OneOf, Range

EXECUTION = ("native", "interpreted")
REQUIRES = {"triton": ">=3.6"}
ROW = Properties(deterministic=True, batch_invariant=True, capture="full", concurrent=True)
#: Portable code is what is left when nothing faster fits.
LAST = (Preference(rank=-10),)
ELEMENT = TensorCap(align=1)
FLAG = OneOf((False, True))
FLOAT = OneOf(("float32", "bfloat16"))
DCP: dict[str, Domain] = {
    "dcp.world": Range(1, 64),
    "dcp.rank": Range(0, 63),
    "dcp.interleave": Range(1, 1 << 20),
    "dcp.index": OneOf(("sharded", "replicated")),
}
