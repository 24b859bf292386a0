"""Buffers that are far larger than what exists of them: where rows stand, what guards them, what they cost."""

from __future__ import annotations

import resource

import pytest
import torch

from kimi_hal.dispatch.device import CANARY, HostDevice
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import execute
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.poison import Room
from kimi_hal_conformance.sparse import AROUND, CannotTryError, Sparse, held

load()
FAR = Sparse(places=(5, 1 << 20, 0), rows=(1 << 20) + 1, stride=1 << 12, ids={"table": 1, "slots": 4})
SMALL = torch.arange(12, dtype=torch.uint8).view(3, 4)


def test_rows_stand_at_their_places_behind_2_to_the_32() -> None:
    whole = Room(HostDevice(), {"cache": FAR}).operand("cache", SMALL)
    assert whole.shape == ((1 << 20) + 1, 4)
    assert whole.stride() == (1 << 12, 1)
    assert whole[1 << 20].data_ptr() - whole.data_ptr() == 1 << 32
    assert [whole[place].tolist() for place in FAR.places] == SMALL.tolist()


def test_only_what_is_touched_exists() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    room = Room(HostDevice(), {"cache": FAR})
    room.operand("cache", SMALL)
    assert list(room.problems(())) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB of 4 GiB


def test_numbers_of_rows_are_those_of_the_larger_buffer() -> None:
    room = Room(HostDevice(), {"cache": FAR})
    table = room.operand("table", torch.tensor([[0, 1], [2, -1]], dtype=torch.int32))
    assert table.tolist() == [[5, 1 << 20], [0, -1]]
    assert table.dtype == torch.int32
    slots = room.operand("slots", torch.tensor([0, 6, 11, -5]))
    assert slots.tolist() == [20, (1 << 22) + 2, 3, -5]


def test_a_number_behind_the_last_row_stays_behind_it() -> None:
    room = Room(HostDevice(), {"cache": FAR})
    assert room.operand("table", torch.tensor([3, 7])).tolist() == [(1 << 20) + 1, (1 << 20) + 5]
    assert room.operand("slots", torch.tensor([13])).tolist() == [4 * ((1 << 20) + 1) + 1]


def test_a_view_of_numbers_keeps_its_strides() -> None:
    column = torch.tensor([[0, 9, 9], [2, 9, 9]], dtype=torch.int32)[:, 0]
    placed = Room(HostDevice(), {"cache": FAR}).operand("table", column)
    assert (placed.tolist(), placed.stride()) == ([5, 0], (3,))


def test_an_operand_as_the_case_has_it_is_its_rows() -> None:
    room = Room(HostDevice(), {"cache": FAR})
    assert torch.equal(room.as_given(room.operand("cache", SMALL)), SMALL)
    other = room.operand("q", SMALL)
    assert room.as_given(other) is other


@pytest.mark.parametrize("behind", [-1, 4])
def test_a_write_beside_a_row_is_found(behind: int) -> None:
    room = Room(HostDevice(), {"cache": FAR})
    whole = room.operand("cache", SMALL)
    row = whole[1 << 20]
    torch.as_strided(row, (1,), (1,), row.storage_offset() + behind).fill_(CANARY ^ 1)
    assert list(room.problems(("cache",))) == ["memory around cache was written"]


def test_a_write_into_a_row_is_found_where_the_operand_is_only_read() -> None:
    room = Room(HostDevice(), {"cache": FAR})
    room.operand("cache", SMALL)[5, 2] = 99
    assert list(room.problems(("cache",))) == []
    assert list(room.problems(())) == ["cache was modified"]


def test_an_outputs_rows_hold_nan_and_stand_far_apart() -> None:
    far = Sparse(places=(0, 1, 2), rows=3, stride=1 << 30)
    room = Room(HostDevice(), {"out": far})
    out = room.output("out", (3, 5), "float32")
    assert out.isnan().all()
    assert out[2].data_ptr() - out.data_ptr() == 1 << 33
    assert list(room.problems(())) == []


class SmallDevice(HostDevice):
    """A device with 3 GiB."""

    def memory(self) -> tuple[int, int]:
        return 2 << 30, 3 << 30


def test_a_device_without_room_says_what_is_needed() -> None:
    with pytest.raises(CannotTryError) as error:
        held(SmallDevice(), (1 << 32) + 2 * AROUND)
    assert str(error.value) == "it needs 4.0 GiB of device memory; 2.0 of 3.0 GiB are free"


def test_a_case_that_cannot_be_tried_is_not_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(size: int) -> torch.Tensor:
        raise CannotTryError(f"no {size} bytes")

    monkeypatch.setattr("kimi_hal_conformance.sparse.mapped", nothing)
    case = cases.get("store_latent/edges/far-pages")
    verdict = execute.run_case(case, Subject("reference.torch", "cpu", HostDevice()), 0)
    assert verdict.status == "not_run"
    assert verdict.problems[0].startswith("no 42")


def test_every_operator_that_multiplies_by_a_stride_has_a_far_case() -> None:
    far = {c.operator for c in cases.CASES.values() if c.sparse}
    without = {"kda_commit", "prepare_moe_weights", "moe_layer", "topk_merge", "all_gather"}
    assert far == {c.operator for c in cases.CASES.values()} - without
    assert all(c.fault == 8 for c in cases.CASES.values() if c.sparse)
