"""Checks of the portable ``all_gather``: against the reference, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import device, on_device
from torch import Tensor

import kimi_hal as hal
from kimi_hal.errors import ContractError
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.reference.all_gather import all_gather

LIMITS = Limits(max_rows=64, max_reqs=64)
DEVICE = device()
LAYOUTS = ("rank_major", "token_order", "last_dim")


def drawn(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a rank's tensor, every bit at random: NaN payloads and both zeros among them."""
    g = torch.Generator().manual_seed(rank)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=g, dtype=torch.uint8)
    return raw.view(dtype) if raw.numel() else raw.new_zeros(shape).to(dtype)


def as_bytes(x: Tensor) -> list[int]:
    return x.contiguous().reshape(-1).view(torch.uint8).tolist() if x.numel() else []


def same(
    layout: str,
    shape: tuple[int, ...],
    world: int = 2,
    interleave: int = 1,
    *,
    dtype: torch.dtype = torch.bfloat16,
    total: int | None = None,
    out: Any = None,
    turned: bool = False,
) -> None:
    """Gather by kernel and by reference and compare; ``out`` makes a buffer of a shape."""

    def one(group: Group) -> None:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        name = str(dtype).removeprefix("torch.")
        spec = GatherSpec(layout=layout, dtype=name, ndim=len(shape), dcp=dcp)
        x = drawn(group.rank(), dtype, shape)
        if turned:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        plan = hal.plan(
            "all_gather", spec, LIMITS, device=DEVICE, group=group, implementation="nvidia.triton"
        )
        expected = all_gather(spec, x, total, group=group)
        buffer = None if out is None else out(expected.shape, dtype)
        group.bytes_sent = 0
        got = on_device(plan.run, DEVICE)(x, total, **({} if out is None else {"out": buffer}))
        assert got.shape == expected.shape
        assert got.dtype == dtype
        assert as_bytes(got) == as_bytes(expected), (layout, shape, world, interleave, dtype, total)
        assert out is None or got is buffer
        assert group.bytes_sent == (x.nbytes if world > 1 else 0)

    LoopbackGroup.run(world, one)


def plain(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32).to(dtype)


def wider(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a view whose rows stand apart and begin at an odd element."""
    return plain(torch.Size((*shape[:-1], shape[-1] + 3)), dtype)[..., 1 : 1 + shape[-1]]


def taller(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a view of every second of the first dimension's entries."""
    return plain(torch.Size((2 * shape[0], *shape[1:])), dtype)[::2]


def check_every_layout_over_ranks() -> None:
    for layout in LAYOUTS:
        for world, interleave in ((1, 1), (2, 1), (3, 4), (2, 8)):
            same(layout, (8, 6), world, interleave)


def check_every_width_of_word() -> None:
    types = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
    for layout in ("token_order", "last_dim"):
        for dtype in types:
            same(layout, (8, 5), dtype=dtype)
        same(layout, (8, 16), dtype=torch.uint8)


def check_one_to_four_dimensions() -> None:
    for layout in LAYOUTS:
        for shape in ((8,), (8, 3), (8, 3, 4), (8, 2, 1, 5)):
            same(layout, shape)


def check_ragged_totals() -> None:
    for total in (0, 1, 13, 22, 24):
        same("token_order", (8, 7), 3, 4, total=total)
    same("token_order", (8, 7), 1, total=5)


def check_rows_wider_than_a_program() -> None:
    for layout in ("token_order", "last_dim"):
        same(layout, (2, 9000), dtype=torch.uint8)


def check_given_buffers_of_any_strides() -> None:
    for layout in LAYOUTS:
        for out in (plain, wider, taller):
            same(layout, (8, 6), out=out)
            same(layout, (8, 2, 4), out=out)


def check_a_turned_tensor_is_sent_as_it_is_seen() -> None:
    for layout in LAYOUTS:
        same(layout, (8, 6), turned=True)


def check_nothing_to_gather() -> None:
    for layout in LAYOUTS:
        same(layout, (0, 4))
        same(layout, (4, 0))


def check_a_total_that_does_not_fit_is_refused() -> None:
    spec = GatherSpec(layout="token_order", dtype="float32", dcp=DCP())
    plan = hal.plan("all_gather", spec, LIMITS, device=DEVICE, implementation="nvidia.triton")
    with pytest.raises(ContractError, match="total=4 is outside 0 to 3"):
        plan.run(torch.zeros(3, 2, device=DEVICE), 4)
