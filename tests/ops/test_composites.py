from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from composite_cases import DSACase, KDACase, MoECase

from kimi_hal import specs
from kimi_hal.errors import SpecError, UnknownNameError
from kimi_hal.ops import OPERATORS, dsa_decode, get, kda_layer_decode, moe_layer
from kimi_hal.ops.check import problems
from kimi_hal.ops.composites import DSASpec, MoELayerSpec, part_specs
from kimi_hal.ops.operator import Operator, output_shapes
from kimi_hal.ops.spec import DCP, Spec

ONE, FOUR = DCP(), DCP(world=4, rank=2)
REPLICATED = DCP(world=4, rank=2, index="replicated")


def changed(ranks: DCP, part: str, **fields: Any) -> str:
    """Change fields of one part of a good Spec and return the sentence against the whole."""
    spec = DSACase().spec(ranks)
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})
    return str(caught.value)


def wrong_values(op: Operator, spec: Spec, given: dict[str, Any]) -> list[str]:
    assert op.values is not None
    everything = {name: given.get(name) for name in op.signature.parameters}
    return list(op.values(spec, None, everything))


# --- DSASpec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dcp", "part", "fields", "reason"),
    [
        (ONE, "query", {"num_heads": 8}, "query.num_heads=8 is not indexer.num_heads=3"),
        (
            ONE,
            "query",
            {"index": "index.mxfp4.page64"},
            "query.index='index.mxfp4.page64' is not indexer.index='index.fp8.e4m3fn.pow2.page64'",
        ),
        (ONE, "query", {"weights_dtype": "bfloat16"},
         "query.weights_dtype='bfloat16' is not indexer.weights_dtype='float32'"),
        (ONE, "attn", {"topk": 32}, "indexer.topk=16 is not attn.topk=32"),
        (ONE, "attn", {"index_space": "slot"},
         "attn.index_space='slot': the selection is of global positions; use 'position'"),
        (ONE, "attn", {"has_index_len": True},
         "attn.has_index_len=True: a selection ends with its first -1; use False"),
        (ONE, "indexer", {"emit": "slot"},
         "indexer.emit='slot': dsa_decode translates positions itself; use 'local'"),
        (FOUR, "attn", {"num_heads": 6}, "attn.num_heads=6 is not a multiple of dcp.world=4"),
        (FOUR, "attn", {"return_lse": False},
         "attn.return_lse=False: over a group the parts are merged by their LSE; use True"),
        (FOUR, "attn", {"index_space": "position"},
         "attn.index_space='position': the merge gives local positions; use 'local'"),
        (FOUR, "attn", {"has_index_len": False},
         "attn.has_index_len=False: the merge counts this rank's winners; use True"),
        (FOUR, "indexer", {"return_selected": False},
         "indexer.return_selected=False: the merge takes the selected scores; use True"),
        (FOUR, "merge", {"topk": 8}, "indexer.topk=16 is not merge.topk=8"),
        (FOUR, "merge", {"score": "bfloat16"}, "indexer.score='float32' is not merge.score='bfloat16'"),
        (REPLICATED, "attn", {"index_space": "local"},
         "attn.index_space='local': the selection is of global positions; use 'position'"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(dcp: DCP, part: str, fields: dict[str, Any], reason: str) -> None:
    assert changed(dcp, part, **fields) == f"DSASpec: {reason}"


def test_ranks_must_be_the_same_in_every_part() -> None:
    reason = changed(FOUR, "merge", dcp=DCP())
    assert reason.startswith("DSASpec: attn.dcp=DCP(world=4, rank=2, ")
    assert ") is not merge.dcp=DCP(world=1, rank=0, " in reason


def test_a_merge_is_given_exactly_where_index_keys_are_sharded() -> None:
    four, one = DSACase().spec(FOUR), DSACase().spec()
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(four, merge=None)
    assert str(caught.value) == "DSASpec: merge is missing: dcp.world=4 shards the index keys"
    for spec in (one, DSACase().spec(REPLICATED)):
        with pytest.raises(SpecError) as caught:
            dataclasses.replace(spec, merge=four.merge)
        reason = "DSASpec: merge is given, but every rank selects from all index keys: leave it out"
        assert str(caught.value) == reason


def test_an_unknown_exchange_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"head_exchange='a2' is not 'a2a' \| 'ag_rs'; did you mean 'a2a'"):
        DSACase().spec(head_exchange="a2")


@pytest.mark.parametrize("dcp", [ONE, FOUR, REPLICATED])
def test_dsa_specs_survive_json(dcp: DCP) -> None:
    spec = DSACase().spec(dcp)
    assert DSASpec.from_json(spec.key()) == spec


def test_heads_of_a_call_are_those_of_this_rank() -> None:
    case = DSACase(heads=8, out_dtype="bfloat16")
    spec, given = case.spec(FOUR), case.operands(FOUR)
    assert given["q"].shape[1] == spec.heads == 2
    out, lse = output_shapes(dsa_decode, spec, None, given)
    assert (out.shape, out.dtype, lse.shape) == ((6, 2, 512), "bfloat16", (6, 2))
    assert problems(dsa_decode, spec, given) == []
    given["q"] = case.q
    assert problems(dsa_decode, spec, given) == ["q must be [T H D] with H=2, got shape [6, 8, 576]"]


# --- values of dsa_decode -------------------------------------------------------------------------------


@pytest.mark.parametrize("dcp", [ONE, FOUR, REPLICATED])
def test_good_values_pass_and_padded_rows_are_not_read(dcp: DCP) -> None:
    case = DSACase()
    assert wrong_values(dsa_decode, case.spec(dcp), case.operands(dcp)) == []


def test_values_out_of_range_are_errors_in_checked_mode() -> None:
    case = DSACase()
    given = case.operands()
    given["latent_table"] = given["latent_table"].clone()
    given["index_table"] = given["index_table"].clone()
    given["row_req"], given["row_len"] = given["row_req"].clone(), given["row_len"].clone()
    given["row_len"][:2] = torch.tensor([10_000, -5])
    given["row_req"][3] = 3
    given["index_table"][0, 0] = 77
    assert wrong_values(dsa_decode, case.spec(), given) == [
        "row_len holds -5, below 0",
        "row_len asks for 10000 keys on this rank, beyond latent_table's tokens (224)",
        "row_len asks for 10000 keys on this rank, beyond index_table's tokens (320)",
        "index_table holds 77, beyond the cache's pages (7)",
        "row_req holds 3, beyond 2",
    ]


# --- the other composites ----------------------------------------------------------------------------------


def test_kda_states_are_checked() -> None:
    case = KDACase()
    given = case.operands()
    assert problems(kda_layer_decode, case.spec, given) == []
    assert wrong_values(kda_layer_decode, case.spec, given) == []
    given["state_ids"] = torch.tensor([2, 6, 2], dtype=torch.int32)
    found = wrong_values(kda_layer_decode, case.spec, given)
    assert len(found) == 2
    assert all("state_ids" in reason for reason in found)


def test_interleaved_state_views_of_one_buffer_are_apart() -> None:
    case = KDACase()
    given = case.operands()
    pool = torch.zeros(case.slots, 3 * case.spec.channels * 2 + case.heads * 128 * 128 * 4, dtype=torch.uint8)
    cut = 3 * case.spec.channels * 2
    given["conv_state"] = pool[:, :cut].view(torch.bfloat16).view(case.slots, 3, -1)
    given["state"] = pool[:, cut:].view(torch.float32).view(case.slots, case.heads, 128, 128)
    assert problems(kda_layer_decode, case.spec, given) == []
    assert wrong_values(kda_layer_decode, case.spec, given) == []
    given["conv_state"] = pool[:, 2 : cut + 2].view(torch.bfloat16).view(case.slots, 3, -1)
    assert wrong_values(kda_layer_decode, case.spec, given) == ["conv_state overlaps state"]


@pytest.mark.parametrize(
    ("part", "fields", "reason"),
    [
        ("route", {"num_experts": 7}, "route.num_experts=7 is not experts.num_experts=6"),
        ("route", {"topk": 3}, "route.topk=3 is not experts.topk=2"),
        ("experts", {"num_local": 4}, "tp=1, but 2 of 6 experts are on other ranks"),
        ("experts", {"has_expert_map": True},
         "experts.has_expert_map=True: moe_layer takes no map; use expert_offset and num_local"),
    ],
)  # fmt: skip
def test_moe_parts_that_do_not_fit_are_refused(part: str, fields: dict[str, Any], reason: str) -> None:
    spec = MoECase().spec()
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})
    assert str(caught.value) == f"MoELayerSpec: {reason}"


