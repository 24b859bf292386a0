from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from kda_cases import Layer, Rows, cuts, flags, ids, same_bits
from torch import Tensor

from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.errors import ContractError, GroupError, PlanError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup
from kimi_hal.parallel.kda import ContextKDA
from kimi_hal.parallel.shards import Shards
from kimi_hal.parallel.stops import Stops

HEADS, DIM = 8, 8
LIMITS = Limits(max_rows=512, max_reqs=64, rows_per_req=512, uniform=False)


def spec(heads: int = HEADS, **fields: Any) -> KDASpec:
    return KDASpec(num_heads=heads, head_dim=DIM, scale=DIM**-0.5, **fields)


def channels(x: Tensor, part: slice) -> Tensor:
    """Cut ``[…, 3·H·K]`` to some heads: q, k and v each have theirs."""
    by_head = x.reshape(*x.shape[:-1], 3, HEADS, DIM)
    return by_head[..., :, part, :].flatten(-3).contiguous()


class Case:
    """Sequences of some lengths over a pool of states, whole or cut to one rank's heads."""

    def __init__(self, lengths: tuple[int, ...], slots: int = 8, fresh: tuple[bool, ...] = (), **fields: Any):
        self.fields, self.lengths = fields, lengths
        self.rows = Rows.random(spec(**fields), sum(lengths))
        self.layer = Layer.random(spec(**fields))
        self.state_ids = torch.arange(len(lengths), dtype=torch.int32)
        self.initial = flags(*(not f for f in fresh)) if fresh else None
        self.state, self.conv_state = self.layer.pool(slots), self.layer.conv_pool(slots)

    def operands(self, part: slice) -> dict[str, Any]:
        """Return fresh operands of some heads."""
        r, layer = self.rows, self.layer
        flat = slice(part.start * DIM, part.stop * DIM)
        by_channel = layer.spec.conv_layout == "channel_width"
        conv = self.conv_state.transpose(1, 2) if by_channel else self.conv_state
        conv = channels(conv, part)
        return {
            "x": channels(r.x, part),
            "weight": channels(layer.weight.T, part).T.contiguous(),
            "raw_g": r.raw_g[:, part].contiguous(),
            "raw_beta": r.raw_beta[:, part].contiguous(),
            "A_log": None if layer.A_log is None else layer.A_log[part],
            "dt_bias": None if layer.dt_bias is None else layer.dt_bias[flat],
            "conv_state": conv.transpose(1, 2).contiguous() if by_channel else conv.clone(),
            "state": self.state[:, part].clone(),
        }

    def plans(self, heads: int) -> tuple[Plan, Plan]:
        made = spec(heads, **self.fields)
        return tuple(plan(op, made, LIMITS, device="cpu") for op in ("kda_conv", "kda_prefill"))

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return o, conv state and state of all heads after one call on one rank."""
        t = self.operands(slice(0, HEADS))
        conv, prefill = self.plans(HEADS)
        cu = (self.state_ids, cuts(*self.lengths), self.initial)
        none = (torch.full_like(self.state_ids, -1),) * 2 if self.fields.get("checkpoints") else ()
        y = conv.run(t["x"], t["weight"], t["conv_state"], *cu, *none)
        qkv = y.view(len(y), 3, HEADS, DIM).unbind(1)
        gates = (t["raw_g"], t["raw_beta"], t["A_log"], t["dt_bias"])
        return prefill.run(*qkv, *gates, t["state"], *cu, *none), t["conv_state"], t["state"]


def over(
    case: Case,
    world: int,
    shards: Shards | None = None,
    stops: Mapping[int, Stops] | None = None,
    then: Callable[[ContextKDA, Any, Tensor], Any] | None = None,
    **more: Any,
) -> list[Any]:
    """Run every rank on its heads; return o, conv state and state of each, and what ``then`` makes of them."""
    shards = shards or Shards.interleaved(sum(case.lengths), world)

    def rank(group: Group) -> tuple[Any, ...]:
        per = HEADS // world
        part = slice(group.rank() * per, (group.rank() + 1) * per)
        layer, t = ContextKDA(*case.plans(per), group), case.operands(part)
        step = layer.begin(case.lengths, shards, case.state_ids, case.initial, stops)
        t |= met(case, layer, step, part)
        o = layer.run(step, **t)
        return o, t["conv_state"], t["state"], then(layer, step, o) if then else None

    return LoopbackGroup.run(world, rank, **more)


def met(case: Case, layer: ContextKDA, step: Any, part: slice) -> dict[str, Tensor]:
    """Gather the tokens of all ranks, then cut the own heads: what a layer's projections do in between."""
    rank, r = layer.group.rank(), case.rows
    x, g, beta = (layer.gather(step, step.shards.take(t, rank)) for t in (r.x, r.raw_g, r.raw_beta))
    return {
        "x": channels(x, part),
        "raw_g": g[:, part].contiguous(),
        "raw_beta": beta[:, part].contiguous(),
    }


