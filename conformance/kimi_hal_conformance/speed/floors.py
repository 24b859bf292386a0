"""What each operator cannot do without: the bytes that it must move and the multiplications that it must make.

Each formula counts a byte that is needed once, however often a kernel reads it, and nothing that a kernel could do
without; so no kernel can be faster than these at the device's rates. Operands are those of the call; ``outs`` are
its outputs. A multiplication with its addition is two operations. Bytes of the state that a decode reads and writes
count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kimi_hal import formats


@dataclass(frozen=True)
class Work:
    """What a call must do at least: bytes to move, operations to make."""

    bytes: int
    operations: int = 0


Floor = Callable[[Any, Mapping[str, Any], Mapping[str, Tensor]], Work]


def nbytes(*tensors: Tensor | None) -> int:
    """Return the bytes of the elements of tensors, each counted once although a stride may repeat them."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def every_element(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read every operand once and write every output once: what works element by element."""
    return Work(nbytes(*(t for t in operands.values() if isinstance(t, Tensor)), *outs.values()))


def store_index_keys(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read a key and its slot a token, write its bytes in the cache's format."""
    tokens = operands["slots"].numel()
    own = operands["k"][:tokens]
    return Work(nbytes(own, operands["slots"]) + tokens * formats.index(spec.index).row_bytes)


def store_latent(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read a latent with its shared part and its slot a token, write its bytes in the cache's format."""
    tokens = operands["slots"].numel()
    own = [operands[name][:tokens] for name in ("kv_c", "k_pe")]
    return Work(nbytes(*own, operands["slots"]) + tokens * formats.latent(spec.latent).row_bytes)


def keys_of_requests(operands: Mapping[str, Any]) -> list[int]:
    """Return how many keys the rows of each request see: its longest row's, which are the others' too."""
    longest: dict[int, int] = {}
    for request, length in zip(operands["row_req"].tolist(), operands["row_len"].tolist(), strict=True):
        longest[request] = max(longest.get(request, 0), length)
    return list(longest.values())


def index_scores(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read each request's keys once, and the queries; a product of the head dimension a row, head and key."""
    fmt = formats.index(spec.index)
    heads, dim = operands["weights"].shape[1], fmt.head_dim
    pairs = int(operands["row_len"].clamp(min=0).sum())
    read = nbytes(*(operands[n] for n in ("q", "q_scale", "weights", "row_req", "row_len")))
    return Work(
        read + sum(keys_of_requests(operands)) * fmt.row_bytes + nbytes(*outs.values()),
        2 * pairs * heads * dim,
    )


def topk_select(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read the scores that count, write the selection."""
    scores = int(operands["row_len"].clamp(min=0).sum()) * operands["scores"].element_size()
    return Work(scores + nbytes(operands["row_len"], *outs.values()))


def sparse_mla(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read each selected latent once, however many rows select it; for each row, head and index a product of 576.

    And one of ``kv_rank`` for the value.
    """
    indices = operands["indices"]
    live = indices[indices >= 0]
    row = formats.latent(spec.latent).row_bytes
    owner = operands.get("row_req")
    if spec.index_space != "slot" and owner is not None:
        live = (indices.long() + (owner.long()[:, None] << 32))[indices >= 0]
    heads, width = operands["q"].shape[1:]
    read = nbytes(operands["q"], indices) + live.unique().numel() * row
    return Work(read + nbytes(*outs.values()), 2 * live.numel() * heads * (width + spec.kv_rank))


def dsa_decode(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read each request's index keys once and at least k of its latents; products of every key, and of k latents a row.

    Rows of a request may select different latents, which nobody knows before they have.
    """
    keys, k = keys_of_requests(operands), spec.indexer.topk
    read = sum(keys) * formats.index(spec.indexer.index).row_bytes
    read += sum(min(n, k) for n in keys) * formats.latent(spec.attn.latent).row_bytes
    own = nbytes(*(operands[n] for n in ("q", "index_q", "index_w", "row_req", "row_len")), *outs.values())
    lengths, (heads, width) = operands["row_len"].clamp(min=0), operands["q"].shape[1:]
    scored = int(lengths.sum()) * operands["index_q"].shape[1] * operands["index_q"].shape[2]
    attended = int(lengths.clamp(max=k).sum()) * heads * (width + spec.attn.kv_rank)
    return Work(read + own, 2 * (scored + attended))


def kda_decode(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read and write one state a live row, and the row's own operands; three products of K by V a head."""
    live = int((operands["state_ids"] >= 0).sum())
    own = [t for n, t in operands.items() if isinstance(t, Tensor) and n != "state"]
    return _recurrent(spec, live, operands["q"].shape[0], nbytes(*own, *outs.values()))


def kda_prefill(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read and write one state a sequence, and every row's operands; three products of K by V a row and head."""
    return kda_decode(spec, operands, outs)


def _recurrent(spec: Any, states: int, rows: int, others: int) -> Work:
    entries = spec.num_heads * spec.head_dim**2
    return Work(others + 2 * states * entries * 4, 2 * 3 * rows * entries)


def kda_conv(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read and write one history a sequence, the rows and the taps; a product a tap, row and channel."""
    live = int((operands["state_ids"] >= 0).sum())
    history = operands["conv_state"]
    own = [t for n, t in operands.items() if isinstance(t, Tensor) and n != "conv_state"]
    moved = nbytes(*own, *outs.values()) + 2 * live * history[0].numel() * history.element_size()
    return Work(moved, 2 * operands["x"].numel() * spec.conv_width)


def moe_experts(spec: Any, operands: Mapping[str, Any], outs: Mapping[str, Tensor]) -> Work:
    """Read the weights of each expert that some token chose once; three products of hidden by intermediate a pair."""
    ids = operands["topk_ids"] - spec.expert_offset
    here = ids[(ids >= 0) & (ids < spec.num_local)]
    checkpoint = operands["weights"]
    each = nbytes(*checkpoint.values()) // spec.num_local
    own = nbytes(*(operands[n] for n in ("x", "topk_weights", "topk_ids")), *outs.values())
    products = 2 * 3 * here.numel() * spec.hidden * spec.intermediate
    return Work(own + here.unique().numel() * each, products)


#: Operator -> its floor. An operator without one is not timed.
FLOORS: Mapping[str, Floor] = {
    "quantize_index_query": every_element,
    "store_index_keys": store_index_keys,
    "indexer_logits": index_scores,
    "indexer_topk": index_scores,
    "topk_select": topk_select,
    "kda_conv": kda_conv,
    "kda_gate": every_element,
    "kda_prefill": kda_prefill,
    "kda_decode": kda_decode,
    "moe_route": every_element,
    "moe_experts": moe_experts,
    "store_latent": store_latent,
    "sparse_mla": sparse_mla,
    "merge_attn_states": every_element,
    "dsa_decode": dsa_decode,
}
