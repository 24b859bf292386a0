"""``dsa_decode`` in four launches: what each is given, what is recognised, and what stands in its workspace."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p, string_at
from dataclasses import replace
from struct import unpack_from
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_checks import CountedChecks

from kimi_hal.errors import ContractError
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia import decode, driver, quantize_query, scores, sizes, sparse_mla, streams, topk
from kimi_hal_nvidia.attention_plan import FORMS, decode_configurations
from kimi_hal_nvidia.decode_claims import DECODE

INDEX, ROWS, CONTEXT = "index.mxfp4.page64", 2, 8192
SPEC = DSASpec(
    query=IndexQuerySpec(index=INDEX),
    indexer=IndexerTopKSpec(index=INDEX, topk=64, return_selected=True),
    attn=SparseMLASpec(
        num_heads=12, latent="latent.fp8.e4m3fn.tensor", page=64, topk=64, index_space="position"
    ),
)
LIMITS = Limits(max_rows=ROWS, max_reqs=ROWS, max_context=CONTEXT)
SIZES = sizes.dsa_decode(SPEC, LIMITS, "sm_90")
Call = dict[str, Any]


class Driver(CountedChecks):
    """A driver that writes down which kernel is launched, whether it may begin early, and its first ten addresses."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, bool, tuple[int, ...]]] = []

    def kernel(self, stem: str, arch: str, name: str, **_: Any) -> driver.Kernel:
        return driver.Kernel(name, c_void_p(1), 1, 1)

    def launcher(self, kernel: driver.Kernel, parameters: int, **how: bool) -> Callable[..., None]:
        def launch(*_: int) -> None:
            first = unpack_from("10Q", string_at(parameters, 80))
            self.launched.append((kernel.name, how.get("overlap", False), first))

        return launch

    def build(self, configuration: Any = None) -> Callable[..., Any]:
        context = self.context("dsa_decode", SPEC, LIMITS, SIZES, DECODE[0].capabilities[0])
        return decode.build_dsa_decode(replace(context, configuration=configuration or {}))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "kernel", made.kernel)
    monkeypatch.setattr(driver, "launcher", made.launcher)
    for module in (quantize_query, scores, topk):
        monkeypatch.setattr(module, "raw_stream", lambda _: lambda: 0)
    monkeypatch.setattr(sparse_mla, "raw_stream", lambda _: lambda: 0)
    for module in (decode, scores, topk):
        monkeypatch.setattr(module, "device_index", lambda _: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(streams.torch.cuda, "device_count", lambda: 1)
    return made


def call() -> Call:
    room = torch.empty(SIZES.workspace + 256, dtype=torch.uint8)
    first = -room.data_ptr() % 256
    return {
        "q": torch.empty(ROWS, 12, 576, dtype=torch.bfloat16),
        "index_q": torch.empty(ROWS, 32, 128, dtype=torch.bfloat16),
        "index_w": torch.empty(ROWS, 32),
        "latent_cache": torch.empty(9, 64 * 576, dtype=torch.uint8),
        "index_cache": torch.empty(9, 64 * 68, dtype=torch.uint8),
        "latent_table": torch.empty(ROWS, CONTEXT // 64, dtype=torch.int32),
        "index_table": torch.empty(ROWS, CONTEXT // 64, dtype=torch.int32),
        "row_req": torch.empty(ROWS, dtype=torch.int32),
        "row_len": torch.empty(ROWS, dtype=torch.int32),
        "k_scale": torch.empty(1),
        "out": torch.empty(ROWS, 12, 512, dtype=torch.bfloat16),
        "lse_out": torch.empty(ROWS, 12),
        "workspace": room[first : first + SIZES.workspace],
    }


def expected(one: Call) -> list[tuple[int, ...]]:
    """Return the addresses that each launch of a call is given."""
    at = {name: tensor.data_ptr() for name, tensor in one.items()}
    held = sizes.Held.of(SPEC, LIMITS)
    q, q_scale, weights, indices, selected, _, scored = [at["workspace"] + start for start in held]
    return [
        (at["index_q"], at["index_w"], q, q_scale, weights),
        (q, q_scale, weights, *(at[n] for n in ("index_cache", "index_table", "row_req", "row_len")), scored),
        (scored, at["row_len"], 0, indices, selected, at["index_table"], at["row_req"]),
        (
            *(at["q"], at["latent_cache"], indices, at["k_scale"], 0, 0, at["latent_table"], at["row_req"]),
            *(at["out"], at["lse_out"]),
        ),
    ]


def test_each_kernel_takes_what_the_one_before_wrote_and_begins_before_it_ends(faked: Driver) -> None:
    run, one = faked.build(), call()
    run(**one)
    assert [(name, early) for name, early, _ in faked.launched] == [
        ("quantize_fp4", False),
        ("fp4_32x1", True),
        ("short_float32", True),
        ("fp8_16", True),
    ]
    for (_, _, got), wanted in zip(faked.launched, expected(one), strict=True):
        assert got[: len(wanted)] == wanted


def test_its_attention_is_cut_as_its_own_configuration_says(faked: Driver) -> None:
    tried = decode_configurations(SPEC, LIMITS, "sm_90")
    assert {"form": 4, "parts": 1} in tried
    for way in tried:
        faked.build(way)(**call())
    names = [faked.launched[4 * i + 3][0] for i in range(len(tried))]
    by_number = {form.number: form.name for form in FORMS}
    assert [name.split("_")[1] for name in names] == [by_number[way["form"]] for way in tried]


def test_the_third_call_of_one_layout_is_not_checked_and_launches_its_own_addresses(faked: Driver) -> None:
    run, calls = faked.build(), [call() for _ in range(4)]
    for one in calls:
        run(**one)
    assert faked.checked == 2
    wanted = [addresses for one in calls for addresses in expected(one)]
    assert [got[: len(w)] for (_, _, got), w in zip(faked.launched, wanted, strict=True)] == wanted


def test_another_layout_is_checked_and_so_is_the_first_when_it_comes_back(faked: Driver) -> None:
    run, large = faked.build(), call()
    whole = {"latent_cache", "index_cache", "latent_table", "index_table", "k_scale", "workspace"}
    small = {name: tensor if name in whole else tensor[:1] for name, tensor in large.items()}
    for one in (large, large, large, small, large, large, large):
        run(**one)
    assert faked.checked == 5
    assert len(faked.launched) == 7 * 4


OPERANDS = tuple(call())
WORSE: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda t: t.to(torch.float64),
    "dimensions": lambda t: t[None],
    "device": lambda t: t.to("meta"),
    "no tensor": lambda _: [1],
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("kind", WORSE)
def test_what_the_check_refuses_is_refused_behind_recognised_calls(
    faked: Driver, name: str, kind: str
) -> None:
    run, good = faked.build(), call()
    for _ in range(3):
        run(**good)
    with pytest.raises(ContractError, match=name):
        run(**good | {name: WORSE[kind](good[name])})
    assert len(faked.launched) == 3 * 4


@pytest.mark.parametrize("name", ["latent_cache", "index_cache", "workspace"])
def test_an_odd_address_is_refused_behind_recognised_calls(faked: Driver, name: str) -> None:
    run, good = faked.build(), call()
    for _ in range(3):
        run(**good)
    room = torch.empty(good[name].numel() + 512, dtype=torch.uint8)
    first = -room.data_ptr() % 256 + 8
    odd = room[first : first + good[name].numel()].view(good[name].shape)
    with pytest.raises(ContractError, match=f"{name} must start at a multiple of"):
        run(**good | {name: odd})


@pytest.mark.parametrize("scale", ["k_scale", "q_scale"])
def test_a_scale_that_is_missing_or_too_much_is_a_sentence_behind_recognised_calls(
    faked: Driver, scale: str
) -> None:
    run, good = faked.build(), call()
    for _ in range(3):
        run(**good)
    other = {"k_scale": None, "q_scale": torch.empty(1)}[scale]
    with pytest.raises(ContractError, match=f"{scale} is (required|refused) by this Spec"):
        run(**good | {scale: other})


def test_outputs_and_workspace_that_are_not_given_are_made(faked: Driver) -> None:
    run, good = faked.build(), call()
    for name in ("out", "lse_out", "workspace"):
        del good[name]
    out, lse = run(**good)
    assert (out.shape, out.dtype, lse.shape) == ((ROWS, 12, 512), torch.bfloat16, (ROWS, 12))
    assert len(faked.launched) == 4


def test_no_rows_launch_nothing(faked: Driver) -> None:
    whole = {"latent_cache", "index_cache", "latent_table", "index_table", "k_scale", "workspace"}
    out, _ = faked.build()(**{n: t if n in whole else t[:0] for n, t in call().items()})
    assert out.shape == (0, 12, 512)
    assert not faked.launched


def test_what_kernels_give_to_each_other_stands_apart_in_the_workspace() -> None:
    held = sizes.Held.of(SPEC, LIMITS)
    assert held == (0, 4096, 4352, 4608, 5120, 5632, 5632)
    assert SIZES.workspace == 5632 + ROWS * CONTEXT * 4