def whole(results: list[Any], layout: str = "width_channel") -> tuple[Tensor, Tensor, Tensor]:
    """Put the ranks' heads side by side."""
    convs = [r[1].transpose(1, 2) if layout == "channel_width" else r[1] for r in results]
    per = HEADS // len(results)
    conv = torch.cat([c.reshape(len(c), 3, 3, per, DIM) for c in convs], dim=3).flatten(2)
    conv = conv.transpose(1, 2) if layout == "channel_width" else conv
    return torch.cat([r[0] for r in results], 1), conv, torch.cat([r[2] for r in results], 1)


def check(case: Case, world: int, **more: Any) -> None:
    got = whole(over(case, world, **more), case.layer.spec.conv_layout)
    for a, b in zip(got, case.expected(), strict=True):
        assert same_bits(a, b)


# --- heads and tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("gate", ["raw", "log"])
def test_ranks_with_their_own_heads_have_the_bits_of_one_rank(world: int, gate: str) -> None:
    check(Case((40, 1, 7), gate=gate, fresh=(False, True, False)), world)


@pytest.mark.parametrize("layout", ["width_channel", "channel_width"])
def test_either_layout_of_the_conv_state(layout: str) -> None:
    check(Case((20, 3), conv_layout=layout), 4)


@pytest.mark.parametrize(
    "shards",
    [
        Shards.interleaved(48, 4),
        Shards.interleaved(48, 4, 16),
        Shards.pieces([40, 1, 7], 4),
        Shards.pieces([48], 4),
    ],
)
def test_tokens_may_be_sharded_in_any_way(shards: Shards) -> None:
    check(Case((40, 1, 7)), 4, shards=shards)


@pytest.mark.parametrize("lengths", [(0, 0, 3, 0, 2), (1, 1, 64), (0,), (1,)])
def test_empty_sequences_and_single_rows(lengths: tuple[int, ...]) -> None:
    check(Case(lengths), 4)


def test_a_padding_sequence_touches_no_state() -> None:
    case = Case((5, 6, 4))
    case.state_ids = ids(3, -1, 0)
    check(case, 2, stops={1: [(2, 6)]})
    got = whole(over(case, 2, stops={1: [(2, 6)]}))
    assert got[0][5:11].count_nonzero() == 0
    assert same_bits(got[2][[1, 2, 4, 5, 6, 7]], case.state[[1, 2, 4, 5, 6, 7]])


def test_outputs_come_back_to_their_tokens_with_all_heads() -> None:
    case = Case((40, 1, 7))
    shards = Shards.pieces(case.lengths, 4)
    given = over(case, 4, shards, then=lambda layer, step, o: layer.give_back(step, o))
    parts = torch.stack([each[3] for each in given])
    assert same_bits(shards.restore(parts), case.expected()[0])


