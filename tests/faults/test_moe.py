"""Faults that users met in routers and quantised experts (docs/faults.md), each with its exact right answer.

Experts with an answer one can write down: gate rows of 6 saturate SiTU's gate at beta = 4 exactly, without
linear_beta the up projection passes through, and scales are powers of two. So every value below is exact in
float32, and the wrong answers that the reports describe are far away.
"""

import math

import pytest
import torch

from kimi_hal import formats
from kimi_hal.dispatch.contract import NUMERICS
from kimi_hal.errors import FormatError, SpecError
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.reference import moe

#: Reports about an operand that K3.1's experts and router lack -> the reason, the general form's test.
NOT_APPLICABLE = {
    "E5": (
        "experts.mxfp4-pack has no global scale, only a byte per 32 columns",
        "test_fault_21_a_scale_multiplies",
    ),
    "E9": (
        "experts.mxfp4-pack is symmetric, it has no zero points",
        "test_fault_21_one_tile_spans_several_groups",
    ),
    "F4": (
        "the shared experts are an MLP of their own in moe_layer, not a slot of the routed list",
        "test_fault_18_the_order_of_the_chosen_is_free",
    ),
    "F5": ("K3.1's experts have no biases", "test_fault_18_the_routing_weight_counts_once"),
}

NAN, INF = math.nan, math.inf
FORMAT = "experts.mxfp4-pack"
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
ONE, SIX = 2, 7  # e2m1 codes


def route(logits, bias=None, num_tokens=None, **fields):
    spec = RouteSpec(num_experts=logits.shape[-1], **fields)
    bias = torch.zeros(spec.num_experts) if bias is None else bias
    tokens = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
    return moe.moe_route(spec, logits, bias, tokens)


def logit(p):
    return torch.logit(torch.tensor(p, dtype=torch.float64)).float()


def exact(count, hidden=32, inter=32, **fields):
    """A Spec whose activation is exactly 4 · up for a saturated gate."""
    fields = {"num_experts": count, "topk": 1, "linear_beta": None} | fields
    return MoESpec(num_local=count, hidden=hidden, intermediate=inter, **fields)


