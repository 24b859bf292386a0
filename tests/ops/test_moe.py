import subprocess
import sys

import pytest
import torch

from kimi_hal.errors import SpecError
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops import check
from kimi_hal.ops.moe import MoESpec, RouteSpec, moe_experts, moe_route, prepare_moe_weights

SMALL = {"num_experts": 8, "num_local": 4, "topk": 2, "hidden": 64, "intermediate": 32}


def route_operands(rows=3):
    return {"logits": torch.zeros(rows, 896), "bias": torch.zeros(896)}


def checkpoint(spec):
    return {
        "w13": torch.zeros(4, 64, 32, dtype=torch.uint8),
        "w13_scale": torch.zeros(4, 64, 2, dtype=torch.uint8),
        "w2": torch.zeros(4, 64, 16, dtype=torch.uint8),
        "w2_scale": torch.zeros(4, 64, 1, dtype=torch.uint8),
    }


def expert_operands(rows=3):
    return {
        "x": torch.zeros(rows, 64, dtype=torch.bfloat16),
        "topk_weights": torch.zeros(rows, 2),
        "topk_ids": torch.zeros(rows, 2, dtype=torch.int32),
        "weights": [torch.zeros(7, dtype=torch.float16)],
    }


def values(op, spec, **tensors):
    return list(op.values(spec, None, tensors))


# ---- Specs


def test_default_specs_are_the_models_numbers():
    route, experts = RouteSpec(), MoESpec()
    assert (route.num_experts, route.topk) == (K3_1_PRO.experts, K3_1_PRO.experts_per_token)
    assert (experts.num_experts, experts.num_local, experts.topk) == (K3_1_PRO.experts, K3_1_PRO.experts, 16)
    assert (experts.hidden, experts.intermediate) == (K3_1_PRO.moe_hidden, K3_1_PRO.moe_intermediate)
    assert (experts.beta, experts.linear_beta) == (K3_1_PRO.situ_beta, K3_1_PRO.situ_linear_beta)


@pytest.mark.parametrize("spec", [RouteSpec(), MoESpec(), MoESpec(linear_beta=None)])
def test_specs_survive_json(spec):
    assert type(spec).from_json(spec.key()) == spec


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_every_tp_share_of_whole_groups_is_a_spec(tp):
    assert MoESpec(intermediate=K3_1_PRO.intermediate(tp)).dims()["In/g"] == 96 // tp


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": "sigmod"}, "RouteSpec: score='sigmod' is not 'sigmoid'; did you mean 'sigmoid'?"),
        ({"groups": 5}, "RouteSpec: groups=5 does not divide num_experts=896"),
        ({"groups": 8, "topk_groups": 9}, "RouteSpec: topk_groups=9 is more than groups=8"),
        (
            {"groups": 112, "topk_groups": 1},
            "RouteSpec: topk=16 is more than the 8 experts that a row can reach",
        ),
        ({"num_experts": 8}, "RouteSpec: topk=16 is more than the 8 experts that a row can reach"),
        ({"denom_eps": -1.0}, "RouteSpec: denom_eps=-1.0 is not 0 to 1"),
    ],
)
def test_route_spec_refuses(fields, message):
    with pytest.raises(SpecError) as error:
        RouteSpec(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"intermediate": 130},
            "MoESpec: intermediate=130 cuts a group of 32 along w2's columns (experts.mxfp4-pack); "
            "the nearest whole widths are 128 or 160",
        ),
        (
            {"hidden": 100, "intermediate": 48},
            "MoESpec: hidden=100 cuts a group of 32 along w13's columns (experts.mxfp4-pack); "
            "the nearest whole widths are 96 or 128; "
            "intermediate=48 cuts a group of 32 along w2's columns (experts.mxfp4-pack); "
            "the nearest whole widths are 32 or 64",
        ),
        (
            {"intermediate": 16},
            "MoESpec: intermediate=16 cuts a group of 32 along w2's columns (experts.mxfp4-pack); "
            "the nearest whole width is 32",
        ),
        ({"expert_offset": 1}, "MoESpec: expert_offset=1 + num_local=896 is beyond num_experts=896"),
        (
            {"expert_offset": 448, "num_local": 448, "has_expert_map": True},
            "MoESpec: expert_offset=448 is not read with has_expert_map=True; leave it 0",
        ),
        ({"topk": 17, "num_experts": 16, "num_local": 16}, "MoESpec: topk=17 is more than num_experts=16"),
        ({"act": "bfloat"}, "MoESpec: act='bfloat' is not 'bfloat16'; did you mean 'bfloat16'?"),
        (
            {"activation": "swigl"},
            "MoESpec: activation='swigl' is not 'situ' | 'swiglu'; did you mean 'swiglu'?",
        ),
        ({"beta": 0.0}, "MoESpec: beta=0.0 is not 0.001 to 1e+06"),
        ({"linear_beta": float("nan")}, "MoESpec: linear_beta=nan is not -1e+06 to 1e+06"),
    ],
)
def test_moe_spec_refuses(fields, message):
    with pytest.raises(SpecError) as error:
        MoESpec(**fields)
    assert str(error.value) == message


def test_moe_spec_names_the_nearest_weight_format():
    with pytest.raises(SpecError, match=r"did you mean 'experts\.mxfp4-pack'\?"):
        MoESpec(weights="experts.mxfp4-pak")


# ---- signatures


