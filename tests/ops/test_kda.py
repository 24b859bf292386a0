"""The contract of the KDA operators: the Spec, what metadata is refused, and what checked mode finds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from kda_cases import Layer, Rows, cuts, flags, ids

from kimi_hal.errors import SpecError
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops import check, get
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.operator import Operator, output_shapes
from kimi_hal.ops.spec import Limits

SPEC = KDASpec(num_heads=2, head_dim=8)
MARKED = KDASpec(num_heads=2, head_dim=8, checkpoints=True)
LIMITS = Limits(max_rows=16, max_reqs=4, rows_per_req=4)


def conv(spec: KDASpec = SPEC, lengths: tuple[int, ...] = (3, 2), slots: int = 4) -> dict[str, Any]:
    """Return legal operands of kda_conv."""
    layer, rows = Layer.random(spec), Rows.random(spec, sum(lengths))
    found: dict[str, Any] = {"x": rows.x, "weight": layer.weight, "conv_state": layer.conv_pool(slots)}
    return found | sequences(spec, lengths)


def sequences(spec: KDASpec, lengths: tuple[int, ...]) -> dict[str, Any]:
    n = len(lengths)
    found: dict[str, Any] = {"state_ids": ids(*range(n)), "cu_seqlens": cuts(*lengths)}
    if spec.checkpoints:
        found |= {"checkpoint_offsets": ids(*[0] * n), "checkpoint_ids": ids(*[-1] * n)}
    return found


def decode(spec: KDASpec = SPEC, rows: int = 3, slots: int = 4) -> dict[str, Any]:
    """Return legal operands of kda_decode."""
    layer, r = Layer.random(spec), Rows.random(spec, rows)
    gate = {"raw_g": r.raw_g, "raw_beta": r.raw_beta, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
    return {"q": r.q, "k": r.k, "v": r.v, **gate, "state": layer.pool(slots), "state_ids": ids(*range(rows))}


def prefill(spec: KDASpec = SPEC, lengths: tuple[int, ...] = (3, 2), slots: int = 4) -> dict[str, Any]:
    """Return legal operands of kda_prefill."""
    return decode(spec, sum(lengths), slots) | sequences(spec, lengths)


def verify(spec: KDASpec = SPEC, lengths: tuple[int, ...] = (3, 2), slots: int = 4) -> dict[str, Any]:
    """Return legal operands of kda_verify."""
    both = conv(spec, lengths, slots) | prefill(spec, lengths, slots)
    both["records"] = torch.zeros(4, 896, dtype=torch.uint8)
    return {name: both[name] for name in get("kda_verify").args}


def commit(spec: KDASpec = SPEC, n: int = 2, slots: int = 6) -> dict[str, Any]:
    """Return legal operands of kda_commit."""
    layer = Layer.random(spec)
    found: dict[str, Any] = {
        "conv_states": [layer.conv_pool(slots) for _ in range(spec.num_layers)],
        "states": [layer.pool(slots) for _ in range(spec.num_layers)],
        "records": [torch.zeros(4, 896, dtype=torch.uint8) for _ in range(spec.num_layers)],
        "A_logs": [layer.A_log] * spec.num_layers,
        "dt_biases": [layer.dt_bias] * spec.num_layers,
        "state_ids": ids(*range(n)),
        "accepted": ids(*[2] * n),
    }
    if spec.checkpoints:
        found |= {"checkpoint_ids": ids(*[-1] * n), "checkpoint_lens": ids(*[0] * n)}
    return found


MAKERS = {
    "kda_conv": conv,
    "kda_prefill": prefill,
    "kda_decode": decode,
    "kda_verify": verify,
    "kda_commit": commit,
}


def problems(name: str, spec: KDASpec, tensors: dict[str, Any]) -> list[str]:
    return check.problems(get(name), spec, tensors)


def values(name: str, spec: KDASpec, tensors: dict[str, Any], limits: Limits | None = LIMITS) -> list[str]:
    op: Operator = get(name)
    assert op.values is not None
    return list(op.values(spec, limits, tensors))


# ---- Spec


def test_defaults_are_the_models_numbers():
    spec = KDASpec(num_heads=K3_1_PRO.heads(8))
    assert (spec.head_dim, spec.conv_width) == (K3_1_PRO.kda_dim, K3_1_PRO.conv_width)
    assert (spec.lower_bound, spec.norm_eps) == (K3_1_PRO.gate_lower_bound, K3_1_PRO.norm_eps)
    assert spec.scale == K3_1_PRO.kda_dim**-0.5
    assert spec.channels == 3 * 12 * 128


def test_spec_survives_json():
    spec = KDASpec(num_heads=12, lower_bound=None, gate="log", num_layers=69, checkpoints=True)
    assert KDASpec.from_json(spec.key()) == spec


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 0, "KDASpec: num_heads=0 is not 1 to 128"),
        ("head_dim", 257, "KDASpec: head_dim=257 is not 1 to 256"),
        ("gate", "row", "KDASpec: gate='row' is not 'raw' | 'log'; did you mean 'raw'?"),
        ("lower_bound", -6.0, "KDASpec: lower_bound=-6.0 is not -5 to 0"),
        ("conv_width", 5, "KDASpec: conv_width=5 is not 4"),
        (
            "conv_layout",
            "channel_with",
            "KDASpec: conv_layout='channel_with' is not 'width_channel' | 'channel_width'; "
            "did you mean 'channel_width'?",
        ),
        (
            "state_dtype",
            "bfloat16",
            "KDASpec: state_dtype='bfloat16' is not 'float32'; did you mean 'float32'?",
        ),
        ("num_layers", 0, "KDASpec: num_layers=0 is not 1 to 1024"),
        ("scale", float("nan"), "KDASpec: scale=nan is not 0 to 65536"),
        ("checkpoints", 1, "KDASpec: checkpoints must be bool, got int 1"),
    ],
)
def test_illegal_fields_are_named(field: str, value: object, message: str):
    with pytest.raises(SpecError) as caught:
        KDASpec(**{"num_heads": 2, field: value})
    assert str(caught.value) == message


def test_conv_state_letters_follow_the_layout():
    wide = KDASpec(num_heads=2, head_dim=8, conv_layout="channel_width").dims()
    assert (SPEC.dims()["conv_rows"], SPEC.dims()["conv_columns"]) == (3, 48)
    assert (wide["conv_rows"], wide["conv_columns"]) == (48, 3)


def test_contract_imports_without_torch():
    code = "import sys, kimi_hal.ops.kda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "kda_conv",
            "x weight conv_state state_ids cu_seqlens has_initial_state checkpoint_offsets checkpoint_ids"
            " | step out",
        ),
        ("kda_gate", "raw_g raw_beta A_log dt_bias | g_out beta_out"),
        (
            "kda_prefill",
            "q k v raw_g raw_beta A_log dt_bias state state_ids cu_seqlens has_initial_state"
            " checkpoint_offsets checkpoint_ids | step out workspace",
        ),
        ("kda_decode", "q k v raw_g raw_beta A_log dt_bias state state_ids | out"),
        (
            "kda_verify",
            "x weight raw_g raw_beta A_log dt_bias conv_state state state_ids cu_seqlens records | step out",
        ),
        (
            "kda_commit",
            "conv_states states records A_logs dt_biases state_ids accepted out_ids checkpoint_ids"
            " checkpoint_lens |",
        ),
    ],
)
def test_signatures(name: str, parameters: str):
    listed = get(name).signature.parameters.values()
    positional, keyword = (part.split() for part in parameters.split("|"))
    assert [p.name for p in listed if p.kind is not p.KEYWORD_ONLY] == positional
    assert [p.name for p in listed if p.kind is p.KEYWORD_ONLY] == keyword


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("kda_conv", ("conv_state",)),
        ("kda_gate", ()),
        ("kda_prefill", ("state",)),
        ("kda_decode", ("state",)),
        ("kda_verify", ("records",)),
        ("kda_commit", ("conv_states", "states")),
    ],
)
def test_mutated_arguments(name: str, mutated: tuple[str, ...]):
    assert get(name).mutated == mutated


# ---- metadata


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "spec",
    [SPEC, MARKED, KDASpec(num_heads=2, head_dim=8, conv_layout="channel_width")],
    ids=["plain", "checkpoints", "channel_width"],
)
def test_legal_operands_pass(name: str, spec: KDASpec):
    tensors = MAKERS[name](spec)
    assert problems(name, spec, tensors) == []
    assert values(name, spec, tensors) == []


@pytest.mark.parametrize("name", ["kda_prefill", "kda_decode", "kda_verify"])
def test_a_finished_gate_is_float32_without_parameters(name: str):
    spec = KDASpec(num_heads=2, head_dim=8, gate="log")
    tensors = MAKERS[name](spec)
    assert problems(name, spec, tensors) == []
    wrong = MAKERS[name](SPEC)
    assert problems(name, spec, wrong) == [
        "raw_g must be float32, got bfloat16",
        "raw_beta must be float32, got bfloat16",
        "A_log is refused by this Spec",
        "dt_bias is refused by this Spec",
    ]


def test_a_raw_gate_needs_its_parameters():
    tensors = decode() | {"A_log": None, "dt_bias": None}
    assert problems("kda_decode", SPEC, tensors) == [
        "A_log is required by this Spec",
        "dt_bias is required by this Spec",
    ]


def test_a_commit_with_finished_gates_takes_no_parameters():
    spec = KDASpec(num_heads=2, head_dim=8, gate="log")
    tensors = commit(SPEC)
    assert problems("kda_commit", spec, tensors) == [
        "A_logs is refused by this Spec",
        "dt_biases is refused by this Spec",
    ]
    assert problems("kda_commit", spec, tensors | {"A_logs": None, "dt_biases": None}) == []


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("kda_conv", "checkpoint_offsets"),
        ("kda_prefill", "checkpoint_offsets"),
        ("kda_commit", "checkpoint_lens"),
    ],
)
def test_checkpoints_are_given_as_the_spec_says(name: str, offsets: str):
    wanted = sorted([offsets, "checkpoint_ids"])
    left_out, unasked = MAKERS[name](SPEC), MAKERS[name](MARKED)
    assert sorted(problems(name, MARKED, left_out)) == [f"{n} is required by this Spec" for n in wanted]
    assert sorted(problems(name, SPEC, unasked)) == [f"{n} is refused by this Spec" for n in wanted]


@pytest.mark.parametrize(
    ("field", "dtype", "message"),
    [
        ("state_ids", torch.int64, "state_ids must be int32, got int64"),
        ("cu_seqlens", torch.int64, "cu_seqlens must be int32, got int64"),
        ("state", torch.bfloat16, "state must be float32, got bfloat16"),
        ("q", torch.float32, "q must be bfloat16, got float32"),
        ("raw_g", torch.float32, "raw_g must be bfloat16, got float32"),
    ],
)
def test_dtypes_are_refused_by_name(field: str, dtype: torch.dtype, message: str):
    tensors = prefill()
    tensors[field] = tensors[field].to(dtype)
    assert problems("kda_prefill", SPEC, tensors) == [message]


def test_shapes_are_refused_by_name():
    tensors = prefill() | {"cu_seqlens": ids(0, 5), "A_log": torch.zeros(128)}
    assert problems("kda_prefill", SPEC, tensors) == [
        "A_log must be [H] with H=2, got shape [128]",
        "cu_seqlens must be [N+1] with N+1=3, got shape [2]",
    ]


def test_a_state_pool_may_have_any_stride_between_slots_and_no_other():
    tensors = decode()
    wide = torch.zeros(4, 200)[:, 8:136].view(4, 2, 8, 8)
    assert problems("kda_decode", SPEC, tensors | {"state": wide}) == []
    turned = torch.zeros(4, 2, 8, 8).transpose(-1, -2)
    assert problems("kda_decode", SPEC, tensors | {"state": turned}) == [
        "state must be contiguous in all but its first dimension, got strides [128, 64, 1, 8]"
    ]


def test_views_of_the_convolutions_output_pass_without_a_copy():
    y = torch.zeros(3, 48).bfloat16()
    q, k, v = y.view(3, 3, 2, 8).unbind(1)
    assert problems("kda_decode", SPEC, decode() | {"q": q, "k": k, "v": v}) == []


def test_beta_rows_may_have_any_alignment():
    beta = torch.zeros(3, 7).bfloat16()[:, 1:3]
    assert problems("kda_decode", SPEC, decode() | {"raw_beta": beta}) == []


def test_a_conv_state_may_be_a_view_of_a_wider_one():
    wide = torch.zeros(4, 10, 48).bfloat16()
    assert problems("kda_conv", SPEC, conv() | {"conv_state": wide[:, :3]}) == []
    assert problems("kda_conv", SPEC, conv() | {"conv_state": wide}) == [
        "conv_state must be [slots conv_rows conv_columns] with conv_rows=3, got shape [4, 10, 48]"
    ]
    by_channel = KDASpec(num_heads=2, head_dim=8, conv_layout="channel_width")
    turned = torch.zeros(4, 48, 10).bfloat16()[..., :3]
    assert problems("kda_conv", by_channel, conv(by_channel) | {"conv_state": turned}) == []


def test_records_may_have_more_rows_than_there_are_sequences_and_not_fewer():
    tensors = verify()
    assert tensors["records"].shape[0] > tensors["state_ids"].shape[0]
    assert problems("kda_verify", SPEC, tensors | {"records": torch.zeros(1, 896, dtype=torch.uint8)}) == [
        "records must be [>=N record_bytes] with N=2, got shape [1, 896]"
    ]


def test_a_commit_that_is_a_layer_short_is_refused():
    spec = KDASpec(num_heads=2, head_dim=8, num_layers=3)
    tensors = commit(spec)
    tensors["states"] = tensors["states"][:2]
    assert problems("kda_commit", spec, tensors) == ["states must be 3 tensors (layers), got 2"]


def test_every_layer_of_a_commit_is_checked():
    spec = KDASpec(num_heads=2, head_dim=8, num_layers=2)
    tensors = commit(spec)
    tensors["states"] = [tensors["states"][0], tensors["states"][1].double()]
    assert problems("kda_commit", spec, tensors) == ["states[1] must be float32, got float64"]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("kda_conv", [("out", (5, 48), "bfloat16")]),
        ("kda_prefill", [("out", (5, 2, 8), "bfloat16")]),
        ("kda_decode", [("out", (3, 2, 8), "bfloat16")]),
        ("kda_verify", [("out", (5, 2, 8), "bfloat16")]),
        ("kda_commit", []),
    ],
)
def test_output_shapes(name: str, shapes: list[tuple[str, tuple[int, ...], str]]):
    found = output_shapes(get(name), SPEC, LIMITS, MAKERS[name](SPEC))
    assert [(o.keyword, o.shape, o.dtype) for o in found] == shapes


def test_a_gate_is_finished_in_float32():
    tensors = {n: decode()[n] for n in ("raw_g", "raw_beta", "A_log", "dt_bias")}
    assert problems("kda_gate", SPEC, tensors) == []
    found = output_shapes(get("kda_gate"), SPEC, None, tensors)
    assert [(o.keyword, o.shape, o.dtype) for o in found] == [
        ("g_out", (3, 2, 8), "float32"),
        ("beta_out", (3, 2), "float32"),
    ]


# ---- values, in checked mode

SEQUENCED = ["kda_conv", "kda_prefill", "kda_verify"]


@pytest.mark.parametrize("name", SEQUENCED)
@pytest.mark.parametrize(
    ("bounds", "messages"),
    [
        ((1, 3, 5), ["cu_seqlens must start at 0, got 1"]),
        ((0, 4, 3), ["cu_seqlens decreases from 4 to 3 at sequence 1"]),
        ((0, 3, 6), ["cu_seqlens ends at 6, beyond the 5 rows"]),
        ((0, 3, 3), []),
        ((0, 0, 4), []),
    ],
    ids=str,
)
def test_cuts(name: str, bounds: tuple[int, ...], messages: list[str]):
    assert values(name, SPEC, MAKERS[name](SPEC) | {"cu_seqlens": ids(*bounds)}) == messages


@pytest.mark.parametrize("name", SEQUENCED)
def test_a_slot_named_by_two_live_sequences(name: str):
    tensors = MAKERS[name](SPEC) | {"state_ids": ids(2, 2)}
    assert values(name, SPEC, tensors) == ["state_ids names slot 2 in two live rows"]


@pytest.mark.parametrize("name", SEQUENCED)
def test_an_empty_sequence_may_name_a_live_slot(name: str):
    tensors = MAKERS[name](SPEC) | {"state_ids": ids(2, 2), "cu_seqlens": ids(0, 3, 3)}
    assert values(name, SPEC, tensors) == []


@pytest.mark.parametrize("name", [*SEQUENCED, "kda_decode"])
def test_a_slot_beyond_the_pool(name: str):
    tensors = MAKERS[name](SPEC)
    tensors["state_ids"] = tensors["state_ids"].clone()
    tensors["state_ids"][1] = 4
    assert values(name, SPEC, tensors) == ["state_ids holds 4, beyond the pool's 4 slots"]


def test_a_slot_named_by_two_live_rows():
    assert values("kda_decode", SPEC, decode() | {"state_ids": ids(1, 3, 1)}) == [
        "state_ids names slot 1 in two live rows"
    ]


def test_padding_rows_may_repeat_every_negative_number():
    assert values("kda_decode", SPEC, decode() | {"state_ids": ids(-1, -1, -5)}) == []


@pytest.mark.parametrize("name", ["kda_conv", "kda_prefill"])
@pytest.mark.parametrize(
    ("offsets", "slots", "messages"),
    [
        ((3, 2), (2, 3), []),
        ((4, 0), (2, -1), ["checkpoint_offsets holds 4 for sequence 0, which has 3 rows"]),
        ((0, -1), (-1, 3), ["checkpoint_offsets holds -1 for sequence 1, which has 2 rows"]),
        ((9, 9), (-1, -1), []),
        ((1, 1), (2, 2), ["checkpoint_ids names slot 2, which this call writes for another purpose"]),
        ((1, 1), (1, -1), ["checkpoint_ids names slot 1, which this call writes for another purpose"]),
        ((1, 1), (4, -1), ["checkpoint_ids holds 4, beyond the pool's 4 slots"]),
    ],
    ids=str,
)
def test_checkpoints(name: str, offsets: tuple[int, ...], slots: tuple[int, ...], messages: list[str]):
    marks = {"checkpoint_offsets": ids(*offsets), "checkpoint_ids": ids(*slots)}
    assert values(name, MARKED, MAKERS[name](MARKED) | marks) == messages


def test_a_padding_sequence_stores_no_checkpoint_and_none_is_asked_about():
    marks = {"checkpoint_offsets": ids(99, 0), "checkpoint_ids": ids(2, -1), "state_ids": ids(-1, 1)}
    assert values("kda_prefill", MARKED, prefill(MARKED) | marks) == []


def test_a_verify_of_more_rows_than_planned():
    tensors = verify(lengths=(5, 2))
    assert values("kda_verify", SPEC, tensors) == [
        "cu_seqlens gives a sequence 5 rows, beyond rows_per_req=4"
    ]
    assert values("kda_verify", SPEC, tensors, limits=None) == []


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"accepted": ids(5, 0)}, ["accepted holds 5, beyond rows_per_req=4"]),
        ({"accepted": ids(-3, 0), "state_ids": ids(1, 1)}, []),
        ({"state_ids": ids(1, 1)}, ["state_ids names slot 1 in two live rows"]),
        ({"state_ids": ids(1, 6)}, ["state_ids holds 6, beyond the pool's 6 slots"]),
        ({"out_ids": ids(4, 5)}, []),
        ({"out_ids": ids(4, -1)}, []),
        ({"out_ids": ids(4, 4)}, ["out_ids names slot 4 in two live rows"]),
        ({"out_ids": ids(1, 5)}, ["out_ids names slot 1, the state of live row 1"]),
        ({"out_ids": ids(6, 5)}, ["out_ids holds 6, beyond the pool's 6 slots"]),
    ],
    ids=str,
)
def test_commit_values(change: dict[str, torch.Tensor], messages: list[str]):
    assert values("kda_commit", SPEC, commit() | change) == messages


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"checkpoint_ids": ids(4, 5), "checkpoint_lens": ids(2, 0)}, []),
        (
            {"checkpoint_ids": ids(4, -1), "checkpoint_lens": ids(3, 3)},
            ["checkpoint_lens holds 3 for sequence 0, which has 2 rows"],
        ),
        ({"checkpoint_ids": ids(0, -1), "out_ids": ids(4, 5)}, []),
        (
            {"checkpoint_ids": ids(0, -1)},
            ["checkpoint_ids names slot 0, which this call writes for another purpose"],
        ),
        (
            {"checkpoint_ids": ids(1, -1), "out_ids": ids(4, 5)},
            ["checkpoint_ids names slot 1, the state of live row 1"],
        ),
        ({"checkpoint_ids": ids(4, 4), "accepted": ids(2, 0)}, []),
    ],
    ids=str,
)
def test_commit_checkpoints(change: dict[str, torch.Tensor], messages: list[str]):
    assert values("kda_commit", MARKED, commit(MARKED) | change) == messages


def test_an_output_must_not_overlap_an_input():
    tensors = conv()
    assert values("kda_conv", SPEC, tensors | {"out": tensors["x"]}) == ["out overlaps x"]
    buffer = torch.zeros(6, 2, 8).bfloat16()
    tensors = prefill() | {"q": buffer[:5], "out": buffer[1:]}
    assert values("kda_prefill", SPEC, tensors) == ["out overlaps q"]


def test_a_mutated_pool_must_not_overlap_an_input():
    memory = torch.zeros(4 * 3 * 48).bfloat16()
    tensors = conv() | {"conv_state": memory.view(4, 3, 48), "x": memory[:240].view(5, 48)}
    assert values("kda_conv", SPEC, tensors) == ["conv_state overlaps x"]


def test_pools_that_interleave_in_one_buffer_do_not_overlap():
    buffer = torch.zeros(4, 1024, dtype=torch.uint8)
    state = buffer[:, :512].view(torch.float32).view(4, 2, 8, 8)
    conv_state = buffer[:, 512:800].view(torch.bfloat16).view(4, 3, 48)
    tensors = verify() | {"state": state, "conv_state": conv_state}
    assert problems("kda_verify", SPEC, tensors) == []
    assert values("kda_verify", SPEC, tensors) == []


def test_has_initial_state_is_bool():
    tensors = prefill() | {"has_initial_state": flags(True, False)}
    assert problems("kda_prefill", SPEC, tensors) == []
    assert problems("kda_prefill", SPEC, tensors | {"has_initial_state": ids(1, 0)}) == [
        "has_initial_state must be bool, got int32"
    ]
