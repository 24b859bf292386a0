"""Device hooks on the host."""

from __future__ import annotations

import torch

from kimi_hal.dispatch.device import CANARY, HostDevice, guarded


def test_a_guarded_tensor_stands_between_canaries() -> None:
    tensor = HostDevice().empty((3, 5), "bfloat16", guard=100)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    room = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * 2
    assert start >= 256
    assert (room[:start] == CANARY).all()
    assert (room[start + 30 :] == CANARY).all()
    assert room.numel() - (start + 30) >= 256


def test_a_guarded_tensor_starts_where_a_workspace_may() -> None:
    kept = [guarded((size,), "uint8", 4096, "cpu") for size in range(1, 4000, 97)]
    assert all(tensor.data_ptr() % 256 == 0 for tensor in kept)


def test_an_empty_tensor_can_be_guarded() -> None:
    assert guarded((0, 4), "float32", 1, "cpu").shape == (0, 4)


def test_the_host_times_reports_memory_and_has_no_graph() -> None:
    device = HostDevice()
    device.synchronize()
    assert device.time(lambda: None) >= 0
    assert device.capture(lambda: None) is None
    free, total = device.memory()
    assert 0 < free <= total
    assert {"python", "torch"} <= set(device.versions())
