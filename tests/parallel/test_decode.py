"""Decode over a group: any number of ranks, in the eager and in the captured form, gives what one rank does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composite_cases import DSACase
from torch import Tensor

from kimi_hal.dispatch import composed
from kimi_hal.dispatch.plan import plan
from kimi_hal.errors import GroupError, PlanError
from kimi_hal.ops.composites import part_specs
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel import decode as module
from kimi_hal.parallel import ownership
from kimi_hal.parallel.captured import Capacity
from kimi_hal.parallel.decode import CapturedDecode
from kimi_hal.parallel.exchange import gather_heads
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup
from kimi_hal.reference import selection

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=4096, rows_per_req=8, uniform=False)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

#: Requests of one token, of fewer tokens than ranks, and long ones; several rows of some, as in a verify.
CASE = {
    "lengths": (300, 1, 5, 131),
    "rows": (
        *((0, 300 - j) for j in range(4, -1, -1)),
        (1, 1),
        (2, 3),
        (2, 4),
        (2, 5),
        *((3, 131 - j) for j in (2, 1, 0)),
        (99, 0),
    ),
    "heads": 24,
}


def one(case: DSACase) -> tuple[Tensor, Tensor]:
    """Return out and lse of one rank."""
    result: tuple[Tensor, Tensor] = plan("dsa_decode", case.spec(), LIMITS, device="cpu").run(
        **case.operands()
    )
    return result


def picks(case: DSACase, dcp: DCP, group: Group | None, protocol: str) -> Tensor:
    """Return this rank's selection as global positions, by the planned parts."""
    spec, t = case.spec(dcp, protocol=protocol), case.operands(dcp)
    query = plan("quantize_index_query", spec.query, LIMITS, device="cpu")
    topk = plan("indexer_topk", spec.indexer, LIMITS, device="cpu")
    rows = (t["row_req"], t["row_len"])
    index, scores = topk.run(
        *query.run(t["index_q"], t["index_w"]), t["index_cache"], t["index_table"], *rows
    )
    if spec.merge is not None:
        merge = plan("topk_merge", spec.merge, LIMITS, device="cpu", group=group)
        index, _, _ = merge.run(scores, index, t["row_len"])
    return torch.where(index >= 0, ownership.position(index.long(), dcp), -1)


@pytest.mark.parametrize("protocol", ["full", "compact", "scores_only"])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 64), (3, 4), (4, 1), (8, 1), (8, 4), (8, 64)])
def test_the_selection_has_the_same_bits_on_any_number_of_ranks(
    world: int, interleave: int, protocol: str
) -> None:
    case = DSACase(**CASE, score="bfloat16")
    expected = selection.ascending(picks(case, DCP(), None, protocol))

    def rank(group: Group) -> Tensor:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        return picks(case, dcp, group, protocol)

    union = selection.ascending(torch.cat(LoopbackGroup.run(world, rank), dim=1))
    assert union[:, : case.topk].equal(expected)
    assert (union[:, case.topk :] == -1).all()


def decode(
    case: DSACase, group: Group, interleave: int, protocol: str, capacity: Capacity | None = None, **more: Any
) -> tuple[Tensor, Tensor, CapturedDecode]:
    """Run one rank's captured form; return out, lse and the object."""
    dcp = DCP(world=group.size(), rank=group.rank(), interleave=interleave)
    spec = case.spec(dcp, protocol=protocol, **more)
    made = CapturedDecode(spec, LIMITS, group, device="cpu", capacity=capacity)
    t = case.operands(dcp)
    made.prepare(t["row_req"], t["row_len"], t["latent_table"], t["index_table"], max_context=300)
    return (*made.run(**t), made)


def joined(results: list[tuple[Any, ...]]) -> tuple[Tensor, Tensor]:
    return torch.cat([each[0] for each in results], dim=1), torch.cat([each[1] for each in results], dim=1)


@pytest.mark.parametrize("protocol", ["full", "compact", "scores_only"])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4), (8, 1), (8, 64)])
def test_the_captured_form_gives_the_answer_of_one_rank(world: int, interleave: int, protocol: str) -> None:
    case, room = DSACase(**CASE, score="bfloat16"), Capacity(64, 16)
    got = LoopbackGroup.run(world, lambda group: decode(case, group, interleave, protocol, room))
    torch.testing.assert_close(joined(got), one(case), **CLOSE)
    assert [int(each[2].flag) for each in got] == [0] * world