def pack(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def scaling(spec, exponents):
    """Experts of which the e-th returns ``x[0] · 2^exponents[e]`` in every column."""
    count, hidden, inter = spec.num_local, spec.hidden, spec.intermediate
    w13 = torch.zeros(count, 2 * inter, hidden, dtype=torch.int64)
    w13[:, :inter] = SIX
    w13[:, inter, 0] = ONE
    w2 = torch.zeros(count, hidden, inter, dtype=torch.int64)
    w2[:, :, 0] = ONE
    s13 = torch.full((count, 2 * inter, hidden // 32), 127, dtype=torch.uint8)
    s2 = torch.full((count, hidden, inter // 32), 127, dtype=torch.uint8)
    s2 += (torch.tensor(exponents) - 2).to(torch.uint8)[:, None, None]  # SiTU's beta is 2^2
    return [pack(w13), s13, pack(w2), s2]


def rows(values, hidden=32):
    x = torch.full((len(values), hidden), 16.0)
    x[:, 0] = torch.tensor(values)
    return x.bfloat16()


def ids(values):
    return torch.tensor(values, dtype=torch.int32)


def ones(shape):
    return torch.ones(shape, dtype=torch.float32)


def random_experts(spec, seed=0):
    size, g = spec.dims(), torch.Generator().manual_seed(seed)
    shapes = [("2In", "Hid/2"), ("2In", "Hid/g"), ("Hid", "In/2"), ("Hid", "In/g")]
    bounds = [(0, 256), (122, 126)] * 2
    return [
        torch.randint(*bound, (spec.num_local, *(size[s] for s in shape)), dtype=torch.uint8, generator=g)
        for shape, bound in zip(shapes, bounds, strict=True)
    ]


def guarded(tensor, fill):
    """The same tensor inside a larger one whose other columns hold ``fill``."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), fill, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def test_every_fault_that_does_not_apply_has_its_general_form_tested():
    assert all(name in globals() for _, name in NOT_APPLICABLE.values())


# ---- 3: padding rows


def test_fault_03_padding_rows_of_a_captured_graph():
    logits = torch.full((8, 128), NAN)
    logits[:7] = torch.arange(128.0) / 64
    w, chosen = route(logits, topk=4, num_tokens=7)
    assert chosen[7].tolist() == [-1] * 4
    assert w[7].tolist() == [0.0] * 4
    assert chosen[:7].tolist() == [[127, 126, 125, 124]] * 7
    spec = exact(128, topk=4)
    x = rows([1.0] * 8)
    x[7] = NAN
    out = torch.full((8, 32), NAN)
    out.copy_(moe.moe_experts(spec, x, w, chosen, scaling(spec, [0] * 128)))
    assert not out[7].any()
    assert torch.allclose(out[:7], ones((7, 32)), rtol=1e-6)


def test_fault_03_sentinel_expert_with_a_weight():
    spec = exact(4)
    x = rows([1.0, 2.0, 3.0, NAN, NAN])
    w = torch.tensor([[1.0], [1.0], [1.0], [0.7], [0.7]])
    y = moe.moe_experts(spec, x, w, ids([[0], [1], [3], [4], [4]]), scaling(spec, [0, 1, 2, 3]))
    assert y[:, 0].tolist() == [1.0, 4.0, 24.0, 0.0, 0.0]
    assert not y[3:].any()


# ---- 4: stale bytes


@pytest.mark.parametrize("stale", [0xFF, 0x7F, 0xFE])
def test_fault_04_stale_scale_padding(stale):
    spec = exact(2, hidden=96, inter=96)
    weights = scaling(spec, [0, 1])
    prepared = moe.prepare_moe_weights(spec, *(guarded(t, stale) for t in weights), donate=True)
    x = torch.full((8, 96), NAN).bfloat16()
    x[:5] = rows([1.0, 2.0, 3.0, 4.0, 5.0], 96)
    y = moe.moe_experts(spec, x[:5], ones((5, 1)), ids([[0], [1], [0], [1], [0]]), prepared)
    assert y.tolist() == [[v] * 96 for v in (1.0, 4.0, 3.0, 8.0, 5.0)]


def test_fault_04_an_expert_nobody_chose_may_hold_anything():
    spec = exact(3)
    weights = scaling(spec, [0, 1, 2])
    for tensor in weights:
        tensor[1] = 0xFF
    y = moe.moe_experts(spec, rows([1.0, 2.0]), ones((2, 1)), ids([[0], [2]]), weights)
    assert y.tolist() == [[1.0] * 32, [8.0] * 32]


# ---- 14: widths that are no power of two


def test_fault_14_experts_that_are_no_power_of_two():
    logits = torch.full((2, 512), 1e4)
    logits[:, :384] = 0.0
    bias = torch.full((512,), 1e4)
    bias[:384] = torch.arange(384.0) / 512
    assert route(logits[:, :384], bias[:384], topk=2)[1].tolist() == [[383, 382]] * 2
    hopeless = route(
        torch.full((1, 512), INF)[:, :384].clone().fill_(-INF), torch.full((384,), -INF), topk=16
    )
    assert hopeless[1].tolist() == [list(range(16))]


def test_fault_14_widths_with_guard_bytes():
    spec = MoESpec(num_experts=3, num_local=3, topk=2, hidden=96, intermediate=160)
    weights = random_experts(spec)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen, w = ids([[0, 1], [1, 2], [2, 0], [1, 0]]), ones((4, 2)) / 2
    clean = moe.moe_experts(spec, x, w, chosen, weights)
    poisoned = [guarded(t, 0xFF) for t in weights]
    assert torch.equal(moe.moe_experts(spec, guarded(x, NAN), guarded(w, NAN), chosen, poisoned), clean)


# ---- 16: nobody there


@pytest.mark.parametrize(
    ("sizes", "factors"),
    [([3, 0, 0, 5], [1, 1, 1, 8, 8, 8, 8, 8]), ([0, 8, 0, 0], [2] * 8), ([0, 0, 0, 8], [8] * 8)],
)
def test_fault_16_experts_without_tokens(sizes, factors):
    spec = exact(4)
    chosen = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(sizes))[:, None]
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    y = moe.moe_experts(spec, rows(values), ones((8, 1)), chosen, scaling(spec, [0, 1, 2, 3]))
    assert y[:, 31].tolist() == [v * f for v, f in zip(values, factors, strict=True)]


def test_fault_16_no_tokens_at_all():
    spec = exact(4)
    weights = scaling(spec, [0, 1, 2, 3])
    assert list(moe.moe_experts(spec, rows([]), ones((0, 1)), ids([]).view(0, 1), weights).shape) == [0, 32]
    assert not moe.moe_experts(spec, rows([1.0]), ones((1, 1)), ids([[-1]]), weights).any()


def test_fault_16_a_rank_without_tokens():
    spec = MoESpec(
        num_experts=384, num_local=96, expert_offset=96, topk=2, hidden=32, intermediate=32, linear_beta=None
    )
    weights = scaling(spec, [e % 8 for e in range(96)])
    outside = ids([[0, 95], [192, 383], [50, 300]])
    assert not moe.moe_experts(spec, rows([1.0, 2.0, 3.0]), ones((3, 2)), outside, weights).any()
    y = moe.moe_experts(spec, rows([1.0, 2.0]), ones((2, 2)), ids([[96, 0], [192, 191]]), weights)
    assert y[:, 0].tolist() == [1.0, 2.0 * 2**7]


# ---- 17: beyond one block


def test_fault_17_experts_beyond_256():
    logits = (torch.arange(512.0) - 256) / 64
    assert route(logits[None], topk=10)[1].tolist() == [list(range(511, 501, -1))]


def test_fault_17_logits_equal_to_the_index_saturate():
    # The report's own logits need a router without sigmoid: from 18 on every score is exactly 1, so they tie.
    assert route(torch.arange(512.0)[None], topk=10)[1].tolist() == [list(range(18, 28))]


def test_fault_17_rows_beyond_the_first_block():
    logits = torch.randn(128, generator=torch.Generator().manual_seed(0)).repeat(17, 1)
    w, chosen = route(logits, topk=8)
    assert torch.equal(chosen[16], chosen[0])
    assert torch.equal(w[16], w[0])
    assert int(chosen.min()) >= 0


def test_fault_17_experts_that_no_block_divides():
    spec = exact(5)
    y = moe.moe_experts(
        spec,
        rows([1.0] * 5),
        ones((5, 1)),
        ids([[4], [3], [2], [1], [0]]),
        scaling(spec, [0, 1, 2, 3, 4]),
    )
    assert y[:, 0].tolist() == [16.0, 8.0, 4.0, 2.0, 1.0]


# ---- 18: what routing means


def test_fault_18_the_bias_selects_and_the_score_weighs():
    w, chosen = route(logit([[0.9, 0.8, 0.1, 0.2]]), torch.tensor([0.0, 0, 1, 0]), topk=2, renormalize=False)
    found = dict(zip(chosen[0].tolist(), w[0].tolist(), strict=True))
    assert found == pytest.approx({2: 0.1, 0: 0.9})
    w, chosen = route(logit([[0.9, 0.8, 0.1, 0.2]]), torch.tensor([0.0, 0, 1, 0]), topk=2)
    assert dict(zip(chosen[0].tolist(), w[0].tolist(), strict=True)) == pytest.approx({2: 0.1, 0: 0.9})


def test_fault_18_no_tie_break_by_a_small_difference():
    logits = torch.full((1, 384), -INF)
    logits[0, 10], logits[0, 200] = 0.0, 4e-6  # scores 0.5 and 0.5 + 1e-6
    assert route(logits, topk=1)[1].tolist() == [[200]]


def test_fault_18_minus_one_routes_nowhere():
    spec = exact(4, topk=2, has_expert_map=True)
    expert_map = ids([1, 0, 2, 3])  # the last entry, which −1 would index, is a local expert
    chosen, w = ids([[-1, 0], [0, -1], [-1, -1]]), ones((3, 2)) / 2
    before = chosen.clone(), w.clone()
    y = moe.moe_experts(spec, rows([2.0, 4.0, 8.0]), w, chosen, scaling(spec, [0, 3, 0, 5]), expert_map)
    assert y[:, 0].tolist() == [8.0, 16.0, 0.0]
    assert torch.equal(chosen, before[0])
    assert torch.equal(w, before[1])


def test_fault_18_the_order_of_the_chosen_is_free():
    spec = exact(4, topk=3)
    weights, x = scaling(spec, [0, 1, 2, 3]), rows([1.0])
    w, chosen = torch.tensor([[0.5, 0.25, 0.125]]), ids([[3, 0, 2]])
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert moe.moe_experts(spec, x, w[:, order], chosen[:, order], weights)[0, 0] == 4 + 0.25 + 0.5


def test_fault_18_the_routing_weight_counts_once():
    spec = exact(2, topk=2)
    y = moe.moe_experts(spec, rows([1.0]), torch.tensor([[0.75, 0.25]]), ids([[0, 1]]), scaling(spec, [0, 0]))
    assert y.tolist() == [[1.0] * 32]


def test_fault_18_each_rows_own_routing_weight():
    spec = MoESpec(num_experts=32, num_local=32, topk=4, hidden=2880, intermediate=32)
    weights, g = random_experts(spec), torch.Generator().manual_seed(2)
    x = torch.randn(32, 2880, generator=g).bfloat16()
    chosen = torch.stack([torch.randperm(32, generator=g)[:4] for _ in range(32)]).int()
    w = torch.arange(1, 129).view(32, 4) / 128
    fused = moe.moe_experts(spec, x, w, chosen, weights, dtype=torch.float64)
    apart = torch.zeros_like(fused)
    for column in range(4):
        only = torch.full_like(chosen, -1)
        only[:, column] = chosen[:, column]
        alone = moe.moe_experts(spec, x, ones((32, 4)), only, weights, dtype=torch.float64)
        apart += w[:, column, None].double() * alone
    assert torch.allclose(fused, apart, rtol=1e-12, atol=1e-12 * float(apart.abs().max()))


# ---- 19: what is not a number


def test_fault_19_nan_scores_of_both_signs():
    logits = torch.arange(16.0)
    logits[3], logits[9] = NAN, torch.tensor(0xFFC00000 - 2**32, dtype=torch.int32).view(torch.float32)
    assert sorted(route(logits[None], topk=4)[1][0].tolist()) == [12, 13, 14, 15]


def test_fault_19_rows_of_nan_and_of_infinity():
    logits = torch.randn(8, 896, generator=torch.Generator().manual_seed(0))
    clean = route(logits, topk=16)
    logits[6], logits[7] = INF, NAN
    w, chosen = route(logits, topk=16)
    assert chosen[6:].tolist() == [list(range(16))] * 2
    assert w[6:].tolist() == [[1 / 16] * 16, [0.0] * 16]
    assert torch.equal(chosen[:6], clean[1][:6])
    assert torch.equal(w[:6], clean[0][:6])


# ---- 20: scales at their edges


def test_fault_20_every_scale_and_every_code():
    codes = torch.arange(32).remainder(16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    found = formats.experts(FORMAT).decode(pack(codes), scale, torch.float32)
    value = GRID[codes] * torch.exp2(torch.arange(256.0).double() - 127)[:, None]
    expected = value.float()  # 254 with 2, 3, 4 and 6 is beyond float32: infinite
    expected[255] = NAN
    assert torch.equal(found.view(torch.int32)[:255], expected.view(torch.int32)[:255])
    assert found[255].isnan().all()
    assert found[134, ONE] == 128.0
    assert found[0, 1] == 2.0**-128
    assert found[0, 1].bfloat16().view(torch.int16) == 0x0020


def test_fault_20_an_all_zero_expert():
    spec = exact(2, topk=2)
    weights = scaling(spec, [0, 1])
    packed, scale = formats.experts(FORMAT).encode(torch.zeros(32, 32))
    assert scale.unique().tolist() == [127]
    weights[2][1], weights[3][1] = packed, scale
    y = moe.moe_experts(spec, rows([3.0, 5.0]), ones((2, 2)), ids([[0, 1], [1, 0]]), weights)
    assert y.tolist() == [[3.0] * 32, [5.0] * 32]


def test_fault_20_a_zero_block_a_tiny_block_a_large_block():
    row = torch.cat([torch.zeros(32), torch.full((32,), 1e-6), torch.full((32,), 6.0)])
    packed, scale = formats.experts(FORMAT).encode(row)
    found = formats.experts(FORMAT).decode(packed, scale, torch.float32)
    assert scale.tolist() == [127, 105, 127]
    assert found.view(3, 32).unique(dim=1).flatten().tolist() == [0.0, 2.0**-20, 6.0]


def test_fault_20_a_row_of_zeros():
    spec = exact(1)
    y = moe.moe_experts(
        spec, torch.zeros(1, 32).bfloat16(), ones((1, 1)), ids([[0]]), scaling(spec, [127 - 2])
    )
    assert y.tolist() == [[0.0] * 32]


# ---- 21: layout of scales and codes


def test_fault_21_a_scale_multiplies():
    packed, scale = pack(torch.full((1, 32), ONE)), torch.tensor([[128]], dtype=torch.uint8)
    assert formats.experts(FORMAT).decode(packed, scale, torch.float32).unique().tolist() == [2.0]


def test_fault_21_codes_stand_low_nibble_first():
    linear = torch.tensor([[((2 * i + 1) % 16) << 4 | 2 * i % 16 for i in range(16)]], dtype=torch.uint8)
    found = formats.experts(FORMAT).decode(linear, torch.tensor([[127]], dtype=torch.uint8), torch.float64)
    assert found[0].tolist() == GRID.repeat(2).tolist()


def test_fault_21_one_tile_spans_several_groups():
    spec = exact(1, hidden=256)
    weights = scaling(spec, [0])
    w13 = torch.full((1, 64, 256), ONE)
    w13[:, :32] = SIX
    w13[:, 33:] = 0
    weights[0] = pack(w13)
    weights[1][:, 32] = torch.arange(127, 135, dtype=torch.uint8)  # group g of the up row: 2^g
    x = torch.ones(1, 256).bfloat16()
    y = moe.moe_experts(spec, x, ones((1, 1)), ids([[0]]), weights)
    assert y[0, 0] == sum(32 * 2**g for g in range(8)) == 8160


def test_fault_21_a_width_off_every_tile():
    with pytest.raises(SpecError, match=r"intermediate=130 cuts a group of 32 along w2's columns"):
        MoESpec(intermediate=130)
    spec = exact(2, hidden=32, inter=160)
    weights = scaling(spec, [0, 0])
    w2 = torch.zeros(2, 32, 160, dtype=torch.int64)
    w2[1, :, 159] = ONE  # the last column, read by expert 1 alone
    w2[0, :, 0] = ONE
    w13 = torch.zeros(2, 320, 32, dtype=torch.int64)
    w13[:, :160] = SIX
    w13[:, 160, 0], w13[:, 319, 1] = ONE, ONE
    weights[0], weights[2] = pack(w13), pack(w2)
    x = rows([3.0, 5.0])
    y = moe.moe_experts(spec, x, ones((2, 1)), ids([[0], [1]]), weights)
    assert y.tolist() == [[3.0] * 32, [16.0] * 32]


def test_fault_21_an_activation_type_beyond_the_contract_is_asked_for_by_name():
    with pytest.raises(SpecError) as error:
        MoESpec(act="float8_e4m3fn")
    assert str(error.value) == "MoESpec: act='float8_e4m3fn' is not 'bfloat16'"
    assert {"moe.act=mxfp8", "moe.act=fp8_block", "moe.act=fp8_tensor"} <= set(NUMERICS)


def w2_checkpoint(folder):
    """One expert: w2 [64, 1024] of ones with scale 2^(g − 16) in group g, w1 and w3 that pass x[0] on."""
    save_file = pytest.importorskip("safetensors.torch", reason="reads a checkpoint").save_file
    up = torch.zeros(1024, 64, dtype=torch.int64)
    up[:, 0] = ONE
    groups = torch.arange(111, 143, dtype=torch.uint8)
    tensors = {
        "w1.weight_packed": pack(torch.full((1024, 64), SIX)),
        "w1.weight_scale": torch.full((1024, 2), 127, dtype=torch.uint8),
        "w2.weight_packed": pack(torch.full((64, 1024), ONE)),
        "w2.weight_scale": groups.repeat(64, 1),
        "w3.weight_packed": pack(up),
        "w3.weight_scale": torch.full((1024, 2), 125, dtype=torch.uint8),  # undoes SiTU's beta of 4
    }
    prefix = "language_model.model.layers.1.block_sparse_moe.experts.0"
    path = folder / "model.safetensors"
    return path, {f"{prefix}.{name}": t.contiguous() for name, t in tensors.items()}, save_file


def test_fault_21_tensor_parallel_ranks_get_their_own_scales(tmp_path):
    from kimi_hal.checkpoint import read_experts

    path, tensors, save_file = w2_checkpoint(tmp_path)
    save_file(tensors, path)
    spec, sums = exact(1, hidden=64, inter=128), []
    for rank in range(8):
        weights = list(read_experts(path, 1, spec, tp=8, tp_rank=rank))
        y = moe.moe_experts(spec, rows([1.0], 64), ones((1, 1)), ids([[0]]), weights)
        sums.append(y[0, 0].item())
    # Rank r has groups 4r … 4r + 3: 32 columns of 2^(4r − 16) · (1 + 2 + 4 + 8).
    assert sums == [480 * 2.0 ** (4 * r - 16) for r in range(8)]
    assert sum(sums) == 32 * (2**32 - 1) / 2**16


def test_fault_21_a_scale_that_was_never_stored(tmp_path):
    from kimi_hal.checkpoint import read_experts

    path, tensors, save_file = w2_checkpoint(tmp_path)
    del tensors["language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(FormatError) as error:
        read_experts(path, 1, exact(1, hidden=64, inter=1024))
    assert str(error.value) == (
        "layer 1: language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight_scale is missing"
    )