def test_projected_outputs_are_summed_in_rank_order() -> None:
    case, world = Case((30, 2)), 4
    shards = Shards.interleaved(32, world)
    projection = torch.randn(world, HEADS // world * DIM, 5)

    def project(layer: ContextKDA, step: Any, o: Tensor) -> tuple[Tensor, Tensor]:
        partial = o.float().flatten(1) @ projection[layer.group.rank()]
        return partial, layer.reduce(step, partial)

    partials, sums = zip(*(each[3] for each in over(case, world, shards, then=project)), strict=True)
    expected = functools.reduce(torch.add, partials)
    assert same_bits(shards.restore(torch.stack(sums)), expected)


def test_rows_behind_the_chunk_are_padding() -> None:
    case, world = Case((6,)), 2
    shards = Shards.interleaved(6, world)

    def rank(group: Group) -> Tensor:
        part = slice(4 * group.rank(), 4 * group.rank() + 4)
        layer, t = ContextKDA(*case.plans(4), group), case.operands(part)
        step = layer.begin(case.lengths, shards, case.state_ids, rows=9)
        t |= met(case, layer, step, part)
        assert len(t["x"]) == 9
        return layer.run(step, **t)

    o = torch.cat(LoopbackGroup.run(world, rank), 1)
    assert same_bits(o[:6].contiguous(), case.expected()[0])
    assert o[6:].count_nonzero() == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    check(Case((9, 4)), 4, faults=Faults(reorder=seed))


# --- states at any token --------------------------------------------------------------------------------


def after(case: Case, sequence: int, count: int) -> tuple[Tensor, Tensor]:
    """Return both states of a sequence's first ``count`` rows, run alone on one rank."""
    start = sum(case.lengths[:sequence])
    alone = Case(
        (count,), fresh=(not bool(case.initial[sequence]),) if case.initial is not None else (), **case.fields
    )
    alone.rows, alone.layer = case.rows.some(slice(start, start + count)), case.layer
    alone.state_ids = case.state_ids[sequence : sequence + 1]
    _, conv, state = alone.expected()
    slot = int(alone.state_ids)
    return conv[slot], state[slot]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("world", [1, 4])
def test_states_are_handed_over_at_any_token(world: int, checkpoints: bool) -> None:
    case = Case((20, 5, 9), slots=12, checkpoints=checkpoints)
    stops = {0: [(1, 3), (7, 4), (7, 5), (20, 6)], 2: [(3, 7), (8, 8)]}
    check_rest = whole(over(case, world, stops=stops))
    assert same_bits(check_rest[0], case.expected()[0])
    _, conv, state = check_rest
    for sequence, wanted in stops.items():
        for count, slot in wanted:
            expected = after(case, sequence, count)
            assert same_bits(conv[slot], expected[0]), (sequence, count)
            assert same_bits(state[slot], expected[1]), (sequence, count)
    assert same_bits(state[9:], case.state[9:])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_stop_before_the_first_row_is_the_state_that_it_begins_with(checkpoints: bool) -> None:
    case = Case((5, 6), checkpoints=checkpoints, fresh=(True, False))
    o, conv, state = whole(over(case, 2, stops={0: [(0, 4)], 1: [(0, 5)]}))
    assert state[4].count_nonzero() == conv[4].count_nonzero() == 0
    assert same_bits(state[5], case.state[1])
    assert same_bits(conv[5], case.conv_state[1])
    assert same_bits(o, case.expected()[0])


def test_a_request_goes_on_elsewhere_from_any_token() -> None:
    """The rows after a stop, on one rank and from the handed-over states, give the bits of the whole run."""
    case, world = Case((24,)), 4
    expected = case.expected()
    for count in (1, 2, 3, 11, 23):
        _, conv, state = whole(over(case, world, stops={0: [(count, 5)]}))
        rest = Case((24 - count,))
        rest.rows, rest.layer = case.rows.some(slice(count, 24)), case.layer
        rest.state, rest.conv_state, rest.state_ids = state, conv, ids(5)
        o, _, last = rest.expected()
        assert same_bits(o, expected[0][count:].contiguous())
        assert same_bits(last[5], expected[2][0])


def test_a_plan_that_stores_at_multiples_is_cut_elsewhere_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((40, 8), checkpoints=True)
    monkeypatch.setattr(Plan, "checkpoint_multiple", property(lambda self: 4))

    def calls(stops: Mapping[int, Stops]) -> int:
        return over(case, 1, stops=stops, then=lambda layer, step, o: len(step.calls))[0][3]

    assert calls({}) == 1
    assert calls({0: [(8, 4)], 1: [(4, 5)]}) == 1  # one each, at multiples
    assert calls({0: [(8, 4), (16, 5)]}) == 2  # two of one sequence
    assert calls({0: [(7, 4)]}) == 2
    assert calls({0: [(39, 4), (40, 5)]}) == 2  # nothing is left to run behind the end
    assert calls({0: [(7, 4), (11, 5)], 1: [(4, 6)]}) == 2  # 11 is 4 after the cut at 7


def test_chunks_of_a_prompt_are_the_prompt() -> None:
    case, world = Case((30,)), 2
    expected = case.expected()

    def rank(group: Group) -> tuple[Any, ...]:
        part = slice(4 * group.rank(), 4 * group.rank() + 4)
        layer, t = ContextKDA(*case.plans(4), group), case.operands(part)
        outs = []
        for begin, end in ((0, 13), (13, 14), (14, 30)):
            shards = Shards.interleaved(end - begin, world)
            initial = flags(True)
            step = layer.begin([end - begin], shards, case.state_ids, initial)
            rows = {name: t[name][begin:end] for name in ("x", "raw_g", "raw_beta")}
            outs.append(layer.run(step, **t | rows))
        return torch.cat(outs), t["conv_state"], t["state"]

    for a, b in zip(whole(LoopbackGroup.run(world, rank)), expected, strict=True):
        assert same_bits(a, b)


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        ({0: [(6, 4)]}, "state stops: stop 6 of sequence 0 is outside its 5 rows"),
        ({0: [(3, 4), (1, 5)]}, "state stops: stops of sequence 0 do not ascend: [3, 1]"),
        ({7: [(1, 4)]}, "state stops: there is no sequence 7 among 2"),
    ],
)
def test_stops_that_are_none_are_refused(stops: Mapping[int, Stops], text: str) -> None:
    case = Case((5, 2))
    with pytest.raises(GroupError) as caught:
        over(case, 2, stops=stops)
    assert isinstance(caught.value.__cause__, ContractError)
    assert str(caught.value.__cause__) == text


