from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from kimi_hal.errors import GroupError
from kimi_hal.parallel.agreement import agree_on
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup, TorchGroup, agree


def run(fn: Callable[[Group], Any], world: int = 3, **options: Any) -> list[Any]:
    return LoopbackGroup.run(world, fn, **options)


def failures(fn: Callable[[Group], Any], world: int = 3, **options: Any) -> dict[int, str]:
    """Run code that fails; return the text of each rank's GroupError."""
    seen: dict[int, str] = {}

    def one_rank(group: Group) -> Any:
        try:
            return fn(group)
        except GroupError as error:
            seen[group.rank()] = str(error)
            raise

    with pytest.raises(GroupError):
        LoopbackGroup.run(world, one_rank, **options)
    return seen


# --- what arrives ---------------------------------------------------------------------------------------


def test_every_rank_knows_its_place() -> None:
    assert run(lambda g: (g.rank(), g.size())) == [(0, 3), (1, 3), (2, 3)]


def test_all_gather_returns_rank_order() -> None:
    for got in run(lambda g: g.all_gather(torch.tensor([g.rank(), 10 * g.rank()]))):
        assert got.tolist() == [[0, 0], [1, 10], [2, 20]]


def test_all_to_all_sends_piece_i_to_rank_i() -> None:
    got = run(lambda g: g.all_to_all(torch.arange(3) + 10 * g.rank()).tolist())
    assert got == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_bytes_arrive_as_they_are() -> None:
    bits = torch.tensor([0x7F800001, -1, -(1 << 31)], dtype=torch.int32)  # a signalling NaN among them
    for got in run(lambda g: g.all_gather(bits.view(torch.float32))):
        assert torch.equal(got.view(torch.int32), bits.expand(3, -1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bool, torch.bfloat16])
def test_narrow_dtypes_are_moved(dtype: torch.dtype) -> None:
    for got in run(lambda g: g.all_gather(torch.ones(2, 2).to(dtype))):
        assert got.dtype == dtype
        assert (got.float() == 1).all()


def test_scalars_and_empty_tensors_are_moved() -> None:
    assert run(lambda g: g.all_gather(torch.tensor(g.rank())).tolist()) == [[0, 1, 2]] * 3
    assert run(lambda g: tuple(g.all_gather(torch.empty(0, 4)).shape)) == [(3, 0, 4)] * 3


def test_what_was_sent_may_be_overwritten_at_once() -> None:
    def one_rank(group: Group) -> list[int]:
        x = torch.tensor([group.rank()])
        got = group.all_gather(x)
        x.fill_(99)
        group.barrier()
        return got.flatten().tolist()

    assert run(one_rank, faults=Faults(late={2: 0.02})) == [[0, 1, 2]] * 3


def test_a_rank_sees_copies_alone() -> None:
    def one_rank(group: Group) -> list[int]:
        x = torch.zeros(2, dtype=torch.int64)
        group.all_gather(x)[:] = 7
        group.barrier()
        return x.tolist()

    assert run(one_rank) == [[0, 0]] * 3


def test_one_rank_is_a_group() -> None:
    assert run(lambda g: (g.all_gather(torch.ones(2)).shape, g.bytes_sent), world=1) == [((1, 2), 0)]


def test_bytes_are_counted_once_however_many_receive_them() -> None:
    def one_rank(group: Group) -> int:
        group.all_gather(torch.zeros(5, dtype=torch.int32))
        group.all_to_all(torch.zeros(4, 3, dtype=torch.int16))
        group.barrier()
        return group.bytes_sent

    assert run(one_rank, world=4) == [20 + 18] * 4


@pytest.mark.parametrize("seed", range(3))
def test_reordered_arrival_changes_nothing(seed: int) -> None:
    def one_rank(group: Group) -> list[list[int]]:
        return [group.all_gather(torch.tensor(group.rank() + 10 * i)).tolist() for i in range(5)]

    expected = [[10 * i, 10 * i + 1, 10 * i + 2] for i in range(5)]
    assert run(one_rank, faults=Faults(reorder=seed)) == [expected] * 3