@pytest.mark.parametrize("protocol", ["compact", "scores_only"])
def test_the_captured_form_has_the_bits_of_the_eager_one(protocol: str) -> None:
    case, room = DSACase(**CASE, score="bfloat16"), Capacity(64, 16)

    def rank(group: Group) -> bool:
        out, lse, made = decode(case, group, 4, protocol, room)
        t = case.operands(DCP(world=4, rank=group.rank(), interleave=4))
        spec = case.spec(DCP(world=4, rank=group.rank(), interleave=4), protocol=protocol)
        eager = plan("dsa_decode", spec, LIMITS, device="cpu", group=group).run(**t)
        answer = made.answer(**t)
        return all(torch.equal(out, x) and torch.equal(lse, y) for x, y in (eager, answer))

    assert all(LoopbackGroup.run(4, rank))


@pytest.mark.parametrize("protocol", ["compact", "scores_only"])
def test_rows_without_room_are_flagged_and_an_eager_full_answers_them(protocol: str) -> None:
    """All keys are alike, so every row's ties straddle the cut, and there is room for one row."""
    case = DSACase(lengths=(64,), rows=tuple((0, 40 + n) for n in range(9)), score="bfloat16", heads=8)
    case.tokens = [(kv_c, k_pe, keys[:1].expand_as(keys)) for kv_c, k_pe, keys in case.tokens]

    def rank(group: Group) -> tuple[Any, ...]:
        # Of positions dealt in runs of 64, all that win are rank 0's: more than its quota.
        interleave = 64 if protocol == "compact" else 1
        out, lse, made = decode(case, group, interleave, protocol, Capacity(1, 16))
        missed = int(made.flag)
        lost = (lse == -torch.inf).all(dim=1)
        assert int(lost.sum()) == missed
        assert out[lost].count_nonzero() == 0
        made.flag.zero_()
        dcp = DCP(world=4, rank=group.rank(), interleave=interleave)
        return (*made.answer(**case.operands(dcp)), missed)

    got = LoopbackGroup.run(4, rank)
    assert [each[2] for each in got] == [8] * 4
    torch.testing.assert_close(joined(got), one(case), **CLOSE)


def test_without_a_group_it_is_one_rank() -> None:
    case = DSACase(**CASE)
    made = CapturedDecode(case.spec(), LIMITS, None, device="cpu")
    out, lse = made.run(**case.operands())
    expected = one(case)
    assert out.equal(expected[0])
    assert lse.equal(expected[1])
    assert int(made.flag) == 0


def test_a_planned_merge_with_a_flag_of_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case, flag, calls = DSACase(score="bfloat16"), torch.zeros(1, dtype=torch.int32), []
    real = module.plan

    def planned(operator: str, *args: Any, **keywords: Any) -> Any:
        made = real(operator, *args, **keywords)
        if operator != "topk_merge":
            return made

        def run(*operands: Any, **more: Any) -> Any:
            calls.append(operator)
            return made.run(*operands, **more)

        run.flag = flag  # type: ignore[attr-defined]
        capability = dataclasses.replace(
            made.choice.capability, properties=dataclasses.replace(made.properties, capture="full")
        )
        choice = dataclasses.replace(made.choice, capability=capability)
        return dataclasses.replace(made, run=run, choice=choice)

    monkeypatch.setattr(module, "plan", planned)
    got = LoopbackGroup.run(2, lambda group: decode(case, group, 1, "compact"))
    assert all(each[2].flag is flag for each in got)
    assert calls == ["topk_merge"] * 2


