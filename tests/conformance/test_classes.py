"""Numerics classes and tie rules: who rounds as declared passes, who rounds more, or does not say so, fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal import formats, ops
from kimi_hal.dispatch.contract import NUMERICS
from kimi_hal.formats import minifloat, scales
from kimi_hal.reference.kda import kda_prefill
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import suite
from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.classes import DERIVATIONS, attention, chunked, derived, experts, recurrence, sums
from kimi_hal_conformance.classes.experts import F64
from kimi_hal_conformance.judging import judged
from kimi_hal_conformance.oracle import Answer, Question, answer
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.trial import Declared
from kimi_hal_conformance.verdict import FAILED, PASSED, Measure, Verdict
from kimi_hal_conformance.writers import settled

load()
#: What the matrix units of an H200 made of FP8 numbers.
SUMS = Path(__file__).parents[2] / "benchmarks/results/h200/fp8_sums.json"
OF_ATTENTION = ("sparse_mla/float32-out/no-lse/page16", "sparse_mla/latent.nvfp4.352/tp8")
OF_RECURRENCE = (
    "kda_prefill/odd/ragged",
    "kda_prefill/small/checkpoints",
    "kda_decode/odd/rows6",
    "kda_commit/odd/partial",
    "kda_layer_decode/tp32/rows6",
)
OF_EXPERTS = ("moe_experts/small/rows9", "moe_experts/float32-out/rows9", "moe_layer/one-rank/rows9")


def question(case_id: str) -> Question:
    case = cases.get(case_id)
    return Question(ops.get(case.operator), case.spec, case.limits, case.make(cases.generator(case, 0)))


def stored(asked: Question, found: Answer) -> Answer:
    """Return an answer in the contract's dtypes."""
    dtypes = {o.keyword: getattr(torch, o.dtype_name(asked.spec)) for o in asked.op.outs}
    outputs = {name: value.to(dtypes[name]) for name, value in found.outputs.items()}
    bf16 = ("conv",)
    mutated = {
        n: v.to(torch.bfloat16 if n.startswith(bf16) else torch.float32) for n, v in found.mutated.items()
    }
    return Answer(outputs, mutated)


def told(asked: Question, found: Answer, *numerics: str) -> tuple[list[str], list[Measure]]:
    return judged(asked, [Called(stored(asked, found), (), Declared(numerics=numerics))])


def e5m2(x: torch.Tensor) -> torch.Tensor:
    """Round to two bits of fraction."""
    return x.to(torch.float8_e5m2).to(x.dtype)


def e2m1_blocks(x: torch.Tensor) -> torch.Tensor:
    """Quantise to a bit of fraction."""
    blocks = scales.groups(x.float(), 32)
    scale = scales.amax(blocks)[..., None] / 6 + 1e-30
    codes = minifloat.encode(blocks / scale, minifloat.E2M1)
    return (minifloat.decode(codes, minifloat.E2M1) * scale).flatten(-2).to(F64)


#: class -> what rounds more than it says.
COARSER: dict[str, Callable[[Question], list[Answer]]] = {
    "attn.k=bf16": lambda q: list(attention.of([e5m2], "key")[q.op.name](q)),
    "attn.p=bf16": lambda q: list(attention.of([e5m2])[q.op.name](q)),
    "attn.p=fp8": lambda q: list(attention.of([lambda p: (p * 4).ceil() / 4])[q.op.name](q)),
    "attn.q=fp8_block": lambda q: list(attention.of([e2m1_blocks], "query")[q.op.name](q)),
    "attn.dots=fp8_sum": lambda q: list(
        attention.of([partial(attention.cut_product, bits=7)], "product")[q.op.name](q)
    ),
    "kda.state=bf16": lambda q: list(recurrence.of(coarse_state)[q.op.name](q)),
    "kda.chunk=bf16": lambda q: list(
        recurrence.of(partial(chunked.kda_prefill, dtype=F64, narrow=e5m2))[q.op.name](q)
    ),
    "logits=fp8_sum": lambda q: list(sums.scored(q, bits=4)),
    "moe.act=mxfp8": lambda q: list(experts.of(e2m1_blocks)[q.op.name](q)),
    "moe.act=fp8_block": lambda q: list(experts.of(e2m1_blocks)[q.op.name](q)),
    "moe.act=fp8_tensor": lambda q: list(experts.of(e2m1_blocks)[q.op.name](q)),
}


