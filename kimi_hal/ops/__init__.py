"""The abstract operators, one file a family. ``hal.ops.<operator>(tensors…, **spec_fields)`` runs one."""

from kimi_hal.ops.all_gather import all_gather
from kimi_hal.ops.composites import dsa_decode, kda_layer_decode, moe_layer
from kimi_hal.ops.indexer import indexer_logits, indexer_topk, quantize_index_query, store_index_keys
from kimi_hal.ops.kda import kda_commit, kda_conv, kda_decode, kda_gate, kda_prefill, kda_verify
from kimi_hal.ops.moe import moe_experts, moe_route, prepare_moe_weights
from kimi_hal.ops.operator import OPERATORS, Operator, get
from kimi_hal.ops.sparse_mla import merge_attn_states, sparse_mla, store_latent
from kimi_hal.ops.topk_merge import topk_merge, topk_select

__all__ = [
    "OPERATORS",
    "Operator",
    "all_gather",
    "dsa_decode",
    "get",
    "indexer_logits",
    "indexer_topk",
    "kda_commit",
    "kda_conv",
    "kda_decode",
    "kda_gate",
    "kda_layer_decode",
    "kda_prefill",
    "kda_verify",
    "merge_attn_states",
    "moe_experts",
    "moe_layer",
    "moe_route",
    "prepare_moe_weights",
    "quantize_index_query",
    "sparse_mla",
    "store_index_keys",
    "store_latent",
    "topk_merge",
    "topk_select",
]