def test_a_composition_shows_the_flag_of_its_merge() -> None:
    def merge(*operands: Any, **more: Any) -> None: ...

    def part(run: Any) -> Any:
        return SimpleNamespace(run=run, step_bytes=0, workspace_bytes=0)

    merge.flag = torch.zeros(1, dtype=torch.int32)  # type: ignore[attr-defined]
    names = part_specs("dsa_decode", DSACase().spec(DCP(world=2)))
    context = SimpleNamespace(
        operator="dsa_decode",
        spec=DSACase().spec(DCP(world=2)),
        group=None,
        check=None,
        parts={name: part(merge if name == "topk_merge" else None) for name in names},
    )
    assert composed.build(context).flag is merge.flag  # type: ignore[attr-defined]
    context.parts["topk_merge"] = part(None)
    assert not hasattr(composed.build(context), "flag")


def test_the_captured_form_says_how_far_its_parts_can_be_captured() -> None:
    assert CapturedDecode(DSACase().spec(), LIMITS, None, device="cpu").capture == "none"


def test_a_decode_sends_queries_candidates_and_partial_results_and_nothing_else() -> None:
    """Per row: 576 bf16 of each own head, 8 bytes a candidate, 512 bf16 and one float32 of each head given."""
    case = DSACase(**CASE, out_dtype="bfloat16")
    rows, own, world = len(case.rows), 24 // 4, 4

    def rank(group: Group) -> int:
        dcp = DCP(world=world, rank=group.rank())
        spec, name = case.spec(dcp), "reference.composed"
        made = plan("dsa_decode", spec, LIMITS, device="cpu", group=group, implementation=name)
        before = group.bytes_sent
        made.run(**case.operands(dcp))
        return group.bytes_sent - before

    piece = rows * own * 512 * 2 + -(-rows * own * 4 // 16) * 16
    query, candidates = rows * own * 576 * 2, rows * case.topk * 8
    assert LoopbackGroup.run(world, rank) == [query + candidates + (world - 1) * piece] * world


@pytest.mark.parametrize("call", range(5))
def test_a_rank_that_dies_ends_the_decode_and_nothing_is_returned(call: int) -> None:
    case, returned = DSACase(score="bfloat16"), []

    def rank(group: Group) -> None:
        returned.append(decode(case, group, 1, "compact"))

    with pytest.raises(GroupError, match=r"^rank 1 died$"):
        LoopbackGroup.run(2, rank, faults=Faults(dead={1: call}), timeout=5)
    assert returned == []


def test_an_interleave_that_differs_between_ranks_is_an_error_on_every_rank() -> None:
    case = DSACase()

    def rank(group: Group) -> str:
        with pytest.raises(GroupError) as caught:
            decode(case, group, 1 + 3 * group.rank(), "full")
        return str(caught.value)

    texts = LoopbackGroup.run(2, rank)
    assert texts[0] == texts[1]
    assert '"interleave": 1' in texts[0]
    assert '"interleave": 4' in texts[0]


def test_a_world_that_one_rank_has_wrong_ends_planning_on_both() -> None:
    case = DSACase()

    def rank(group: Group) -> tuple[str, str]:
        spec = case.spec(DCP(world=2 + 2 * group.rank(), rank=group.rank()))
        with pytest.raises((PlanError, GroupError)) as caught:
            plan("dsa_decode", spec, LIMITS, device="cpu", group=group)
        return type(caught.value).__name__, str(caught.value)

    (_, told), (kind, own) = LoopbackGroup.run(2, rank)
    assert (kind, own) == ("PlanError", "dsa_decode: dcp says rank 1 of 4, the group is rank 1 of 2")
    assert told.startswith("ranks do not agree: rank 0 'reference.torch for dsa_decode, source ")
    assert told.endswith(f"rank 1 'no plan for dsa_decode: PlanError: {own}'")


def test_operands_of_another_type_on_one_rank_are_an_error_on_every_rank() -> None:
    case = DSACase(out_dtype="bfloat16")

    def rank(group: Group) -> str:
        dcp = DCP(world=2, rank=group.rank())
        t = case.operands(dcp)
        wrong = t["q"].float() if group.rank() else t["q"]
        with pytest.raises(GroupError) as caught:
            gather_heads(group, wrong)
        return str(caught.value)

    text = (
        "ranks disagree at call 0: rank 0 all_gather [6, 2, 576] bfloat16; "
        "rank 1 all_gather [6, 2, 576] float32"
    )
    assert LoopbackGroup.run(2, rank) == [text] * 2