@pytest.mark.parametrize(
    ("op", "signature"),
    [
        (moe_route, "(logits, bias, num_tokens=None, *, weights_out=None, ids_out=None)"),
        (prepare_moe_weights, "(w13, w13_scale, w2, w2_scale, *, donate=False)"),
        (
            moe_experts,
            "(x, topk_weights, topk_ids, weights, expert_map=None, *, step=None, out=None, workspace=None)",
        ),
    ],
)
def test_signatures(op, signature):
    assert str(op.signature) == signature
    assert op.family == "moe"


def test_only_prepare_is_listed_and_has_a_scalar():
    assert [op.listed for op in (moe_route, prepare_moe_weights, moe_experts)] == [False, True, False]
    assert prepare_moe_weights.scalars == ("donate",)


def test_the_family_imports_no_torch():
    code = "import sys, kimi_hal.ops.moe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- metadata


def test_right_operands_have_no_problems():
    spec = MoESpec(**SMALL)
    assert check.problems(moe_route, RouteSpec(), route_operands()) == []
    assert check.problems(prepare_moe_weights, spec, {**checkpoint(spec), "donate": False}) == []
    assert check.problems(moe_experts, spec, expert_operands()) == []


def test_no_rows_are_right_operands():
    assert check.problems(moe_route, RouteSpec(), route_operands(0)) == []
    assert check.problems(moe_experts, MoESpec(**SMALL), expert_operands(0)) == []


def test_bfloat16_logits_are_refused():
    operands = route_operands() | {"logits": torch.zeros(3, 896, dtype=torch.bfloat16)}
    assert check.problems(moe_route, RouteSpec(), operands) == ["logits must be float32, got bfloat16"]


def test_all_wrong_operands_are_named_at_once():
    operands = {"logits": torch.zeros(3, 895), "bias": torch.zeros(896), "num_tokens": torch.zeros(1).long()}
    assert check.problems(moe_route, RouteSpec(), operands) == [
        "logits must be [T E] with E=896, got shape [3, 895]",
        "num_tokens must be int32, got int64",
    ]


def test_route_outputs_are_checked():
    operands = route_operands() | {"weights_out": torch.zeros(3, 15), "ids_out": torch.zeros(3, 16).long()}
    assert check.problems(moe_route, RouteSpec(), operands) == [
        "weights_out must be [T k] with k=16, got shape [3, 15]",
        "ids_out must be int32, got int64",
    ]


def test_scales_of_another_group_size_are_refused():
    spec = MoESpec(**SMALL)
    operands = checkpoint(spec) | {"w13_scale": torch.zeros(4, 64, 4, dtype=torch.uint8)}
    assert check.problems(prepare_moe_weights, spec, operands) == [
        "w13_scale must be [El 2In Hid/g] with Hid/g=2, got shape [4, 64, 4]"
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.uint8])
def test_prepared_weights_are_opaque(dtype):
    operands = expert_operands() | {"weights": [torch.zeros(2, 3, 4, dtype=dtype).mT, torch.zeros(())]}
    assert check.problems(moe_experts, MoESpec(**SMALL), operands) == []


def test_int64_ids_are_refused():
    operands = expert_operands() | {"topk_ids": torch.zeros(3, 2).long()}
    assert check.problems(moe_experts, MoESpec(**SMALL), operands) == ["topk_ids must be int32, got int64"]


def test_the_expert_map_is_asked_for_by_the_spec():
    mapped, plain = MoESpec(**SMALL, has_expert_map=True), MoESpec(**SMALL)
    operands = expert_operands()
    assert check.problems(moe_experts, mapped, operands) == ["expert_map is required by this Spec"]
    operands["expert_map"] = torch.zeros(8, dtype=torch.int32)
    assert check.problems(moe_experts, mapped, operands) == []
    assert check.problems(moe_experts, plain, operands) == ["expert_map is refused by this Spec"]


# ---- values, in checked mode


def test_num_tokens_beyond_the_rows_is_an_error():
    tokens = torch.tensor([4], dtype=torch.int32)
    found = values(moe_route, RouteSpec(), **route_operands(), num_tokens=tokens)
    assert found == ["num_tokens holds 4, beyond 3"]
    assert values(moe_route, RouteSpec(), **route_operands(), num_tokens=tokens - 1) == []


def test_ids_beyond_the_experts_are_an_error_and_negative_ones_are_not():
    operands = expert_operands()
    operands["topk_ids"][0] = torch.tensor([-7, 8])
    assert values(moe_experts, MoESpec(**SMALL), **operands) == [
        "topk_ids holds 8, beyond the model's experts (8)"
    ]


def test_map_entries_beyond_the_local_experts_are_an_error():
    expert_map = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1], dtype=torch.int32)
    found = values(
        moe_experts, MoESpec(**SMALL, has_expert_map=True), **expert_operands(), expert_map=expert_map
    )
    assert found == ["expert_map holds 4, beyond this rank's experts (4)"]


def test_an_output_on_an_input_or_a_weight_is_an_error():
    operands = expert_operands()
    assert values(moe_experts, MoESpec(**SMALL), **operands, out=operands["x"]) == ["out overlaps x"]
    packed = torch.zeros(3 * 64 * 2, dtype=torch.uint8)
    out = packed.view(torch.bfloat16).view(3, 64)
    operands["weights"] = [torch.zeros(1), packed]
    assert values(moe_experts, MoESpec(**SMALL), **operands, out=out) == ["out overlaps weights[1]"]


def test_donated_tensors_must_be_apart():
    spec = MoESpec(**SMALL)
    operands = checkpoint(spec)
    operands["w2_scale"] = operands["w2"][:, :, :1]
    assert values(prepare_moe_weights, spec, **operands, donate=False) == []
    assert values(prepare_moe_weights, spec, **operands, donate=True) == ["w2 overlaps w2_scale"]