def test_a_late_rank_within_the_timeout_is_awaited() -> None:
    began = time.perf_counter()
    got = run(lambda g: g.all_gather(torch.tensor(g.rank())).tolist(), faults=Faults(late={1: 0.1}))
    assert got == [[0, 1, 2]] * 3
    assert time.perf_counter() - began >= 0.1


# --- what goes wrong ------------------------------------------------------------------------------------


def test_other_shapes_are_an_error_on_every_rank() -> None:
    seen = failures(lambda g: g.all_gather(torch.zeros(2, 3 + g.rank() // 2, dtype=torch.bfloat16)))
    text = (
        "ranks disagree at call 0: ranks 0, 1 all_gather [2, 3] bfloat16; rank 2 all_gather [2, 4] bfloat16"
    )
    assert seen == dict.fromkeys(range(3), text)


def test_other_dtypes_are_an_error_on_every_rank() -> None:
    seen = failures(lambda g: g.all_gather(torch.zeros(2, dtype=[torch.int32, torch.float32][g.rank()])), 2)
    text = "ranks disagree at call 0: rank 0 all_gather [2] int32; rank 1 all_gather [2] float32"
    assert seen == dict.fromkeys(range(2), text)


def test_other_calls_are_an_error_on_every_rank() -> None:
    seen = failures(lambda g: g.barrier() if g.rank() else g.all_gather(torch.zeros(1)), 2)
    text = "ranks disagree at call 0: rank 0 all_gather [1] float32; rank 1 barrier"
    assert seen == dict.fromkeys(range(2), text)


def test_a_rank_that_raises_ends_the_call_of_the_others() -> None:
    def one_rank(group: Group) -> None:
        group.barrier()
        if group.rank() == 1:
            raise ValueError("out of pages")
        group.all_gather(torch.zeros(1))

    with pytest.raises(GroupError, match=r"^rank 1 raised ValueError: out of pages$") as caught:
        run(one_rank)
    assert isinstance(caught.value.__cause__, ValueError)
    text = "rank 1 raised ValueError: out of pages; all_gather (call 1) cannot end"
    assert failures(one_rank) == {0: text, 2: text}


def test_a_rank_that_returns_early_ends_the_call_of_the_others() -> None:
    seen = failures(lambda g: None if g.rank() == 2 else g.barrier())
    assert seen == dict.fromkeys((0, 1), "rank 2 returned; barrier (call 0) cannot end")


def test_a_dead_rank_ends_the_call_of_the_others() -> None:
    def one_rank(group: Group) -> None:
        group.barrier()
        group.all_gather(torch.zeros(1))

    seen = failures(one_rank, faults=Faults(dead={0: 1}))
    assert seen == dict.fromkeys((1, 2), "rank 0 died; all_gather (call 1) cannot end")


def test_a_rank_beyond_the_timeout_ends_the_call_on_all() -> None:
    seen = failures(lambda g: g.barrier(), faults=Faults(late={1: 0.9}), timeout=0.4)
    time.sleep(0.9)  # the late rank arrives and is told too
    assert seen == dict.fromkeys(range(3), "rank 1 did not arrive at barrier (call 0) within 0.4 s")


def test_after_a_failure_every_call_fails() -> None:
    texts: dict[int, list[str]] = {0: [], 1: []}

    def one_rank(group: Group) -> None:
        for _ in range(2):
            with pytest.raises(GroupError) as caught:
                group.all_gather(torch.zeros(1 + group.rank()))
            texts[group.rank()].append(str(caught.value))

    run(one_rank, world=2)
    text = "ranks disagree at call 0: rank 0 all_gather [1] float32; rank 1 all_gather [2] float32"
    assert texts == {0: [text] * 2, 1: [text] * 2}


def test_pieces_must_be_one_a_rank() -> None:
    seen = failures(lambda g: g.all_to_all(torch.zeros(2, 5)))
    assert seen[0] == "all_to_all needs one piece a rank, [3, ...], got [2, 5]"


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(1, 2),
        torch.empty(2, 2, dtype=torch.float64),
        torch.zeros(2, 4)[:, ::2],
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(
        GroupError, match=r"all_gather: out must be contiguous \[2, 2\] float32 on cpu, got \["
    ):
        run(lambda g: g.all_gather(torch.ones(2), out=out), 2)


def test_what_is_no_dense_tensor_is_refused() -> None:
    with pytest.raises(GroupError, match="all_gather takes a dense tensor, got list"):
        run(lambda g: g.all_gather([1]), 2)
    with pytest.raises(GroupError, match=r"all_to_all takes a dense tensor, got float32 torch\.sparse_coo"):
        run(lambda g: g.all_to_all(torch.ones(2, 2).to_sparse()), 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), None])
def test_a_timeout_ends(timeout: Any) -> None:
    with pytest.raises(GroupError) as caught:
        run(lambda g: g.barrier(), 2, timeout=timeout)
    assert str(caught.value) == f"timeout={timeout!r} is not a number of seconds above 0"


def test_faults_of_a_rank_that_is_not_there_are_refused() -> None:
    with pytest.raises(GroupError, match=r"^faults name rank 5, the group has ranks 0 to 1$"):
        run(lambda g: g.barrier(), 2, faults=Faults(dead={5: 0}))


def test_one_ranks_group_used_by_two_threads_is_an_error_at_once() -> None:
    groups: dict[int, Group] = {}

    def borrowed(group: Group) -> None:
        groups[group.rank()] = group
        group.barrier()
        groups[0].barrier()

    with pytest.raises(
        GroupError, match=r"^rank 0 called barrier while another call of this rank was under way: "
    ):
        run(borrowed, 2, timeout=30)


def test_texts_with_zeros_at_the_end_are_shown_as_they_are() -> None:
    seen = failures(lambda g: agree(g, "x\0" if g.rank() else "x"), 2)
    assert seen[0] == r"ranks do not agree: rank 0 'x'; rank 1 'x\x00'"


def test_the_order_of_facts_does_not_matter() -> None:
    run(lambda g: agree_on(g, {"a": 1, "b": 2} if g.rank() else {"b": 2, "a": 1}), 2)


def test_a_group_has_a_rank() -> None:
    with pytest.raises(GroupError, match=r"^a group has at least 1 rank, got 0$"):
        run(lambda g: None, world=0)


# --- agree ----------------------------------------------------------------------------------------------


def test_ranks_with_one_text_agree() -> None:
    assert run(lambda g: agree(g, "the same plan" * 100)) == [None] * 3


def test_ranks_with_another_text_are_named() -> None:
    seen = failures(lambda g: agree(g, "nvidia.flashmla" if g.rank() != 1 else "nvidia.triton"))
    text = "ranks do not agree: ranks 0, 2 'nvidia.flashmla'; rank 1 'nvidia.triton'"
    assert seen == dict.fromkeys(range(3), text)


def test_texts_that_differ_behind_what_is_shown_do_not_agree() -> None:
    text = "plan " + "x" * 1000
    seen = failures(lambda g: agree(g, text + str(g.rank() % 2) + "y" * 500))
    shown = [f"{text[:160]}… {'x' * 60}{i}{'y' * 239}…" for i in range(2)]
    assert seen == dict.fromkeys(
        range(3), f"ranks do not agree: ranks 0, 2 '{shown[0]}'; rank 1 '{shown[1]}'"
    )


def test_texts_of_other_lengths_do_not_agree() -> None:
    seen = failures(lambda g: agree(g, "plan é" * (g.rank() + 1)), 2)
    assert seen[0] == "ranks do not agree: rank 0 'plan é'; rank 1 'plan éplan é'"
    assert failures(lambda g: agree(g, "a" * g.rank()), 2)[1] == "ranks do not agree: rank 0 ''; rank 1 'a'"


def test_ranks_that_agree_meet_once_and_send_40_bytes() -> None:
    def one_rank(group: Group) -> int:
        agree(group, "the same plan" * 100)
        agree_on(group, {"interleave": 4})
        return group.bytes_sent

    assert run(one_rank) == [80] * 3


def test_facts_that_differ_are_named_with_their_ranks() -> None:
    facts = [
        {"dcp.world": 4, "dcp.interleave": 1, "dtype": "bfloat16"},
        {"dcp.world": 4, "dcp.interleave": 64, "dtype": "bfloat16"},
        {"dcp.world": 4, "dcp.interleave": 1, "dtype": "float8_e4m3fn"},
    ]
    text = (
        "ranks do not agree on dcp.interleave: ranks 0, 2 have 1, rank 1 has 64; "
        'dtype: ranks 0, 1 have "bfloat16", rank 2 has "float8_e4m3fn"'
    )
    assert failures(lambda g: agree_on(g, facts[g.rank()])) == dict.fromkeys(range(3), text)


def test_a_fact_that_one_rank_does_not_have_is_nothing() -> None:
    seen = failures(lambda g: agree_on(g, {"page": 64} if g.rank() else {}), 2)
    assert seen[1] == "ranks do not agree on page: rank 0 has nothing, rank 1 has 64"


# --- torch.distributed ----------------------------------------------------------------------------------


def test_without_a_process_group_the_error_says_what_to_type() -> None:
    with pytest.raises(
        GroupError, match=r"^no process group; start one: torch.distributed.init_process_group"
    ):
        TorchGroup()


def one_process(rank: int, address: str, answers: Any) -> None:
    """One of two real processes; puts what it saw into ``answers``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    group = TorchGroup(timeout=20)
    bits = torch.tensor([0x7F800001, -1 - rank], dtype=torch.int32).view(torch.float32)
    seen: dict[str, Any] = {
        "place": (group.rank(), group.size()),
        "bits": group.all_gather(bits).view(torch.int32).tolist(),
        "fp8": group.all_gather(torch.full((3, 2), 1.0 + rank).to(torch.float8_e4m3fn).t()).float().tolist(),
        "scalar": group.all_gather(torch.tensor(rank)).tolist(),
        "pieces": group.all_to_all(torch.arange(4).reshape(2, 2) + 10 * rank).tolist(),
    }
    seen["bytes"] = group.bytes_sent
    group.barrier()
    agree(group, "one plan")
    seen["agree"] = raised(lambda: agree(group, f"plan {rank}"))
    seen["shapes"] = raised(lambda: group.all_gather(torch.zeros(2 + rank)))
    seen["device"] = raised(lambda: group.all_gather(torch.zeros(2, device="meta")))
    seen["after"] = TorchGroup(verify=False).all_gather(torch.tensor([rank])).tolist()
    impatient = TorchGroup(timeout=0.2, verify=False)
    seen["late"] = raised(lambda: impatient.barrier() if rank == 0 else time.sleep(0.6))
    answers.put((rank, seen))


def raised(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except GroupError as error:
        return str(error)
    return ""


def test_two_processes_of_gloo(tmp_path: Any) -> None:
    context = processes.get_context("spawn")
    answers = context.SimpleQueue()
    args = (f"file://{tmp_path}/meeting", answers)
    ranks = [context.Process(target=one_process, args=(rank, *args), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    seen = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join(20)
    bits = [[0x7F800001, -1], [0x7F800001, -2]]
    for rank in range(2):
        assert seen[rank]["place"] == (rank, 2)
        assert seen[rank]["bits"] == bits
        assert seen[rank]["fp8"] == [[[1.0] * 3] * 2, [[2.0] * 3] * 2]
        assert seen[rank]["scalar"] == [0, 1]
        assert seen[rank]["pieces"] == [[2 * rank, 2 * rank + 1], [10 + 2 * rank, 11 + 2 * rank]]
        assert seen[rank]["bytes"] == 8 + 6 + 8 + 16
        assert seen[rank]["agree"] == "ranks do not agree: rank 0 'plan 0'; rank 1 'plan 1'"
        assert seen[rank]["shapes"].endswith(": rank 0 all_gather [2] float32; rank 1 all_gather [3] float32")
        assert seen[rank]["device"] == (
            "all_gather: the process group's backend (cpu:gloo,cuda:gloo) moves tensors of cpu, cuda, this one is on "
            "meta: give a copy on one of these, or init_process_group with a backend for it"
        )
        assert seen[rank]["after"] == [[0], [1]]
    assert seen[0]["late"].startswith("rank 0 of 2: barrier (call 0) did not end within 0.2 s: ")
    assert seen[0]["late"].endswith("Did every rank reach this call?")
