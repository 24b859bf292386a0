"""Which compute unit of a TPU does what in each implementation, as data. Imports neither torch nor jax."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Split
from kimi_hal_tpu.claims import SPARSE_CORES, TPUS

XLA = (Split(TPUS, {"XLA": "compiles all of it for TensorCore"}),)
#: What XLA does around every kernel.
AROUND = "bounds lengths and names, and lays operands out"
SCORE, SELECT = "scores the paged keys", "selects the top k"
#: Operators of which SparseCore does a part, and what.
SHARED = {
    "topk_select": {"SparseCore": SELECT, "XLA": "fetches the selected scores"},
    "indexer_topk": {
        "TensorCore": SCORE,
        "SparseCore": SELECT,
        "XLA": "bounds lengths, turns positions into slots and fetches the selected scores",
    },
    "sparse_mla": {
        "SparseCore": "gathers the selected latents, packed as they are",
        "TensorCore": "unpacks and attends",
        "XLA": "turns positions into slots",
    },
}
#: What TensorCore does where it is not all of it.
TENSOR_CORE = {
    "indexer_logits": SCORE,
    "kda_prefill": "finishes gates and advances states by chunks",
    "kda_decode": "finishes gates and advances states",
    "kda_verify": "convolves, finishes gates and reads what states become",
    "kda_commit": "finishes gates and advances states by the accepted rows",
    "moe_experts": "decodes the weights, multiplies and adds up",
}
#: What XLA does where it is more than that.
FIRST = {"moe_experts": "sorts routes into tiles of one expert, and lays rows out"}


def pallas(operator: str) -> tuple[Split, ...]:
    """Return the split of an operator's Pallas kernels on every generation that runs them."""
    if operator in SHARED:
        return (Split(SPARSE_CORES, SHARED[operator]),)
    parts = {"TensorCore": TENSOR_CORE.get(operator, "does all of it"), "XLA": FIRST.get(operator, AROUND)}
    return (Split(TPUS, parts),)