def coarse_state(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias, state, *rest, **named):  # type: ignore[no-untyped-def]
    """Run the recurrence and keep two bits of fraction of the state."""
    named.setdefault("dtype", F64)
    o = kda_prefill(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias, state, *rest, **named)
    state.copy_(e5m2(state))
    return e5m2(o)


CASES = [
    *(
        (case, name)
        for name in NUMERICS
        if name.startswith("attn.") and name != "attn.k=bf16"
        for case in OF_ATTENTION
    ),
    ("sparse_mla/edges/scales-of-another-writer", "attn.k=bf16"),
    ("indexer_logits/heads8", "logits=fp8_sum"),
    *((case, name) for name in ("kda.state=bf16", "kda.chunk=bf16") for case in OF_RECURRENCE),
    *((case, name) for name in NUMERICS if name.startswith("moe.") for case in OF_EXPERTS),
]


def test_every_class_has_its_derivation() -> None:
    assert DERIVATIONS.keys() == NUMERICS.keys()
    assert all(DERIVATIONS.values())


@pytest.mark.parametrize(("case_id", "name"), CASES)
def test_who_rounds_as_declared_passes_with_room_and_the_class_is_named(case_id: str, name: str) -> None:
    asked = question(case_id)
    for way in derived(asked, [name])[name]:
        problems, measures = told(asked, way, name)
        assert problems == []
        assert max(m.norm or 0.0 for m in measures) < 0.8
        assert any(m.classes.get(name) for m in measures)


@pytest.mark.parametrize(("case_id", "name"), CASES)
def test_who_rounds_more_than_declared_fails(case_id: str, name: str) -> None:
    asked = question(case_id)
    problems, _ = told(asked, COARSER[name](asked)[0], name)
    assert problems
    assert f"{name} " in problems[0]


@pytest.mark.parametrize(
    ("case_id", "name"),
    [
        ("sparse_mla/float32-out/no-lse/page16", "attn.p=bf16"),
        ("sparse_mla/float32-out/no-lse/page16", "attn.p=fp8"),
        ("sparse_mla/float32-out/no-lse/page16", "attn.q=fp8_block"),
        ("sparse_mla/float32-out/no-lse/page16", "attn.dots=fp8_sum"),
        ("kda_decode/odd/rows6", "kda.state=bf16"),
        ("kda_prefill/odd/ragged", "kda.chunk=bf16"),
        ("moe_experts/small/rows9", "moe.act=mxfp8"),
        ("moe_experts/small/rows9", "moe.act=fp8_block"),
        ("moe_experts/small/rows9", "moe.act=fp8_tensor"),
        ("indexer_logits/heads8", "logits=bf16"),
        ("indexer_logits/heads8", "logits=fp8_sum"),
    ],
)
def test_who_rounds_and_does_not_say_so_fails(case_id: str, name: str) -> None:
    asked = question(case_id)
    way = derived(asked, [name])[name][-1]
    assert told(asked, way)[0]
    assert told(asked, way, name)[0] == []


def test_sums_of_few_bits_are_those_of_an_h200_bit_for_bit() -> None:
    kept = json.loads(SUMS.read_text())

    def numbers(rows: list[str]) -> torch.Tensor:
        data = torch.frombuffer(bytearray.fromhex("".join(rows)), dtype=torch.uint8)
        return data.view(len(rows), 128).view(torch.float8_e4m3fn).to(F64)

    found = sums.cut_dots(numbers(kept["queries"]), numbers(kept["keys"]))
    assert torch.equal(found.relu().float(), torch.tensor(kept["scores"]))
    assert kept["equal"] == kept["sums"]


@pytest.mark.parametrize("scale", ["f32", "pow2", "ue8m0x4"])
def test_a_key_s_scale_multiplies_after_the_sum(scale: str) -> None:
    fmt = formats.index(f"index.fp8.e4m3fn.{scale}.page64")
    cache = torch.zeros(2, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.arange(128), torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))
    elements, scales = (fmt.read_pages(part, F64) for part in sums.apart(fmt, cache))
    assert torch.equal(elements * scales, fmt.read_pages(cache, F64))
    assert torch.equal(scales, scales[..., :1].expand_as(scales))
    assert elements.abs().max() == 448


