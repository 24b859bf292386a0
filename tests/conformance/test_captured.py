"""Capture and replay: on a device with graphs what is declared is tried, and what only an eager call does is found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import recorded_device
import torch
from conformance_runs import once
from plugin_package import installed, write
from recorded_device import RecordedDevice

from kimi_hal_conformance import levels, suite
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

MERGE, SELECT = "merge_attn_states/parts3/heads5/dim130/float32/rows7", "topk_select/spread/k2048"
STORE = "store_latent/latent.bf16/page64/rows33"
IMPLEMENTATIONS = """
from kimi_hal.dispatch.contract import Properties


def promising(operator, name, capture="full"):
    properties = Properties(deterministic=True, capture=capture)
    capabilities = tuple(
        Capability(("*",), covered, properties=properties) for covered in coverage(get(operator).spec_type)
    )
    return Implementation(operator, name, build="captive_kernels:" + name, capabilities=capabilities)


IMPLEMENTATIONS = (
    promising("merge_attn_states", "merge"),
    promising("merge_attn_states", "stages"),
    promising("merge_attn_states", "keeps"),
    promising("merge_attn_states", "counts"),
    promising("merge_attn_states", "modest", capture="none"),
    promising("merge_attn_states", "pieces", capture="piecewise"),
    promising("topk_select", "select"),
    promising("topk_select", "reads"),
    promising("topk_select", "bakes"),
    promising("store_latent", "store"),
    promising("store_latent", "first_slots"),
)
"""
#: Torch alone, without a value read on the host, but for what a name says.
KERNELS = """
import ctypes

import torch


def host_copy(target, source):
    source = source.contiguous()
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def merged(outs, lses, out, lse_out):
    empty = ~lses.isfinite()
    top = lses.masked_fill(empty, -torch.inf).amax(0)
    weight = torch.where(empty, 0.0, (lses - top.masked_fill(top.isinf(), 0.0)).exp())
    total = weight.sum(0)
    share = weight / total.clamp(min=1e-38)
    value = (torch.where(empty[..., None], 0.0, outs.float()) * share[..., None]).sum(0)
    out = torch.empty_like(outs[0]) if out is None else out
    out.copy_(value)
    lse_out = torch.empty_like(lses[0]) if lse_out is None else lse_out
    if lse_out.numel():
        lse_out.copy_(top + total.log())
    return out, lse_out


def merging(ctx, wrap):
    def run(outs, lses, *, out=None, lse_out=None):
        ctx.check(outs=outs, lses=lses, out=out, lse_out=lse_out)
        if lse_out is None and not ctx.spec.return_lse:
            lse_out = outs.new_empty((outs.shape[1], 0), dtype=torch.float32)
        return wrap(outs, lses, out, lse_out)

    return run


def merge(ctx):
    return merging(ctx, merged)


modest = pieces = merge


def stages(ctx):
    # The parts are first copied by the host into a buffer that the device reads.
    def staged(outs, lses, out, lse_out):
        copy = torch.empty(outs.shape, dtype=outs.dtype)
        host_copy(copy, outs)
        return merged(copy, lses, out, lse_out)

    return merging(ctx, staged)


def keeps(ctx):
    # The LSEs of the first call with such a shape are kept for the graph; eagerly they are always renewed.
    kept = {}

    def keeping(outs, lses, out, lse_out):
        mine = kept.setdefault(lses.shape, torch.empty(lses.shape))
        host_copy(mine, lses)
        return merged(outs, mine, out, lse_out)

    return merging(ctx, keeping)


def counts(ctx):
    # Every second call swaps its buffers: what is captured is one of the two.
    calls, spare = [], {}

    def counting(outs, lses, out, lse_out):
        calls.append(0)
        turn = spare.setdefault((outs.shape, len(calls) % 2), torch.empty(outs.shape, dtype=outs.dtype))
        host_copy(turn, outs)
        return merged(turn, lses, out, lse_out)

    return merging(ctx, counting)


