import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.errors import ContractError
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.moe import moe_experts as moe_experts_op
from kimi_hal.reference import backend, moe

NAN, INF = math.nan, math.inf
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SMALL = {"num_experts": 8, "num_local": 8, "topk": 3, "hidden": 64, "intermediate": 32}


def route(logits, bias=None, num_tokens=None, dtype=torch.float32, **fields):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    spec = RouteSpec(num_experts=logits.shape[-1], **fields)
    bias = torch.zeros(spec.num_experts) if bias is None else torch.as_tensor(bias, dtype=torch.float32)
    tokens = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
    return moe.moe_route(spec, logits, bias, tokens, dtype=dtype)


def logit(p):
    return torch.logit(torch.as_tensor(p, dtype=torch.float64)).float()


def random_experts(spec, seed=0):
    """Random codes with scales near 1/8, so that results stay small: the checkpoint's four tensors."""
    size, g = spec.dims(), torch.Generator().manual_seed(seed)
    shapes = [("2In", "Hid/2"), ("2In", "Hid/g"), ("Hid", "In/2"), ("Hid", "In/g")]
    bounds = [(0, 256), (122, 126)] * 2
    return [
        torch.randint(*bound, (spec.num_local, *(size[s] for s in shape)), dtype=torch.uint8, generator=g)
        for shape, bound in zip(shapes, bounds, strict=True)
    ]