def test_a_class_that_rounds_nothing_in_an_operator_costs_nothing() -> None:
    asked = question("kda_gate/odd/rows9")
    _, measures = told(asked, answer(asked, torch.float64), "attn.p=bf16")
    assert [m.classes for m in measures] == [{}, {}]


def test_the_chunked_recurrence_is_the_recurrence() -> None:
    for case_id in ("kda_prefill/odd/ragged", "kda_prefill/small/checkpoints", "kda_prefill/log-gate/ragged"):
        asked = question(case_id)
        exact = answer(asked, torch.float64)
        found = recurrence.of(partial(chunked.kda_prefill, dtype=F64))["kda_prefill"](asked)[0]
        for mine, right in ((found.outputs, exact.outputs), (found.mutated, exact.mutated)):
            assert all(torch.allclose(mine[n], right[n], rtol=1e-9, atol=1e-12) for n in mine)


# --- ties -----------------------------------------------------------------------------------------------


def test_ties_of_small_elements_are_broken_as_declared() -> None:
    x = torch.tensor([1.0625, -1.0625, 1.1875, 0.75, 2.0**-10, -(2.0**-10), 448.0, 500.0, 1.06])
    even = minifloat.encode(x, minifloat.E4M3FN)

    def values(tie: str) -> list[float]:
        return minifloat.decode(settled(x, even, minifloat.E4M3FN, tie), minifloat.E4M3FN).tolist()

    assert values("away") == [1.125, -1.125, 1.25, 0.75, 2.0**-9, -(2.0**-9), 448.0, 448.0, 1.0]
    assert values("down") == [1.0, -1.0, 1.125, 0.75, 0.0, 0.0, 448.0, 448.0, 1.0]


IMPLEMENTATIONS = """
from kimi_hal.dispatch.contract import Properties


def store(name, tie, build):
    covered = coverage(get("store_latent").spec_type)
    properties = Properties(deterministic=True, writer_tie=tie)
    capabilities = tuple(Capability(("*",), c, properties=properties) for c in covered)
    return Implementation("store_latent", name, f"rounds_kernels:{build}", capabilities)


def select(name, rule, build):
    covered = coverage(get("topk_select").spec_type)
    capabilities = tuple(Capability(("*",), c, properties=Properties(tie_rule=rule)) for c in covered)
    return Implementation("topk_select", name, f"rounds_kernels:{build}", capabilities)


def attend(name, build, *numerics):
    capabilities = tuple(Capability(("*",), c) for c in coverage(get("sparse_mla").spec_type))
    return Implementation("sparse_mla", name, f"rounds_kernels:{build}", capabilities, numerics=numerics)


IMPLEMENTATIONS = (
    store("away", "away", "away"),
    store("down", "down", "down"),
    store("says_even", "even", "away"),
    store("says_away", "away", "down"),
    store("doubles", "away", "doubles"),
    select("free", "any", "free"),
    select("says_contract", "contract", "free"),
    select("misses", "any", "misses"),
    attend("p16", "p16", "attn.p=bf16"),
    attend("says_nothing", "p16"),
    attend("says_p16", "p8", "attn.p=bf16"),
)
"""

