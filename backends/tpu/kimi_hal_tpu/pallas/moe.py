"""``moe_experts``: XLA sorts the routes into tiles, TensorCore runs the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from kimi_hal.ops.moe import MoESpec
from kimi_hal_tpu import expert_grid
from kimi_hal_tpu.pallas import expert_blocks, expert_tiles, experts
from kimi_hal_tpu.pallas.mode import Array, Mode

Given = Mapping[str, Any]


def moe_experts(spec: MoESpec, given: Given, mode: Mode) -> tuple[Array]:
    """Return this rank's partial sum ``[T, hidden]``.

    Raises:
        ContractError: the weights are not those that ``prepare_moe_weights`` made for this Spec.
    """
    x, ids, weights = given["x"], given["topk_ids"], list(given["weights"])
    expert_blocks.require(spec, weights)
    size = expert_grid.size_of(spec, x.shape[0])
    tiles = expert_tiles.cut(spec, ids, given["topk_weights"], given.get("expert_map"), size)
    width = expert_blocks.Blocks.of(spec).hidden
    rows = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, width - spec.hidden)))
    found = experts.run(spec, rows, tiles, weights, mode)
    return (found[:, : spec.hidden].astype(spec.out_dtype),)
