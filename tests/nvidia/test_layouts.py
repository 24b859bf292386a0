"""Operands laid out like those of the call before skip the check, and nothing that it refuses passes."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p, string_at
from struct import unpack_from
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_checks import CountedChecks

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.errors import ContractError
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_nvidia import driver, indexer, quantize_query, scores, streams, topk
from kimi_hal_nvidia.indexer_claims import INDEXER
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters

LIMITS = Limits(max_rows=2, max_reqs=2, max_context=8192)
SIZES = Sizes(workspace=2 * 8192 * 4)
Call = dict[str, Any]
MODULES = {
    "quantize_index_query": quantize_query,
    "indexer_logits": scores,
    "indexer_topk": indexer,
    "topk_select": topk,
}


class Driver(CountedChecks):
    """A driver that writes down what it is given to launch, and a check that counts how often it is asked."""

    def __init__(self) -> None:
        self.launched: list[bytes] = []
        self.rows: list[bytes] = []
        self.fails = False

    def launcher(self, kernel: driver.Kernel, parameters: int, **_: Any) -> Callable[..., None]:
        def launch(*_: int) -> None:
            if self.fails:
                raise RuntimeError("no launch")
            self.launched.append(string_at(parameters, 64))
            self.rows.append(string_at(parameters + 64, 96))

        return launch

    def build(self, operator: str, spec: Spec) -> Callable[..., Any]:
        claim = next(i for i in INDEXER if (i.operator, i.name) == (operator, "cuda")).capabilities[0]
        context = self.context(operator, spec, LIMITS, SIZES, claim)
        module = MODULES[operator]
        run: Callable[..., Any] = getattr(module, f"build_{operator}")(context)
        return run


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "kernel", lambda *_, **__: driver.Kernel("any", c_void_p(1), 1, 1))
    monkeypatch.setattr(driver, "launcher", made.launcher)
    for module in (quantize_query, scores, topk):
        monkeypatch.setattr(module, "device_index", lambda _: 0)
        monkeypatch.setattr(module, "raw_stream", lambda _: lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(streams.torch.cuda, "device_count", lambda: 1)
    return made


def quantised() -> Call:
    return {
        "q": torch.empty(2, 32, 128, dtype=torch.bfloat16),
        "weights": torch.empty(2, 32),
        "q_out": torch.empty(2, 32, 64, dtype=torch.uint8),
        "q_scale_out": torch.empty(2, 32, 4, dtype=torch.uint8),
        "weights_out": torch.empty(2, 32),
    }


def scored() -> Call:
    return {
        "q": torch.empty(2, 32, 128, dtype=torch.float8_e4m3fn),
        "q_scale": torch.empty(2, 32, 0, dtype=torch.uint8),
        "weights": torch.empty(2, 32),
        "cache": torch.empty(9, 8448, dtype=torch.uint8),
        "block_table": torch.empty(2, 128, dtype=torch.int32),
        "row_req": torch.empty(2, dtype=torch.int32),
        "row_len": torch.empty(2, dtype=torch.int32),
        "out": torch.empty(2, 8192),
    }


def searched() -> Call:
    room = torch.empty(SIZES.workspace + 256, dtype=torch.uint8)
    first = -room.data_ptr() % 256
    outputs = {
        "out": torch.empty(2, 64, dtype=torch.int32),
        "scores_out": torch.empty(2, 0),
        "workspace": room[first : first + SIZES.workspace],
    }
    return scored() | outputs


def selected() -> Call:
    return {
        "scores": torch.empty(2, 8192),
        "row_len": torch.empty(2, dtype=torch.int32),
        "out": torch.empty(2, 64, dtype=torch.int32),
        "scores_out": torch.empty(2, 0),
    }


CALLS: dict[str, tuple[Spec, Callable[[], Call]]] = {
    "quantize_index_query": (IndexQuerySpec(index="index.mxfp4.page64"), quantised),
    "indexer_logits": (IndexerSpec(index="index.fp8.e4m3fn.pow2.page64", num_heads=32), scored),
    "indexer_topk": (IndexerTopKSpec(index="index.fp8.e4m3fn.pow2.page64", num_heads=32, topk=64), searched),
    "topk_select": (TopKSpec(topk=64), selected),
}
OPERANDS = [(operator, name) for operator, (_, call) in CALLS.items() for name in call()]
WORSE: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda t: t.to(torch.float64),
    "size": lambda t: torch.empty(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype),
    "dimensions": lambda t: t[None],
    "device": lambda t: t.to("meta"),
    "no tensor": lambda _: [1],
}
#: Operands whose last size is the caller's.
FREE = {
    ("indexer_logits", "block_table"),
    ("indexer_logits", "out"),
    ("indexer_topk", "block_table"),
    ("indexer_topk", "workspace"),
    ("topk_select", "scores"),
}
BAD = [(*one, kind) for one in OPERANDS for kind in WORSE if kind != "size" or one not in FREE]


def addresses(operator: str, one: Call) -> list[list[int]]:
    """Return those that each launch of a call is given."""
    at = {name: tensor.data_ptr() for name, tensor in one.items()}
    if operator == "quantize_index_query":
        return [[*at.values()]]
    if operator == "topk_select":
        return [[at["scores"], at["row_len"], 0, at["out"], at["scores_out"], 0, 0]]
    operands = [at[name] for name in scored() if name != "out"]
    if operator == "indexer_logits":
        return [[*operands, at["out"]]]
    room, rest = at["workspace"], [at["block_table"], at["row_req"]]
    return [[*operands, room], [room, at["row_len"], 0, at["out"], at["scores_out"], *rest]]


@pytest.mark.parametrize("operator", CALLS)
def test_the_third_call_of_one_layout_is_not_checked_and_launches_its_own_addresses(
    faked: Driver, operator: str
) -> None:
    spec, call = CALLS[operator]
    run, calls = faked.build(operator, spec), [call() for _ in range(4)]
    for one in calls:
        run(**one)
    assert faked.checked == 2
    expected = [launch for one in calls for launch in addresses(operator, one)]
    assert [
        list(unpack_from(f"{len(e)}Q", got)) for e, got in zip(expected, faked.launched, strict=True)
    ] == expected


@pytest.mark.parametrize("operator", CALLS)
def test_another_layout_is_checked_and_so_is_the_first_when_it_comes_back(
    faked: Driver, operator: str
) -> None:
    spec, call = CALLS[operator]
    run, large = faked.build(operator, spec), call()
    small = {n: t if n in {"cache", "block_table", "workspace"} else t[:1] for n, t in large.items()}
    for one in (large, large, large, small, large, large, large):
        run(**one)
    assert faked.checked == 5
    assert len(faked.launched) == 7 * len(addresses(operator, large))


@pytest.mark.parametrize(("operator", "name", "kind"), BAD)
def test_what_the_check_refuses_is_refused_behind_recognised_calls(
    faked: Driver, operator: str, name: str, kind: str
) -> None:
    spec, call = CALLS[operator]
    run, good = faked.build(operator, spec), call()
    for _ in range(3):
        run(**good)
    with pytest.raises(ContractError, match=name):
        run(**good | {name: WORSE[kind](good[name])})
    assert len(faked.launched) == 3 * len(addresses(operator, good))


@pytest.mark.parametrize("operator", ["indexer_logits", "indexer_topk"])
def test_a_cache_at_an_odd_address_is_refused_behind_recognised_calls(faked: Driver, operator: str) -> None:
    spec, call = CALLS[operator]
    run, good = faked.build(operator, spec), call()
    for _ in range(3):
        run(**good)
    odd = torch.empty(9 * 8448 + 32, dtype=torch.uint8)
    first = -odd.data_ptr() % 16 + 1
    with pytest.raises(ContractError, match="cache must start at a multiple of 16 bytes, starts 1 past one"):
        run(**good | {"cache": odd[first : first + 9 * 8448].view(9, 8448)})


def test_a_workspace_at_an_odd_address_is_refused_behind_recognised_calls(faked: Driver) -> None:
    spec, call = CALLS["indexer_topk"]
    run, good = faked.build("indexer_topk", spec), call()
    for _ in range(3):
        run(**good)
    odd = torch.empty(SIZES.workspace + 512, dtype=torch.uint8)
    first = -odd.data_ptr() % 256 + 16
    with pytest.raises(
        ContractError, match="workspace must start at a multiple of 256 bytes, starts 16 past one"
    ):
        run(**good | {"workspace": odd[first : first + SIZES.workspace]})


def test_a_search_behind_one_that_failed_is_made_from_its_own_numbers(faked: Driver) -> None:
    spec, call = CALLS["indexer_topk"]
    run, large = faked.build("indexer_topk", spec), call()
    small = {n: t if n in {"cache", "block_table", "workspace"} else t[:1] for n, t in large.items()}
    for _ in range(3):
        run(**large)
    faked.fails = True
    with pytest.raises(RuntimeError, match="no launch"):
        run(**small)
    faked.fails = False
    run(**large)
    assert faked.rows[-2:] == faked.rows[:2]


@pytest.mark.parametrize("operator", CALLS)
def test_a_call_behind_one_whose_numbers_failed_writes_its_own(
    faked: Driver, monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    spec, call = CALLS[operator]
    run, large = faked.build(operator, spec), call()
    small = {n: t if n in {"cache", "block_table", "workspace"} else t[:1] for n, t in large.items()}
    run(**large)

    def fail(parameters: Parameters, *numbers: int) -> None:
        tell(parameters, *numbers)
        raise RuntimeError("no numbers")

    tell = Parameters.tell
    monkeypatch.setattr(Parameters, "tell", fail)
    with pytest.raises(RuntimeError, match="no numbers"):
        run(**small)
    monkeypatch.setattr(Parameters, "tell", tell)
    launched = len(faked.rows)
    run(**large)
    assert faked.rows[launched:] == faked.rows[:launched]


def test_rows_at_another_place_in_a_vector_are_no_layout_of_before(faked: Driver) -> None:
    run, good = faked.build("topk_select", TopKSpec(topk=64)), selected()
    wide = torch.empty(2, 8200)
    for first in (0, 0, 0, 1, 1, 1):
        run(**good | {"scores": wide[:, first : first + 8192]})
    assert faked.checked == 4


def test_windows_are_recognised_where_the_spec_has_them_and_refused_elsewhere(faked: Driver) -> None:
    good, start = selected(), torch.empty(2, dtype=torch.int32)
    run = faked.build("topk_select", TopKSpec(topk=64, has_row_start=True))
    for _ in range(3):
        run(**good, row_start=start)
    assert faked.checked == 2
    assert unpack_from("Q", faked.launched[-1], 16) == (start.data_ptr(),)
    with pytest.raises(ContractError, match="row_start is required by this Spec"):
        run(**good)
    run = faked.build("topk_select", TopKSpec(topk=64))
    for _ in range(3):
        run(**good)
    with pytest.raises(ContractError, match="row_start is refused by this Spec"):
        run(**good, row_start=start)


def test_an_output_that_is_not_given_is_made(faked: Driver) -> None:
    spec, call = CALLS["indexer_logits"]
    run, good = faked.build("indexer_logits", spec), call()
    del good["out"]
    made = [run(**good) for _ in range(3)]
    assert faked.checked == 3
    assert [m.shape for m in made] == [(2, 8192)] * 3


def test_a_torch_without_the_comparison_recognises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._C._dynamo.guards as guards

    x, layout = torch.empty(3), Layout()
    monkeypatch.delattr(guards, "TensorGuards")
    layout.learn(x)
    assert not layout.same(x)


def test_a_layout_is_all_that_a_tensor_is_but_its_address_and_values() -> None:
    x, layout = torch.empty(4, 6), Layout()
    layout.learn(x, x.int())
    assert layout.same(torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int32))
    for other in (
        x[:3],
        x.T,
        x.bfloat16(),
        x.to("meta"),
        torch.empty(4, 12)[:, ::2],
        x.to_sparse(),
        None,
        [x],
    ):
        assert not layout.same(other, x.int())
    layout.forget()
    assert not layout.same(x, x.int())
