"""The abstract operators, one file a family. ``hal.ops.<operator>(tensors…, **spec_fields)`` runs one."""

from kimi_hal.ops.kda import kda_commit, kda_conv, kda_decode, kda_gate, kda_prefill, kda_verify
from kimi_hal.ops.operator import OPERATORS, Operator, get
from kimi_hal.ops.sparse_mla import merge_attn_states, sparse_mla, store_latent

__all__ = [
    "OPERATORS",
    "Operator",
    "get",
    "kda_commit",
    "kda_conv",
    "kda_decode",
    "kda_gate",
    "kda_prefill",
    "kda_verify",
    "merge_attn_states",
    "sparse_mla",
    "store_latent",
]