def test_shards_of_another_step_are_refused() -> None:
    with pytest.raises(GroupError, match=r"context-parallel KDA: lengths are 7 rows, the shards have 8$"):
        over(Case((5, 2)), 2, Shards.interleaved(8, 2))


def test_halves_that_do_not_belong_together_are_refused() -> None:
    case = Case((5,))
    conv, prefill = case.plans(4)
    other = plan("kda_prefill", dataclasses.replace(prefill.spec, scale=1.0), LIMITS, device="cpu")

    def rank(group: Group) -> list[str]:
        texts = []
        for pair in ((conv, other), (prefill, conv)):
            with pytest.raises(PlanError) as caught:
                ContextKDA(*pair, group)
            texts.append(str(caught.value))
        return texts

    assert LoopbackGroup.run(2, rank)[1] == [
        "context-parallel KDA: kda_conv and kda_prefill are planned for different Specs",
        "context-parallel KDA: takes a plan of kda_conv, got one of kda_prefill",
    ]


def test_stops_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    case = Case((5,))

    def rank(group: Group) -> str:
        layer = ContextKDA(*case.plans(4), group)
        with pytest.raises(GroupError) as caught:
            layer.begin([5], Shards.interleaved(5, 2), case.state_ids, None, {0: [(group.rank(), 4)]})
        return str(caught.value)

    text = 'ranks do not agree on stops: rank 0 has "{0: [(0, 4)]}", rank 1 has "{0: [(1, 4)]}"'
    assert LoopbackGroup.run(2, rank) == [text] * 2


@pytest.mark.parametrize("call", range(6))
def test_a_rank_that_dies_ends_the_layer_and_nothing_is_returned(call: int) -> None:
    returned = []
    case = Case((5,))
    with pytest.raises(GroupError, match=r"^rank 1 died$"):
        over(
            case,
            2,
            then=lambda layer, step, o: returned.append(layer.give_back(step, o)),
            faults=Faults(dead={1: call}),
            timeout=5,
        )
    assert returned == []
