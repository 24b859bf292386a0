"""The suite can fail: implementations with one realistic bug each, and the case that finds it.

Each is the reference with one thing wrong, installed as a plugin and run over all quick cases of its operator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.verdict import FAILED, NOT_RUN, PASSED, Report, Verdict

IMPLEMENTATIONS = """
def mutants(operator, *names, **fields):
    return tuple(covering(operator, name, **fields) for name in names)


IMPLEMENTATIONS = (
    *mutants("topk_select", "larger_position", "unclamped_length"),
    *mutants("sparse_mla", "base_two", "wraps", "one_percent"),
    *mutants("merge_attn_states", "clamps", "truncates", "reads_empty"),
    *mutants("moe_experts", "scale_off_by_one", weights="mutants_kernels:weights_off_by_one"),
    *mutants("moe_experts", "weights_inside", weights="kimi_hal.reference.weights:weights"),
    *mutants("moe_route", "biased_weights"),
    *mutants("kda_decode", "transposed", "leaves_padding", "slot_zero"),
    *mutants("kda_gate", "no_bias"),
    *mutants("all_gather", "no_interleave"),
    *mutants("store_latent", "minus_one_is_last"),
    *mutants("indexer_logits", "no_relu"),
    *mutants("topk_merge", "local_ties"),
)
"""

KERNELS = """
import dataclasses, math
import torch
from kimi_hal.ops.operator import get
from kimi_hal.reference.backend import build as reference
from kimi_hal.reference import indexer, weights


def changed(change):
    \"\"\"Make a builder of a function (right run, Spec, bound operands, given buffers) -> results.\"\"\"

    def build(ctx):
        op, right = get(ctx.operator), reference(ctx)
        buffers = [o.keyword for o in op.outs]

        def run(*args, **kwargs):
            operands = op.signature.bind(*args, **kwargs)
            operands.apply_defaults()
            given = operands.arguments
            outs = {name: given.pop(name) for name in buffers}
            given.pop("step", None), given.pop("workspace", None)
            results = change(right, ctx.spec, given)
            if not buffers:
                return None
            results = results if isinstance(results, tuple) else (results,)
            done = tuple(r if o is None else o.copy_(r) for r, o in zip(results, outs.values()))
            return done if len(done) > 1 else done[0]

        run.__signature__ = op.signature
        return run

    return build


@changed
def larger_position(right, spec, t):
    \"\"\"Among equal scores the larger position wins.\"\"\"
    scores, length = t["scores"], t["row_len"].clamp(0, t["scores"].shape[1])
    width = scores.shape[1]
    if t.get("row_start") is not None:
        return right(**t)
    turned = torch.full_like(scores, -torch.inf)
    for row, n in enumerate(length.tolist()):
        turned[row, :n] = scores[row, :n].flip(0)
    index, best = right(turned, t["row_len"])
    mirrored = torch.where(index >= 0, length[:, None] - 1 - index, -1)
    order = torch.where(mirrored >= 0, mirrored, width).argsort(dim=1) if spec.ordered else None
    if order is not None:
        mirrored, best = mirrored.gather(1, order), best.gather(1, order) if best.shape[1] else best
    return mirrored, best


@changed
def unclamped_length(right, spec, t):
    \"\"\"The window's end is taken without its start.\"\"\"
    if t.get("row_start") is not None:
        t = {**t, "row_len": t["row_len"] - t["row_start"]}
    return right(**t)


@changed
def base_two(right, spec, t):
    \"\"\"The kernel's own base of the LSE comes out.\"\"\"
    out, lse = right(**t)
    return out, lse / math.log(2)


@changed
def wraps(right, spec, t):
    \"\"\"−1 is dereferenced, as Python's last row.\"\"\"
    if spec.index_space != "slot":
        return right(**t)
    last = t["cache"].shape[0] * spec.page - 1
    return right(**{**t, "indices": torch.where(t["indices"] == -1, last, t["indices"])})


@changed
def one_percent(right, spec, t):
    \"\"\"The softmax scale is a little off: invisible unless logits have spread.\"\"\"
    return right(**{**t, "q": (t["q"].float() * 1.02).to(t["q"].dtype)})


