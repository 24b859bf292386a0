from __future__ import annotations

import dataclasses

import pytest
import torch
from kda_cases import Layer, ids, same_bits
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.parallel.states import gather_states, part_states

HEADS, DIM = 8, 4


def pools(layout: str) -> tuple[KDASpec, Tensor, Tensor]:
    """Return the Spec and the pools of all heads."""
    spec = KDASpec(num_heads=HEADS, head_dim=DIM, conv_layout=layout)
    layer = Layer.random(spec)
    return spec, layer.conv_pool(5), layer.pool(5)


@pytest.mark.parametrize("layout", ["width_channel", "channel_width"])
@pytest.mark.parametrize(("source", "target"), [(1, 8), (2, 8), (8, 2), (4, 4), (8, 1)])
def test_a_request_moves_to_another_number_of_ranks(source: int, target: int, layout: str) -> None:
    spec, conv, state = pools(layout)
    slots = ids(3, 0)

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        own = dataclasses.replace(spec, num_heads=HEADS // source)
        pool = part_states(own, conv, state, source, group.rank())
        return gather_states(group, own, *pool, slots)

    for got in LoopbackGroup.run(source, rank):
        assert same_bits(got[0], conv[[3, 0]])
        assert same_bits(got[1], state[[3, 0]])
        parts = [part_states(spec, *got, target, r) for r in range(target)]
        assert same_bits(torch.cat([p[1] for p in parts], dim=1), state[[3, 0]])


def test_a_ranks_channels_are_those_of_its_heads_in_q_k_and_v() -> None:
    spec, conv, state = pools("width_channel")
    own, _ = part_states(spec, conv, state, 4, 1)
    by_head = conv.reshape(5, 3, 3, HEADS, DIM)
    assert same_bits(own, by_head[:, :, :, 2:4].flatten(2).contiguous())


def test_slots_may_differ_between_ranks_and_padding_is_zero() -> None:
    spec, conv, state = pools("width_channel")
    where = ([3, -1], [1, -1])

    def rank(group: Group) -> tuple[Tensor, Tensor]:
        own = dataclasses.replace(spec, num_heads=HEADS // 2)
        a, b = (x.clone() for x in part_states(own, conv, state, 2, group.rank()))
        a[where[group.rank()][0]], b[where[group.rank()][0]] = a[2].clone(), b[2].clone()
        return gather_states(group, own, a, b, ids(*where[group.rank()]))

    for got in LoopbackGroup.run(2, rank):
        assert same_bits(got[0][0], conv[2])
        assert same_bits(got[1][0], state[2])
        assert got[0][1].count_nonzero() == got[1][1].count_nonzero() == 0


def test_heads_that_cannot_be_parted_are_refused() -> None:
    spec, conv, state = pools("width_channel")
    with pytest.raises(ContractError, match=r"^KDA states: 8 heads cannot be parted over 3 ranks$"):
        part_states(spec, conv, state, 3, 0)
    with pytest.raises(ContractError, match=r"^KDA states: rank=2 is outside 0 to 1$"):
        part_states(spec, conv, state, 2, 2)
    with pytest.raises(
        ContractError, match=r"^KDA states: conv state must be \[slots, 3, C\] under conv_layout="
    ):
        part_states(spec, conv.transpose(1, 2), state, 2, 0)