KERNELS = """
import torch
from kimi_hal.dispatch import signatures
from kimi_hal.ops import get
from kimi_hal.reference import backend
from kimi_hal_conformance.classes import attention
from kimi_hal_conformance.writers import tied


def writer(elements, halves, factor=1):
    def build(ctx):
        store = tied(elements, halves)("reference.sparse_mla").store_latent

        def run(kv_c, k_pe, slots, cache, k_scale=None):
            ctx.check(kv_c=kv_c, k_pe=k_pe, slots=slots, cache=cache, k_scale=k_scale)
            store(ctx.spec, kv_c * factor, k_pe, slots, cache, k_scale)

        return run

    return build


away = writer("away", "even")
down = writer("down", "down")
doubles = writer("away", "away", 2)


def selecting(change):
    def build(ctx):
        right = backend.build(ctx)

        def run(scores, row_len, row_start=None, *, out=None, scores_out=None, workspace=None):
            found, chosen = right(scores, row_len, row_start, out=out, scores_out=scores_out)
            for row in range(found.shape[0]):
                change(ctx.spec, scores[row], int(row_len[row]), found[row], chosen[row] if chosen.numel() else None)
            return found, chosen

        return run

    return build


def later(spec, scores, length, found, chosen):
    '''Take the last of equal scores at the cut, where the contract takes the first.'''
    count = int((found >= 0).sum())
    if not count or spec.has_row_start or spec.score != "float32":
        return
    kept = scores[: min(length, scores.numel())]
    cut = kept[found[:count].long()].min()
    if bool(kept.isnan().any()) or not bool(cut.isfinite()):
        return
    sure = (kept > cut).nonzero().flatten()
    tied = (kept == cut).nonzero().flatten()
    picked = torch.cat([sure, tied[len(tied) - (count - len(sure)):]]).sort().values
    found[:count] = picked.int()
    if chosen is not None:
        chosen[:count] = kept[picked]


def worst(spec, scores, length, found, chosen):
    later(spec, scores, length, found, chosen)
    count = int((found >= 0).sum())
    if count > 1 and not spec.has_row_start:
        found[1] = found[0]


free, misses = selecting(later), selecting(worst)


def attending(narrow):
    def build(ctx):
        op = get("sparse_mla")

        def call(given):
            ctx.check(**given)
            out, lse, step, workspace = (given.pop(n) for n in ("out", "lse_out", "step", "workspace"))
            found = attention.attended(ctx.spec, **given, narrow=narrow)
            dtype = getattr(torch, ctx.spec.out_dtype)
            return tuple(
                backend.place(value, buffer, kind, [])
                for value, buffer, kind in zip(found, (out, lse), (dtype, torch.float32))
            )

        return signatures.function(op, "attending", call)

    return build


p16 = attending(attention.BF16[0])
p8 = attending(lambda p: p.to(torch.float8_e5m2).to(p.dtype))
"""

STORES = [
    f"store_latent/edges/latent.{n}" for n in ("fp8.e4m3fn.tensor", "nvfp4.352", "bf16", "flashmla.656")
]
RUN = (
    *STORES,
    "topk_select/ties/any-order",
    "topk_select/ties/ordered",
    "topk_select/special/any-order",
    "sparse_mla/float32-out/no-lse/page16",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("rounds")
    write(folder, "rounds", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "rounds", lambda: suite.run(Request("rounds", only=RUN, repeats=0)))


def of(report: Report, name: str) -> dict[str, Verdict]:
    return {v.case: v for v in report.verdicts if v.implementation == f"rounds.{name}"}


@pytest.mark.parametrize("name", ["away", "down"])
def test_a_writer_may_break_ties_as_it_declares(report: Report, name: str) -> None:
    assert {v.status for v in of(report, name).values()} == {PASSED}


@pytest.mark.parametrize("name", ["says_even", "says_away", "doubles"])
def test_a_writer_that_does_otherwise_fails(report: Report, name: str) -> None:
    failed = [v for v in of(report, name).values() if v.status == FAILED]
    assert {v.case for v in failed} >= {STORES[1]}
    assert all(v.problems[0].startswith("cache: ") for v in failed)


def test_a_selection_whose_ties_are_free_is_judged_by_its_scores_and_does_not_conform(report: Report) -> None:
    assert {v.status for v in of(report, "free").values()} == {PASSED}
    tested = {i.name: i for i in report.implementations}
    assert not tested["rounds.free"].conforming
    assert tested["rounds.says_contract"].conforming


def test_free_ties_are_wrong_where_the_contract_is_claimed(report: Report) -> None:
    assert of(report, "says_contract")["topk_select/ties/any-order"].status == FAILED


def test_free_ties_excuse_no_key_twice(report: Report) -> None:
    failed = of(report, "misses")["topk_select/ties/any-order"]
    assert failed.status == FAILED
    assert any(p.startswith("out, keys twice: ") for p in failed.problems)


def test_declared_probabilities_have_their_budget_and_undeclared_ones_none(report: Report) -> None:
    right = of(report, "p16")["sparse_mla/float32-out/no-lse/page16"]
    assert right.status == PASSED
    assert right.measures[0].classes["attn.p=bf16"] > 0
    assert of(report, "says_nothing")["sparse_mla/float32-out/no-lse/page16"].status == FAILED
    coarse = of(report, "says_p16")["sparse_mla/float32-out/no-lse/page16"]
    assert coarse.status == FAILED
    assert "times its budget (rounding " in coarse.problems[0]
    assert ", attn.p=bf16 " in coarse.problems[0]