@changed
def clamps(right, spec, t):
    \"\"\"A very negative LSE is taken for a sentinel.\"\"\"
    lses = t["lses"]
    return right(t["outs"], torch.where(lses.isfinite(), lses.clamp(min=-10_000.0), lses))


@changed
def truncates(right, spec, t):
    \"\"\"bfloat16 by cutting bits off.\"\"\"
    if spec.dtype != "bfloat16":
        return right(**t)
    lse = t["lses"].masked_fill(~t["lses"].isfinite(), -torch.inf)
    share = torch.softmax(lse, dim=0).nan_to_num()
    out = (share[..., None] * t["outs"].float().nan_to_num() * (share[..., None] > 0)).sum(0)
    bits = out.contiguous().view(torch.int32) & -65536
    return bits.view(torch.float32).bfloat16(), right(**t)[1]


@changed
def reads_empty(right, spec, t):
    \"\"\"The output of an empty part is multiplied by 0 instead of being left out.\"\"\"
    out, lse = right(**t)
    empty = t["lses"].isneginf()
    poisoned = (t["outs"].isnan().any(dim=-1) & empty).any(dim=0)
    return out.masked_fill(poisoned[..., None], torch.nan), lse


def weights_off_by_one(ctx, *, donate=False, **checkpoint):
    \"\"\"Scales are exponents with another bias.\"\"\"
    scale = checkpoint["w13_scale"]
    checkpoint = {**checkpoint, "w13_scale": torch.where(scale > 1, scale - 1, scale)}
    return weights.weights(ctx, donate=donate, **checkpoint)


scale_off_by_one = reference


@changed
def weights_inside(right, spec, t):
    \"\"\"The route's weight is applied to the expert's input.\"\"\"
    ones = {**t, "topk_weights": torch.ones_like(t["topk_weights"])}
    total = torch.zeros(t["x"].shape)
    for j in range(spec.topk):
        x = (t["x"].float() * t["topk_weights"][:, j, None]).bfloat16()
        ids = torch.full_like(t["topk_ids"], -1)
        ids[:, j] = t["topk_ids"][:, j]
        total += right(**{**ones, "x": x, "topk_ids": ids}).float()
    return total.to(getattr(torch, spec.out_dtype))


@changed
def biased_weights(right, spec, t):
    \"\"\"The bias, which only chooses, also weighs.\"\"\"
    weight, ids = right(**t)
    score = torch.sigmoid(t["logits"]) + t["bias"]
    picked = score.gather(1, ids.clamp(min=0).long()).where(ids >= 0, 0.0)
    if spec.renormalize:
        picked = picked / picked.sum(1, keepdim=True)
    return (picked * spec.scale).where(weight > 0, weight), ids


@changed
def transposed(right, spec, t):
    \"\"\"The state is read and written key-major.\"\"\"
    turned = t["state"].transpose(-1, -2).contiguous()
    out = right(**{**t, "state": turned})
    t["state"].copy_(turned.transpose(-1, -2))
    return out


@changed
def leaves_padding(right, spec, t):
    \"\"\"A padded row's output is not zeroed.\"\"\"
    out = right(**t)
    live = (t["state_ids"] >= 0) & (t["state_ids"] < t["state"].shape[0])
    return torch.where(live[:, None, None], out, t["v"])


@changed
def slot_zero(right, spec, t):
    \"\"\"Padding advances slot 0.\"\"\"
    out = right(**t)
    padded = t["state_ids"] < 0
    if padded.any():
        t["state"][0] *= 0.5
    return out


@changed
def no_bias(right, spec, t):
    \"\"\"dt_bias is forgotten.\"\"\"
    return right(**{**t, "dt_bias": torch.zeros_like(t["dt_bias"])})


def no_interleave(ctx):
    \"\"\"Ranks' tokens alternate one by one, whatever the interleave.\"\"\"
    dcp = dataclasses.replace(ctx.spec.dcp, interleave=1)
    return reference(dataclasses.replace(ctx, spec=dataclasses.replace(ctx.spec, dcp=dcp)))


@changed
def minus_one_is_last(right, spec, t):
    \"\"\"A padded row writes the last slot.\"\"\"
    last = t["cache"].shape[0] * spec.page - 1
    right(**{**t, "slots": torch.where(t["slots"] < 0, last, t["slots"])})


