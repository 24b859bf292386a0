"""Canaries stand around every buffer, and in the gaps of strided ones."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch

from kimi_hal.dispatch.contract import TensorCap
from kimi_hal.dispatch.device import HostDevice
from kimi_hal.ops.operator import OutputShape
from kimi_hal_conformance import worker
from kimi_hal_conformance.apart import apart
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.draws import strided
from kimi_hal_conformance.messages import Batch, Done, Message
from kimi_hal_conformance.poison import GUARD, Room, no_canaries
from kimi_hal_conformance.verdict import FAILED


def test_an_untouched_room_has_no_problems() -> None:
    room = Room(HostDevice())
    room.operand("q", torch.randn(3, 5))
    room.operand("ids", torch.arange(4, dtype=torch.int32)[::2])
    room.operand("many", [torch.ones(2), torch.zeros(0, 3)])
    room.output("out", (2, 3), "bfloat16")
    assert list(room.problems(())) == []


def test_an_operand_keeps_its_values_and_strides() -> None:
    original = strided(torch.randn(3, 5))
    placed = Room(HostDevice()).operand("q", original)
    assert torch.equal(placed, original)
    assert placed.stride() == original.stride()


def test_a_write_into_an_input_is_found() -> None:
    room = Room(HostDevice())
    room.operand("q", torch.zeros(4))[2] = 1.0
    assert list(room.problems(())) == ["q was modified"]
    assert list(room.problems(("q",))) == []


def test_a_write_between_the_rows_of_a_strided_operand_is_found() -> None:
    room = Room(HostDevice())
    placed = room.operand("q", strided(torch.zeros(3, 5), pad=2))
    torch.as_strided(placed, (1,), (1,), placed.storage_offset() + 5).fill_(9.0)
    assert list(room.problems(("q",))) == ["memory around q was written"]


def test_a_write_just_past_an_output_is_found() -> None:
    room = Room(HostDevice())
    out = room.output("out", (4,), "float32")
    torch.as_strided(out, (1,), (1,), out.storage_offset() + 4).fill_(0.0)
    assert list(room.problems(())) == ["memory around out was written"]


def test_outputs_hold_what_no_result_is_before_the_call() -> None:
    room = Room(HostDevice())
    assert room.output("a", (3,), "float32").isnan().all()
    assert room.output("b", (3,), "bfloat16").isnan().all()
    assert (room.output("c", (3,), "int32") == 0x5B5B5B5B).all()


def test_scratch_holds_nan_before_the_call() -> None:
    assert (Room(HostDevice()).scratch("workspace", 5) == 0xFF).all()


def test_a_column_of_a_table_is_compared_by_its_bits() -> None:
    room = Room(HostDevice())
    column = torch.tensor([[1, 2, 3]], dtype=torch.int32)[:, 0]
    placed = room.operand("ids", column)
    assert list(room.problems(())) == []
    placed[0] = 2
    assert list(room.problems(())) == ["ids was modified"]


def test_nan_and_minus_zero_are_bits_like_others() -> None:
    room = Room(HostDevice())
    placed = room.operand("x", torch.tensor([float("nan"), 0.0]))
    assert list(room.problems(())) == []
    placed[1] = -0.0
    assert list(room.problems(())) == ["x was modified"]


def test_the_guard_is_as_wide_as_promised() -> None:
    out = Room(HostDevice()).output("out", (1,), "uint8")
    assert out.storage_offset() >= GUARD


def test_a_write_between_the_rows_of_an_output_is_found() -> None:
    room = Room(HostDevice())
    out = room.output("out", (3, 2, 5), "float32", apart(OutputShape("out", (3, 2, 5)), None))
    assert out.stride() == (22, 9, 1)
    assert out.isnan().all()
    assert list(room.problems(())) == []
    torch.as_strided(out, (1,), (1,), out.storage_offset() + 5).fill_(9.0)
    assert list(room.problems(())) == ["memory around out was written"]


def test_gaps_stand_where_a_kernel_admits_them_and_keep_its_alignment() -> None:
    shape = OutputShape("out", (3, 2, 5), "bfloat16")
    assert apart(shape, TensorCap(align=16)) == (40, 16, 1)
    assert apart(shape, TensorCap(align=2, contiguous=("heads",))) == (11, 5, 1)
    assert apart(shape, TensorCap(contiguous=("all",))) == (10, 5, 1)


class NoGuard(HostDevice):
    """Hooks that pass the guard over."""

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype))


class OtherGuard(HostDevice):
    """Hooks that leave room, but no canaries in it."""

    def empty(self, shape: tuple[int, ...], dtype: str, *, guard: int) -> Any:
        room = torch.zeros(3 * guard, dtype=torch.uint8)
        size = getattr(torch, dtype).itemsize * torch.Size(shape).numel()
        return room[guard : guard + size].view(getattr(torch, dtype)).view(shape)


def test_the_hosts_hooks_give_canaries() -> None:
    assert no_canaries(HostDevice()) == ""


def test_hooks_without_canaries_are_said() -> None:
    start = "empty((5,), 'uint8', guard=4096) gives "
    end = "that can be looked at, expected 8192 or more, each 0xa5 (hookspecs.DeviceHooks.empty)"
    assert no_canaries(NoGuard()) == f"{start}0 bytes around the tensor {end}"
    assert no_canaries(OtherGuard()) == f"{start}12283 bytes around the tensor {end}"


def test_hooks_without_canaries_fail_every_case() -> None:
    load()
    cases = ("kda_gate/tp8/rows0", "kda_gate/tp8/rows1")
    batch = Batch(
        implementation="acme.fast",
        device="cpu",
        hooks=f"{__name__}:NoGuard",
        cases=cases,
        seed=0,
        limit=1.0,
    )
    reading, writing = os.pipe()
    assert worker._started(batch, writing) is None
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        messages = [msgspec.json.decode(line, type=Message) for line in lines if line.strip()]
    verdicts = [m.verdict for m in messages if isinstance(m, Done)]
    assert [(v.case, v.status) for v in verdicts] == [(case, FAILED) for case in cases]
    (problem,) = verdicts[0].problems
    assert problem.startswith(f"the device hooks {__name__}:NoGuard give no canaries: empty((5,), 'uint8', ")
