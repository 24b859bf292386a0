"""KDA states handed from one layout of heads to another: gathered from W ranks, parted over any other number.

A state belongs to one head and is the same whoever advanced it, so a prefill over two ranks can hand a request
to a decode over eight. The convolution's state has the channels of q, k and v side by side, each by head.
"""

from __future__ import annotations

from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.parallel.groups import Group


def gather_states(
    group: Group, spec: KDASpec, conv_state: Tensor, state: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states of all heads of some slots, on every rank, bit for bit.

    Args:
        group: W ranks, which hold the heads in rank order.
        spec: of one rank: its heads, and the layout of ``conv_state``.
        conv_state: this rank's pool.
        state: this rank's pool.
        slots: int ``[n]``, the same requests on every rank (the numbers may differ); a negative one gives
            zeros, as one beyond the pool does.

    Raises:
        ContractError: a conv state in another layout than the Spec's.

    Returns:
        conv state ``[n, …]`` in the Spec's layout with W times the channels, and state ``[n, W·H, V, K]``.
    """
    live = (slots.long() >= 0) & (slots.long() < min(len(conv_state), len(state)))
    own = [_picked(pool, slots.long(), live) for pool in (_by_part(spec, conv_state, 1), state)]
    parts, states = (group.all_gather(x) for x in own)
    # [W, n, 3, 3, 1, D] -> [n, 3, 3, W, D], q k v before ranks before channels
    joined = parts[..., 0, :].movedim(0, 3).flatten(2)
    conv = joined if spec.conv_layout == "width_channel" else joined.transpose(1, 2)
    return conv.contiguous(), states.transpose(0, 1).flatten(1, 2)


def part_states(spec: KDASpec, conv: Tensor, states: Tensor, world: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return one rank's heads of states that ``gather_states`` returned.

    Args:
        spec: of any rank: the layout of the conv state, head_dim.
        conv: conv states of all heads.
        states: ``[n, heads, V, K]``.
        world: ranks of the new layout; it divides the heads.
        rank: which of them.

    Raises:
        ContractError: the heads cannot be parted, no such rank, a conv state in another layout.
    """
    heads = states.shape[1]
    if world < 1 or heads % world:
        raise ContractError("KDA states", [f"{heads} heads cannot be parted over {world} ranks"])
    if not 0 <= rank < world:
        raise ContractError("KDA states", [f"rank={rank} is outside 0 to {world - 1}"])
    own = _by_part(spec, conv, world)[:, :, :, rank].flatten(2)
    if spec.conv_layout == "channel_width":
        own = own.transpose(1, 2)
    return own.contiguous(), states.chunk(world, dim=1)[rank].contiguous()


def _by_part(spec: KDASpec, conv_state: Tensor, world: int) -> Tensor:
    """View conv states as ``[slots, 3 inputs, 3 of q k v, world, channels]``."""
    by_width = conv_state if spec.conv_layout == "width_channel" else conv_state.transpose(1, 2)
    if conv_state.dim() != 3 or by_width.shape[1] != 3 or by_width.shape[2] % (3 * world):
        shape = "[slots, 3, C]" if spec.conv_layout == "width_channel" else "[slots, C, 3]"
        raise ContractError(
            "KDA states",
            [
                f"conv state must be {shape} under conv_layout={spec.conv_layout!r}, got {list(conv_state.shape)}"
            ],
        )
    channels = by_width.shape[2] // (3 * world)
    return by_width.reshape(*by_width.shape[:2], 3, world, channels)


def _picked(pool: Tensor, slots: Tensor, live: Tensor) -> Tensor:
    picked = pool.new_zeros((len(slots), *pool.shape[1:]))
    picked[live] = pool[slots[live]]
    return picked
