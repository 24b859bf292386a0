from __future__ import annotations

import torch

from kimi_hal.ops import values


def test_interleaved_views_of_one_buffer_do_not_overlap() -> None:
    pool = torch.zeros(10, 100, dtype=torch.uint8)
    left, right = pool[:, :50], pool[:, 50:]
    assert not values.overlaps(left, right)
    assert values.overlaps(left, pool[:, 49:])
    assert values.overlaps(pool[3:4, 49:51], left)


def test_views_with_different_row_strides() -> None:
    pool = torch.zeros(1000, dtype=torch.uint8)
    sevens, tens = pool.as_strided((100, 2), (7, 1)), pool.as_strided((10, 3), (100, 1), 60)
    taken = {7 * i + j for i in range(100) for j in range(2)}
    other = {60 + 100 * i + j for i in range(10) for j in range(3)}
    assert values.overlaps(sevens, tens) == bool(taken & other)
    for offset in range(7):
        view = pool.as_strided((20, 2), (14, 1), offset)
        mine = {offset + 14 * i + j for i in range(20) for j in range(2)}
        assert values.overlaps(sevens, view) == bool(taken & mine)


def test_tensors_of_different_memory_and_empty_ones_never_overlap() -> None:
    a = torch.zeros(4)
    assert not values.overlaps(a, torch.zeros(4))
    assert not values.overlaps(a, a[:0])
    assert values.overlaps(a, a.view(torch.uint8))


def test_expanded_and_transposed_views() -> None:
    a = torch.zeros(4, 6)
    assert values.overlaps(a[0].expand(3, 6), a)
    assert values.overlaps(a.T[1], a[:, 1:2])
    assert not values.overlaps(a.T[1], a[:, 2:])


def test_runs_of_adjacent_bytes() -> None:
    a = torch.zeros(3, 4, 5, dtype=torch.float32)
    starts, length = values.runs(a)
    assert (starts.tolist(), length) == ([a.data_ptr()], 240)
    starts, length = values.runs(a[:, 1:3])
    assert (starts - a.data_ptr()).tolist() == [20, 100, 180]
    assert length == 40


def test_below_lets_padding_pass() -> None:
    assert not list(values.below("slots", torch.tensor([-1, 7]), 8, "the cache"))
    assert list(values.below("slots", torch.tensor([-1, 8]), 8, "the cache")) == [
        "slots holds 8, beyond the cache (8)"
    ]
    assert not list(values.below("slots", torch.tensor([]), 0, "the cache"))


def test_between_names_both_ends() -> None:
    assert list(values.between("index_len", torch.tensor([-3, 9]), 0, 5)) == [
        "index_len holds -3, below 0",
        "index_len holds 9, beyond 4",
    ]


def test_distinct_ignores_padding_and_the_dump_slot() -> None:
    assert not list(values.distinct("slots", torch.tensor([-1, -1, 3, 0, 0]), ignore=0))
    assert list(values.distinct("slots", torch.tensor([4, 3, 4, -1]))) == ["slots names 4 twice"]


def test_table_pages_reads_only_what_positions_name() -> None:
    table = torch.tensor([[0, 99], [98, 1]], dtype=torch.int32)
    local, row_req = torch.tensor([[0, 3], [4, 7]]), torch.tensor([0, 1], dtype=torch.int32)
    live = torch.ones(2, 2, dtype=torch.bool)
    assert not list(values.table_pages(live, local, row_req, table, 4, 2))
    assert list(values.table_pages(live, local + 1, row_req, table, 4, 2)) == [
        "block_table holds 99, beyond the cache's pages (2)"
    ]


def test_an_output_may_share_the_one_input_that_the_contract_names() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    tensors = {"x": a, "out": a, "other_out": b, "none": None, "number": 3}
    assert list(values.outputs_apart(tensors, ("out", "other_out"))) == ["out overlaps x"]
    assert not list(values.outputs_apart(tensors, ("out", "other_out"), may_alias={"out": "x"}))
    tensors["other_out"] = a
    assert list(values.outputs_apart(tensors, ("out", "other_out"), may_alias={"out": "x"})) == [
        "out overlaps other_out",
        "other_out overlaps x",
    ]


def test_what_is_counted_of_a_tensor_is_counted_on_the_host_whatever_the_default_device() -> None:
    a = torch.zeros(20)
    with torch.device("meta"):
        assert values.overlaps(a[::2], a[2:9:3])
        assert not values.overlaps(a[::2], a[1::2])
        assert values.shares_elements((4, 4), (2, 3))
        assert not values.shares_elements((3, 4), (2, 3))