def no_relu(ctx):
    \"\"\"Negative dot products count.\"\"\"
    right, plain = reference(ctx), indexer.weighted

    def signed(dots, weight):
        return (dots.to(weight.dtype) * weight[:, None]).sum(0)

    def run(*args, **kwargs):
        indexer.weighted = signed
        try:
            return right(*args, **kwargs)
        finally:
            indexer.weighted = plain

    run.__signature__ = get(ctx.operator).signature
    return run


def local_ties(ctx):
    \"\"\"Ties at the cut go to the lower rank instead of the smaller position.\"\"\"
    dcp = dataclasses.replace(ctx.spec.dcp, interleave=1 << 16)
    if ctx.spec.dcp.interleave == 1:
        return reference(ctx)
    return reference(dataclasses.replace(ctx, spec=dataclasses.replace(ctx.spec, dcp=dcp)))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("mutants")
    write(folder, "mutants", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "mutants", lambda: suite.run(suite.Request("mutants")))


def of(report: Report, name: str) -> dict[str, Verdict]:
    return {v.case: v for v in report.verdicts if v.implementation == f"mutants.{name}"}


#: mutant -> a case that kills it, and the beginning of what that case says.
KILLED_BY = {
    "larger_position": ("topk_select/ties/any-order", "out: "),
    "unclamped_length": ("topk_select/windows", "out: "),
    "base_two": ("sparse_mla/heads5", "lse_out: error "),
    "wraps": ("sparse_mla/rows7/keys2", "out: NaN at "),
    "one_percent": ("sparse_mla/spread-logits", "out: error "),
    "clamps": ("merge_attn_states/parts3/heads5/dim130/float32/rows7", "lse_out: error "),
    "truncates": ("merge_attn_states/parts8/heads12/dim512/bfloat16/rows7", "out: error "),
    "reads_empty": ("merge_attn_states/parts3/heads5/dim130/float32/rows7", "out: NaN at "),
    "scale_off_by_one": ("moe_experts/float32-out/rows9", "out: error "),
    "weights_inside": ("moe_experts/small/rows9", "out: error "),
    "biased_weights": ("moe_route/k3/rows17", "weights_out: error "),
    "transposed": ("kda_decode/tp32/rows6", "out: error "),
    "leaves_padding": ("kda_decode/odd/rows6", "out: error "),
    "slot_zero": ("kda_decode/odd/rows6", "state: error "),
    "no_bias": ("kda_gate/odd/rows9", "g_out: error "),
    "no_interleave": ("all_gather/token_order/uint8/world3-interleave4", "rank 0: out: "),
    "minus_one_is_last": ("store_latent/latent.bf16/page64/rows33", "cache: "),
    "no_relu": ("indexer_logits/heads8", "out: error "),
    "local_ties": ("topk_merge/full/world3-interleave4/ties", "rank 0: "),
}


def test_every_mutant_is_killed(report: Report) -> None:
    killed = {v.implementation.partition(".")[2] for v in report.verdicts if v.status == FAILED}
    assert killed - {"composed"} == set(KILLED_BY)


def test_no_mutant_is_lost_or_refuses(report: Report) -> None:
    mine = [v for v in report.verdicts if v.implementation != "mutants.composed"]
    assert {v.status for v in mine} == {PASSED, FAILED, NOT_RUN}


def test_the_run_does_not_conform(report: Report) -> None:
    assert not report.ok


@pytest.mark.parametrize("name", KILLED_BY)
def test_a_mutant_is_killed_by_what_it_gets_wrong(report: Report, name: str) -> None:
    case, beginning = KILLED_BY[name]
    verdict = of(report, name)[case]
    assert verdict.status == FAILED
    assert any(problem.startswith(beginning) for problem in verdict.problems), verdict.problems


@pytest.mark.parametrize("name", KILLED_BY)
def test_a_mutant_is_wrong_by_its_values_alone(report: Report, name: str) -> None:
    """Not by an exception: then the test would prove nothing about the judges."""
    assert [v.output for v in of(report, name).values() if "Traceback" in v.output] == []
    assert any(v.measures for v in of(report, name).values())
