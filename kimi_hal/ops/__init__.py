"""The abstract operators, one file a family. ``hal.ops.<operator>(tensors…, **spec_fields)`` runs one."""

from kimi_hal.ops.operator import OPERATORS, Operator, get
from kimi_hal.ops.sparse_mla import merge_attn_states, sparse_mla, store_latent

__all__ = ["OPERATORS", "Operator", "get", "merge_attn_states", "sparse_mla", "store_latent"]