def test_shared_experts_are_cut_evenly() -> None:
    with pytest.raises(SpecError, match="shared_intermediate=32 is not a multiple of tp=3"):
        dataclasses.replace(MoECase().spec(), tp=3)


def test_moe_specs_survive_json() -> None:
    spec = MoECase().spec(2, 1, "experts")
    assert MoELayerSpec.from_json(spec.key()) == spec


def test_moe_token_counts_are_checked() -> None:
    case = MoECase()
    given = {"x": case.x, "weights": list(case.weights().values()), "num_tokens": torch.tensor([6]).int()}
    assert problems(moe_layer, case.spec(), given) == []
    assert wrong_values(moe_layer, case.spec(), given) == ["num_tokens holds 6, beyond 5"]


# --- the list of what there is ------------------------------------------------------------------------------


def test_an_unknown_composite_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'dsa_decode'"):
        part_specs("dsa_decod", None)


def test_parts_are_operators_and_every_part_spec_is_theirs() -> None:
    given = {
        "dsa_decode": DSACase().spec(FOUR),
        "kda_layer_decode": KDACase().spec,
        "moe_layer": MoECase().spec(),
    }
    assert {name for name, op in OPERATORS.items() if op.composite} == set(given)
    for name, spec in given.items():
        parts = part_specs(name, spec)
        assert tuple(parts) == get(name).parts
        assert all(type(part.spec) is get(part.operator).spec_type for part in parts.values())


def test_specs_names_every_spec() -> None:
    taken = {op.spec_type for op in OPERATORS.values()}
    assert {spec.__name__ for spec in taken} <= set(specs.__all__)
    assert all(getattr(specs, name).__name__ == name for name in specs.__all__)