def decode(packed, scale):
    """Decode by the format's definition: low nibble first, value = e2m1 · 2^(byte − 127)."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return GRID[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)


def situ(spec, gate, up):
    wide = up if not spec.linear_beta else spec.linear_beta * torch.tanh(up / spec.linear_beta)
    return spec.beta * torch.tanh(gate / spec.beta) / (1 + torch.exp(-gate)) * wide


def dense(spec, x, topk_weights, ids, weights):
    """Every route on its own, in float64."""
    w13, w2 = decode(*weights[:2]), decode(*weights[2:])
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, column in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[row, column]) - spec.expert_offset
        if ids[row, column] >= 0 and 0 <= expert < spec.num_local:
            gate, up = (w13[expert] @ x[row].double()).chunk(2)
            y[row] += topk_weights[row, column].double() * (w2[expert] @ situ(spec, gate, up))
    return y


def operands(spec, rows, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, spec.hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(spec.num_experts, generator=g)[: spec.topk] for _ in range(rows)]).int()
    return x, torch.rand(rows, spec.topk, generator=g), ids


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b.to(a.dtype), rtol=tolerance, atol=tolerance * float(b.abs().max() + 1e-30))


# ---- router


def test_weights_are_normalised_sigmoids():
    weights, ids = route([[0.0, math.log(3), -5.0]], topk=2, dtype=torch.float64)
    assert ids.tolist() == [[1, 0]]
    assert close(weights, torch.tensor([[0.6, 0.4]]), 1e-7)


def test_ids_are_int32_and_weights_have_the_asked_dtype():
    weights, ids = route(torch.zeros(2, 4), topk=2, dtype=torch.float64)
    assert (weights.dtype, ids.dtype) == (torch.float64, torch.int32)


def test_without_renormalisation_the_weight_is_the_scaled_score():
    weights, _ = route([[0.0, -100.0]], topk=1, renormalize=False, scale=2.5)
    assert weights.tolist() == [[1.25]]


def test_scale_and_denominator_eps():
    weights, _ = route([[0.0, 0.0, -INF]], topk=2, scale=3.0, denom_eps=0.5)
    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("eps", [0.0, 1e-20])
def test_a_sum_of_zero_gives_zeros(eps):
    weights, ids = route([[-INF] * 4], topk=2, denom_eps=eps)
    assert (weights.tolist(), ids.tolist()) == ([[0.0, 0.0]], [[0, 1]])


def test_the_bias_selects_and_does_not_weigh():
    weights, ids = route(logit([[0.5, 0.4, 0.1]]), bias=[0, 0, 10], topk=2, dtype=torch.float64)
    assert ids.tolist() == [[2, 0]]
    assert close(weights, torch.tensor([[1 / 6, 5 / 6]]), 1e-6)


def test_equal_scores_go_to_the_smaller_id():
    _, ids = route(torch.zeros(1, 1024), topk=16)
    assert ids.tolist() == [list(range(16))]


def test_negative_zero_bias_is_zero():
    _, ids = route(torch.zeros(1, 4) - INF, bias=[-0.0, 0.0, -0.0, 0.0], topk=4)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_saturated_scores_tie():
    # 1 − sigmoid(18) = 1.5e−8 is under half of float32's step below 1, sigmoid(17)'s 4.1e−8 is not.
    _, ids = route(torch.arange(512.0)[None], topk=10)
    assert ids.tolist() == [list(range(18, 28))]


def test_selection_does_not_depend_on_the_precision():
    logits = torch.randn(64, 896, generator=torch.Generator().manual_seed(0)) * 12
    bias = torch.linspace(-1e-6, 1e-6, 896)
    assert torch.equal(route(logits, bias, topk=16)[1], route(logits, bias, topk=16, dtype=torch.float64)[1])


def test_equal_logits_tie_wherever_they_stand():
    # A vectorised float32 sigmoid may round the lanes of a ragged tail differently.
    value = torch.randn(200, 1, generator=torch.Generator().manual_seed(3))
    _, ids = route(value.expand(200, 37), topk=37)
    assert torch.equal(ids, torch.arange(37, dtype=torch.int32).expand(200, 37))


def test_a_nan_expert_is_chosen_last_with_weight_zero():
    weights, ids = route([[NAN, 0.0, -INF]], topk=3, dtype=torch.float64)
    assert (weights.tolist(), ids.tolist()) == ([[1.0, 0.0, 0.0]], [[1, 2, 0]])


def test_a_nan_bias_makes_a_nan_expert():
    weights, ids = route([[5.0, 0.0, 0.0]], bias=[NAN, 0, 0], topk=3)
    assert (weights.tolist(), ids.tolist()) == ([[0.5, 0.5, 0.0]], [[1, 2, 0]])


def test_a_row_of_nan_gives_the_first_ids_and_zeros():
    weights, ids = route(torch.full((1, 896), NAN), topk=16)
    assert (weights.tolist(), ids.tolist()) == ([[0.0] * 16], [list(range(16))])


def test_infinite_bias_is_an_ordinary_number():
    weights, ids = route([[0.0, 0.0, 0.0]], bias=[-INF, 0, INF], topk=3, renormalize=False)
    assert (weights.tolist(), ids.tolist()) == ([[0.5, 0.5, 0.5]], [[2, 1, 0]])


def test_ordered_ids_ascend_with_their_weights():
    weights, ids = route(logit([[0.2, 0.9, 0.1, 0.6]]), topk=3, ordered=True, renormalize=False)
    assert ids.tolist() == [[0, 1, 3]]
    assert close(weights, torch.tensor([[0.2, 0.9, 0.6]]), 1e-6)


@pytest.mark.parametrize(("tokens", "live"), [(None, 3), (0, 0), (2, 2), (3, 3), (99, 3), (-5, 0)])
def test_rows_from_num_tokens_on_are_padding(tokens, live):
    weights, ids = route(torch.zeros(3, 4), topk=2, num_tokens=tokens)
    assert ids.tolist() == [[0, 1]] * live + [[-1, -1]] * (3 - live)
    assert weights.tolist() == [[0.5, 0.5]] * live + [[0.0, 0.0]] * (3 - live)


def test_no_rows():
    weights, ids = route(torch.zeros(0, 896), topk=16)
    assert (list(weights.shape), list(ids.shape)) == ([0, 16], [0, 16])


def test_row_strides_are_honoured():
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(route(logits[::2], topk=4)[1], route(logits[::2].contiguous(), topk=4)[1])


def test_rows_are_routed_in_pieces(monkeypatch):
    logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    whole = route(logits, topk=4)
    monkeypatch.setattr(moe, "SCORES_AT_ONCE", 64)
    pieces = route(logits, topk=4)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_only_experts_of_the_best_groups_can_be_chosen():
    # Sums of two: 0.9 + 0.1, 0.6 + 0.6. The largest single score stands in the group that loses.
    logits = logit([[0.9, 0.1, 0.6, 0.6]])
    assert route(logits, topk=2, groups=2)[1].tolist() == [[2, 3]]
    assert route(logits, topk=3, groups=2, topk_groups=2)[1].tolist() == [[0, 2, 3]]


def test_equal_groups_go_to_the_smaller():
    assert route(torch.zeros(1, 8), topk=2, groups=4)[1].tolist() == [[0, 1]]


def test_an_expert_outside_the_groups_ranks_below_a_nan_inside():
    logits = [[3.0, 2.0, 9.0, NAN, NAN, NAN]]
    assert route(logits, topk=3, groups=2)[1].tolist() == [[2, 0, 1]]
    assert route([[0.0, 0.0, 0.0, 9.0, 9.0, NAN]], topk=3, groups=2)[1].tolist() == [[3, 4, 5]]


def test_groups_of_one_expert_are_the_plain_choice():
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    plain = route(logits, topk=4)[1]
    assert torch.equal(route(logits, topk=4, groups=16, topk_groups=4)[1], plain)


def float32(value):
    return ctypes.c_float(value).value


def by_hand(logits, bias, topk, groups, topk_groups):
    score = [NAN if math.isnan(x) else float32(0.0 if x < -700 else 1 / (1 + math.exp(-x))) for x in logits]
    total = [float32(s + b) for s, b in zip(score, bias, strict=True)]
    choice = [-INF if math.isnan(c) else c for c in total]
    size = len(logits) // groups
    runs = [sorted(choice[i * size : (i + 1) * size], reverse=True)[:2] for i in range(groups)]
    sums = [-INF if math.isnan(sum(run)) else float32(sum(run)) for run in runs]
    best = sorted(range(groups), key=lambda i: (-sums[i], i))[:topk_groups]
    ids = sorted((e for e in range(len(logits)) if e // size in best), key=lambda e: (-choice[e], e))[:topk]
    live = [0.0 if math.isnan(total[e]) else score[e] for e in ids]
    return ids, [w / sum(live) if sum(live) else 0.0 for w in live]


LOGITS = st.sampled_from([0.0, 0.25, -3.0, 2.0, 17.0, 18.0, 40.0, -200.0, NAN, INF, -INF])
BIASES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 2.0**-25, NAN, INF, -INF])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_selection_equals_the_rule_by_hand(data):
    groups = data.draw(st.sampled_from([1, 2, 3, 6]))
    topk_groups = data.draw(st.integers(1, groups))
    topk = data.draw(st.integers(1, topk_groups * (12 // groups)))
    logits = data.draw(st.lists(LOGITS, min_size=12, max_size=12))
    bias = data.draw(st.lists(BIASES, min_size=12, max_size=12))
    weights, ids = route(
        [logits], bias, topk=topk, groups=groups, topk_groups=topk_groups, dtype=torch.float64
    )
    expected_ids, expected_weights = by_hand(logits, bias, topk, groups, topk_groups)
    assert ids[0].tolist() == expected_ids
    assert close(weights[0], torch.tensor(expected_weights, dtype=torch.float64), 1e-6)


# ---- experts


@pytest.mark.parametrize("linear_beta", [25.0, 1.0, None])
def test_experts_equal_the_dense_sum(linear_beta):
    spec = MoESpec(**SMALL, linear_beta=linear_beta)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 6)
    y = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    assert y.dtype == torch.float64
    assert close(y, dense(spec, x, w, ids, weights))


def test_float32_is_near_float64():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 6)
    y = moe.moe_experts(spec, x, w, ids, weights)
    assert y.dtype == torch.float32
    assert close(y.double(), dense(spec, x, w, ids, weights), 1e-5)


def test_situ_by_hand():
    spec, gate, up = MoESpec(), torch.tensor(3.0).double(), torch.tensor(-40.0).double()
    by_hand = 4 * math.tanh(0.75) / (1 + math.exp(-3)) * 25 * math.tanh(-1.6)
    assert close(moe.activate(spec, gate, up), torch.tensor(by_hand).double(), 1e-7)


@pytest.mark.parametrize("linear_beta", [None, 0.0, -1.0])
def test_linear_beta_that_is_not_positive_passes_up_through(linear_beta):
    gate, up = torch.tensor([1.0, -2.0]), torch.tensor([1000.0, -1000.0])
    limited = moe.activate(MoESpec(), gate, torch.ones(2)) / (25 * math.tanh(1 / 25))
    assert close(moe.activate(MoESpec(linear_beta=linear_beta), gate, up), limited * up, 1e-6)


def test_swiglu_is_silu_of_gate_times_up():
    gate, up = torch.tensor([1.0, -2.0]).double(), torch.tensor([3.0, 5.0]).double()
    found = moe.activate(MoESpec(activation="swiglu"), gate, up)
    assert close(found, gate / (1 + torch.exp(-gate)) * up)


def test_swiglu_is_the_limit_of_situ():
    gate, up = torch.linspace(-3, 3, 7).double(), torch.linspace(2, -2, 7).double()
    limit = moe.activate(MoESpec(beta=1e6, linear_beta=None), gate, up)
    assert close(limit, moe.activate(MoESpec(activation="swiglu"), gate, up), 1e-10)


def test_the_weight_stands_after_w2():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 4)
    once = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    assert close(moe.moe_experts(spec, x, 8 * w, ids, weights, dtype=torch.float64), 8 * once)


def test_the_order_of_the_columns_changes_no_bit():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 5)
    swapped = moe.moe_experts(spec, x, w.flip(1), ids.flip(1), weights)
    assert torch.equal(moe.moe_experts(spec, x, w, ids, weights), swapped)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_expert_parallel_shares_add_up(ranks):
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 5)
    whole = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    share, parts = 8 // ranks, []
    for rank in range(ranks):
        part = MoESpec(**SMALL | {"num_local": share}, expert_offset=rank * share)
        local = [t[rank * share : (rank + 1) * share] for t in weights]
        parts.append(moe.moe_experts(part, x, w, ids, local, dtype=torch.float64))
    assert close(sum(parts), whole)


def test_an_expert_map_says_where_an_expert_is():
    spec = MoESpec(**SMALL | {"num_local": 3}, has_expert_map=True)
    weights = random_experts(MoESpec(**SMALL))
    x, w, ids = operands(spec, 6)
    held = [5, 0, 7]
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[held] = torch.arange(3, dtype=torch.int32)
    found = moe.moe_experts(spec, x, w, ids, [t[held] for t in weights], expert_map, dtype=torch.float64)
    kept = torch.where(torch.isin(ids, torch.tensor(held)), ids, -1)
    assert close(found, dense(MoESpec(**SMALL), x, w, kept, weights))


def test_a_strided_map_and_strided_operands_are_honoured():
    spec = MoESpec(**SMALL, has_expert_map=True)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 6)
    wide = torch.arange(7, -1, -1, dtype=torch.int32).repeat_interleave(2)
    expert_map = wide[::2]
    found = moe.moe_experts(spec, x[::2], w[::2], ids[::2], weights, expert_map)
    packed = [t[::2].contiguous() for t in (x, w, ids)]
    assert torch.equal(found, moe.moe_experts(spec, *packed, weights, expert_map.contiguous()))


def test_what_is_not_local_contributes_nothing_whatever_its_weight():
    spec = MoESpec(**SMALL | {"num_local": 2}, expert_offset=4)
    weights = random_experts(spec)
    x, _, _ = operands(spec, 2)
    ids = torch.tensor([[4, -1, 3], [6, 8, -(2**31)]], dtype=torch.int32)
    w = torch.tensor([[0.5, NAN, INF], [NAN, NAN, NAN]])
    y = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    alone = torch.tensor([[4, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert close(y, dense(spec, x, w, alone, weights))
    assert not y[1].any()


def test_map_entries_that_are_no_local_expert_contribute_nothing():
    spec = MoESpec(**SMALL | {"num_local": 2}, has_expert_map=True)
    expert_map = torch.tensor([2, -1, -5, 2**30, 2, 2, 2, 2], dtype=torch.int32)
    x, w, ids = operands(spec, 4)
    assert not moe.moe_experts(spec, x, w, ids, random_experts(spec), expert_map).any()


def test_an_expert_named_twice_counts_twice():
    spec = MoESpec(**SMALL)
    weights, (x, _, _) = random_experts(spec), operands(spec, 1)
    ids = torch.tensor([[3, 3, 3]], dtype=torch.int32)
    w = torch.tensor([[0.25, 0.5, 2.0]])
    once = torch.tensor([[3, -1, -1]], dtype=torch.int32)
    found = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    assert close(found, dense(spec, x, torch.full((1, 3), 2.75), once, weights))


def test_a_row_does_not_see_another_rows_nan():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 3)
    ids[1] = ids[0]
    clean = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    x[1] = NAN
    y = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    assert close(y[[0, 2]], clean[[0, 2]])
    assert y[1].isnan().all()


def test_rows_of_an_expert_are_computed_in_pieces(monkeypatch):
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 11)
    whole = moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64)
    monkeypatch.setattr(moe, "ROWS_AT_ONCE", 2)
    assert close(moe.moe_experts(spec, x, w, ids, weights, dtype=torch.float64), whole)


def test_only_experts_with_tokens_are_decoded_each_once(monkeypatch):
    spec, decoded, original = MoESpec(**SMALL), [], moe._decoded
    weights, (x, w, _) = random_experts(spec), operands(spec, 4)
    ids = torch.tensor([[6, 1, -1], [1, 6, 9], [-1, -1, -1], [6, 6, 1]], dtype=torch.int32)

    def spy(spec, weights, expert, dtype):
        decoded.append(expert)
        return original(spec, weights, expert, dtype)

    monkeypatch.setattr(moe, "_decoded", spy)
    moe.moe_experts(spec, x, w, ids, weights)
    assert decoded == [1, 6]


def test_no_rows_of_experts():
    spec = MoESpec(**SMALL)
    x, w, ids = operands(spec, 1)
    assert list(moe.moe_experts(spec, x[:0], w[:0], ids[:0], random_experts(spec)).shape) == [0, 64]


# ---- prepared weights


def test_prepare_copies_the_bytes_and_keeps_the_inputs():
    spec = MoESpec(**SMALL)
    given_weights = random_experts(spec)
    before = [t.clone() for t in given_weights]
    prepared = moe.prepare_moe_weights(spec, *given_weights)
    for t in given_weights:
        t.fill_(255)
    assert all(torch.equal(a, b) for a, b in zip(prepared, before, strict=True))


def test_donated_weights_are_not_copied():
    given_weights = random_experts(MoESpec(**SMALL))
    prepared = moe.prepare_moe_weights(MoESpec(**SMALL), *given_weights, donate=True)
    assert [t.data_ptr() for t in prepared] == [t.data_ptr() for t in given_weights]


@pytest.mark.parametrize("donate", [False, True])
def test_prepare_honours_strides(donate):
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 3)
    padded = [torch.cat([t, torch.full_like(t, 255)], dim=-1)[..., : t.shape[-1]] for t in weights]
    prepared = moe.prepare_moe_weights(spec, *padded, donate=donate)
    plain = moe.moe_experts(spec, x, w, ids, weights)
    assert torch.equal(moe.moe_experts(spec, x, w, ids, prepared), plain)


def test_a_foreign_list_of_weights_is_refused():
    spec = MoESpec(**SMALL)
    x, w, ids = operands(spec, 1)
    with pytest.raises(ContractError) as error:
        moe.moe_experts(spec, x, w, ids, [torch.zeros(3, 4)])
    assert str(error.value) == (
        "moe_experts: weights must be the list that prepare_moe_weights of this implementation returned for "
        "this Spec (moe.mxfp4.plain: uint8 [8, 64, 32], uint8 [8, 64, 2], uint8 [8, 64, 16], "
        "uint8 [8, 64, 1]), got float32 [3, 4]"
    )


def test_an_empty_list_of_weights_is_refused():
    spec = MoESpec(**SMALL)
    with pytest.raises(ContractError, match=r"got nothing$"):
        moe.moe_experts(spec, *operands(spec, 1), [])


# ---- as a backend


def run_function(name, spec):
    sizes = Sizes()
    context = BuildContext(
        operator=name, spec=spec, limits=None, device="cpu", arch="cpu", sizes=sizes, group=None,
        persistent=None, check=lambda **tensors: None, settings={},
    )  # fmt: skip
    return backend.build(context)


def test_the_sum_is_rounded_once_into_the_callers_buffer():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 3)
    out = torch.full((3, 64), NAN, dtype=torch.bfloat16)
    assert run_function("moe_experts", spec)(x, w, ids, weights, out=out) is out
    assert torch.equal(out, moe.moe_experts(spec, x, w, ids, weights).bfloat16())


def test_float32_output():
    spec = MoESpec(**SMALL, out_dtype="float32")
    weights, (x, w, ids) = random_experts(spec), operands(spec, 3)
    assert run_function("moe_experts", spec)(x, w, ids, weights).dtype == torch.float32


def test_the_router_writes_both_buffers():
    weights_out, ids_out = torch.full((2, 16), NAN), torch.zeros(2, 16, dtype=torch.int32)
    run = run_function("moe_route", RouteSpec())
    found = run(torch.zeros(2, 896), torch.zeros(896), weights_out=weights_out, ids_out=ids_out)
    assert found[0] is weights_out
    assert found[1] is ids_out
    assert weights_out.tolist() == [[1 / 16] * 16] * 2
    assert ids_out.tolist() == [list(range(16))] * 2


def test_prepare_returns_a_list_through_the_backend():
    spec = MoESpec(**SMALL)
    weights, (x, w, ids) = random_experts(spec), operands(spec, 3)
    prepared = run_function("prepare_moe_weights", spec)(*weights, donate=True)
    assert isinstance(prepared, list)
    assert prepared[0].data_ptr() == weights[0].data_ptr()
    run = run_function("moe_experts", spec)
    assert torch.equal(run(x, w, ids, prepared), run(x, w, ids, weights))
    assert moe_experts_op.args["weights"].many


@pytest.mark.full
def test_the_models_width_runs_one_expert_at_a_time():
    """All 896 experts at TP8: about a gigabyte of weights, of which 60 MB are decoded at any time."""
    spec = MoESpec(intermediate=384)
    weights = random_experts(spec)
    logits = torch.randn(64, 896, generator=torch.Generator().manual_seed(5))
    w, ids = moe.moe_route(RouteSpec(), logits, torch.zeros(896))
    x = torch.randn(64, 3584, generator=torch.Generator().manual_seed(6)).bfloat16()
    y = moe.moe_experts(spec, x, w, ids, weights)
    row, w13, w2 = 63, [], []
    for expert in ids[row].tolist():
        w13.append(decode(weights[0][expert], weights[1][expert]))
        w2.append(decode(weights[2][expert], weights[3][expert]))
    expected = torch.zeros(3584, dtype=torch.float64)
    for factor, a, b in zip(w[row].double(), w13, w2, strict=True):
        gate, up = (a @ x[row].double()).chunk(2)
        expected += factor * (b @ situ(spec, gate, up))
    assert close(y[row].double(), expected, 1e-4)