def selected(ctx, scores, row_len, out, width):
    columns = torch.arange(scores.shape[1])
    live = (columns < row_len[:, None]) & (columns < width)
    k = min(ctx.spec.topk, scores.shape[1])
    keyed = torch.where(live, scores.nan_to_num(-3e38, 3e38, -3e38), -torch.inf)
    values, places = keyed.sort(dim=1, descending=True, stable=True)
    winners = torch.where(values[:, :k] > -torch.inf, places[:, :k], -1).int()
    out = torch.empty(scores.shape[0], ctx.spec.topk, dtype=torch.int32) if out is None else out
    out.fill_(-1)
    out[:, :k] = winners
    return out, torch.empty(scores.shape[0], 0)


def selecting(ctx, length):
    def run(scores, row_len, row_start=None, *, out=None, scores_out=None, workspace=None):
        ctx.check(scores=scores, row_len=row_len, row_start=row_start, out=out, scores_out=scores_out)
        found, none = selected(ctx, scores, row_len, out, length(scores, row_len))
        return found, none if scores_out is None else scores_out

    return run


def select(ctx):
    return selecting(ctx, lambda scores, row_len: scores.shape[1])


def reads(ctx):
    return selecting(ctx, lambda scores, row_len: int(row_len.max()) if row_len.numel() else 0)


def bakes(ctx):
    # The engine's copy of the lengths in host memory, read without a synchronisation.
    def longest(scores, row_len):
        step = row_len.stride(0)
        lengths = (ctypes.c_int32 * (row_len.numel() * step)).from_address(row_len.data_ptr())
        return max(lengths[::step], default=0)

    return selecting(ctx, longest)


def storing(ctx, chosen):
    def run(kv_c, k_pe, slots, cache, k_scale=None):
        ctx.check(kv_c=kv_c, k_pe=k_pe, slots=slots, cache=cache, k_scale=k_scale)
        where = chosen(slots)
        tokens = slots.shape[0]
        rows = torch.cat([kv_c[:tokens], k_pe[:tokens]], dim=1).contiguous().view(torch.uint8)
        pages, page = cache.shape[0], ctx.spec.page
        live = (where >= 0) & (where < pages * page)
        safe = where.clamp(0, pages * page - 1)
        view = cache.as_strided((pages, page, 1152), (cache.stride(0), 1152, 1), cache.storage_offset())
        # Padding writes what is already there, each to a place that no live row has.
        for token in range(tokens):
            old = view.index_select(0, safe[token : token + 1] // page)
            at = (safe[token] % page)[None]
            new = torch.where(live[token], rows[token], old[0].index_select(0, at)[0])
            view.index_put_((safe[token : token + 1] // page, at), new[None])

    return run


def store(ctx):
    return storing(ctx, lambda slots: slots)


def first_slots(ctx):
    # The slots of the first call of such a length are registered, and copied by the host at each eager call.
    kept = {}

    def registered(slots):
        mine = kept.setdefault(slots.shape, torch.empty_like(slots))
        host_copy(mine, slots)
        return mine

    return storing(ctx, registered)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("captive")
    shutil.copy(recorded_device.__file__, folder)  # for the processes of the implementations
    write(folder, "captive", IMPLEMENTATIONS, KERNELS, device="recorded_device:RecordedDevice")
    asked = Request("captive", only=(MERGE, SELECT, STORE))
    with installed(folder):
        yield once(tmp_path_factory, "captive", lambda: suite.run(asked))


@pytest.fixture
def verdicts(report: Report) -> dict[str, Verdict]:
    return {v.implementation.partition(".")[2]: v for v in report.verdicts}


@pytest.fixture
def steps(report: Report) -> dict[str, tuple[str, str]]:
    return {s.name.partition(".")[2]: (s.steps[3].state, s.steps[3].why) for s in report.implementations}


@pytest.mark.parametrize("name", ["merge", "select", "store"])
def test_what_is_declared_and_right_is_captured(verdicts: dict[str, Verdict], name: str) -> None:
    found = verdicts[name]
    assert (found.status, found.problems, found.promises[-1]) == (PASSED, (), "capture")


@pytest.mark.parametrize("name", ["stages", "keeps", "counts", "bakes", "first_slots"])
def test_what_the_host_did_between_is_not_in_the_graph(verdicts: dict[str, Verdict], name: str) -> None:
    found = verdicts[name]
    assert (found.status, found.level, found.promises[-1]) == (FAILED, levels.CAPTURABLE, "capture"), found
    assert found.problems[0].startswith("replay 1 of 5: "), found.problems
    assert found.problems[0].endswith(" has other bits than in new memory")


def test_a_value_read_on_the_host_cannot_be_captured(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["reads"]
    assert (found.status, found.level) == (FAILED, levels.CAPTURABLE)
    said = "capture raised RuntimeError: operation not permitted when stream is capturing"
    assert found.problems == (said,)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("modest", "capture is not declared"),
        ("pieces", "capture is declared piecewise: the call runs between the graphs, not in one"),
    ],
)
def test_who_declares_no_whole_graph_is_not_tested(
    verdicts: dict[str, Verdict], steps: dict[str, tuple[str, str]], name: str, why: str
) -> None:
    assert (verdicts[name].status, verdicts[name].untried["capture"]) == (PASSED, why)
    assert steps[name] == ("not_tested", f"not tested: {why}")


def test_level_4_is_reached_or_failed_by_capture_alone(steps: dict[str, tuple[str, str]]) -> None:
    assert steps["merge"] == ("reached", "")
    assert steps["bakes"] == ("failed", f"1 of 1 failed, the first: {SELECT}")


def test_a_device_without_graphs_leaves_level_4_untested(tmp_path: Path) -> None:
    write(tmp_path, "hosted", IMPLEMENTATIONS.replace("captive", "hosted"), KERNELS)
    with installed(tmp_path):
        found = suite.run(Request("hosted", only=(MERGE,), implementation="hosted.merge"))
    (verdict,), (tested,) = found.verdicts, found.implementations
    assert verdict.status == PASSED
    assert verdict.untried["capture"] == "the device has no graphs"
    assert tested.steps[3].why == "not tested: the device has no graphs"


def test_hooks_that_capture_nothing_do_not_reach_level_4(tmp_path: Path) -> None:
    hooks = """
from kimi_hal.dispatch.device import HostDevice


class Device(HostDevice):
    def capture(self, fn):
        fn()
        return fn
"""
    write(
        tmp_path,
        "eager",
        IMPLEMENTATIONS.replace("captive", "eager"),
        KERNELS + hooks,
        device="eager_kernels:Device",
    )
    with installed(tmp_path):
        (found,) = suite.run(Request("eager", only=(MERGE,), implementation="eager.merge")).verdicts
    assert (found.status, found.level) == (FAILED, levels.CAPTURABLE)
    said = "replay 1 of 5: it made the call anew: the device hooks captured nothing"
    assert found.problems[0] == said


# --- the device with graphs itself ------------------------------------------------------------------------


def test_a_replay_runs_the_recorded_operations_on_new_data() -> None:
    x, y = torch.ones(3), torch.empty(3)
    replay = RecordedDevice().capture(lambda: y.copy_(x * 2 + 1).add_(0))
    x.fill_(5)
    replay()
    assert y.tolist() == [11.0, 11.0, 11.0]


def test_a_replay_does_not_run_python_again() -> None:
    calls: list[int] = []
    replay = RecordedDevice().capture(lambda: calls.append(0))
    replay()
    assert len(calls) == 2  # warm-up and capture


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool])
def test_a_value_cannot_be_read_while_recording(read: type) -> None:
    x, calls = torch.ones(1), []

    def call() -> None:
        calls.append(0)
        if len(calls) > 1:
            read(x)

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        RecordedDevice().capture(call)
