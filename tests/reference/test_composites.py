from __future__ import annotations

from typing import Any

import pytest
import torch
from composite_cases import DSACase, KDACase, MoECase
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal.reference import composites, indexer, kda, moe, sparse_mla

F64 = torch.float64
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


# --- dsa_decode -----------------------------------------------------------------------------------------


def dsa(case: DSACase, world: int, interleave: int = 1, index: str = "sharded", **fields: Any) -> Any:
    """Run every rank; return out and lse of all heads."""

    def rank(group: LoopbackGroup) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave, index=index)
        spec = case.spec(dcp, **fields)
        return composites.dsa_decode(spec, **case.operands(dcp), dtype=F64, group=group)

    outs, lses = zip(*LoopbackGroup.run(world, rank), strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def test_dsa_decode_is_its_parts_in_order() -> None:
    case = DSACase()
    spec, t = case.spec(), case.operands()
    quantised = indexer.quantize_index_query(spec.query, t["index_q"], t["index_w"], dtype=F64)
    rows = (t["row_req"], t["row_len"])
    indices, _ = indexer.indexer_topk(
        spec.indexer, *quantised, t["index_cache"], t["index_table"], *rows, dtype=F64
    )
    expected = sparse_mla.sparse_mla(
        spec.attn,
        t["q"],
        t["latent_cache"],
        indices,
        t["k_scale"],
        block_table=t["latent_table"],
        row_req=t["row_req"],
        dtype=F64,
    )
    out, lse = composites.dsa_decode(spec, **t, dtype=F64)
    assert out.equal(expected[0])
    assert lse.equal(expected[1])
    assert out.isfinite().all()  # nothing of the poison around the keys
    assert out[4].count_nonzero() == 0  # a padded row, whose request does not exist
    assert (lse[4] == -torch.inf).all()
    assert (lse[[0, 1, 2, 3, 5]] > -torch.inf).all()


@pytest.mark.parametrize("protocol", ["full", "compact", "scores_only"])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 1), (4, 16), (4, 64)])
def test_any_number_of_ranks_gives_the_answer_of_one(world: int, interleave: int, protocol: str) -> None:
    case = DSACase(score="bfloat16")
    expected = composites.dsa_decode(case.spec(), **case.operands(), dtype=F64)
    got = dsa(case, world, interleave, protocol=protocol)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("index", ["index.mxfp4.page64", "index.fp8.e4m3fnuz.f32.shuffled.page64"])
@pytest.mark.parametrize("latent", ["latent.nvfp4.352", "latent.flashmla.656", "latent.bf16"])
def test_ranks_agree_with_one_in_other_formats(index: str, latent: str) -> None:
    case = DSACase(index=index, latent=latent)
    expected = composites.dsa_decode(case.spec(), **case.operands(), dtype=F64)
    torch.testing.assert_close(dsa(case, 2), expected, **CLOSE)


def test_gathering_whole_parts_gives_the_bits_of_the_exchange() -> None:
    case = DSACase()
    by_exchange, by_gather = dsa(case, 4), dsa(case, 4, head_exchange="ag_rs")
    assert by_gather[0].equal(by_exchange[0])
    assert by_gather[1].equal(by_exchange[1])


@pytest.mark.parametrize("world", [2, 4])
def test_replicated_index_keys_need_no_merge(world: int) -> None:
    case = DSACase()
    expected = composites.dsa_decode(case.spec(), **case.operands(), dtype=F64)
    torch.testing.assert_close(dsa(case, world, index="replicated"), expected, **CLOSE)


def test_more_keys_than_topk_and_a_row_shorter_than_the_group() -> None:
    case = DSACase(lengths=(3, 64), rows=((0, 3), (0, 1), (1, 64), (1, 2)), topk=4)
    expected = composites.dsa_decode(case.spec(), **case.operands(), dtype=F64)
    torch.testing.assert_close(dsa(case, 4), expected, **CLOSE)


def test_float32_is_close_to_float64() -> None:
    case = DSACase()
    out, lse = composites.dsa_decode(case.spec(), **case.operands())
    oracle = composites.dsa_decode(case.spec(), **case.operands(), dtype=F64)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), oracle[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), oracle[1], rtol=1e-6, atol=1e-6)


def test_bits_of_a_row_depend_on_no_other_row() -> None:
    lengths = (200, 1, 77)
    case = DSACase(lengths, rows=tuple((row % 3, min(1 + 7 * row, lengths[row % 3])) for row in range(20)))
    out, lse = composites.dsa_decode(case.spec(), **case.operands())
    by_row = ("q", "index_q", "index_w", "row_req", "row_len")
    for row in (0, 7, 19):
        given = {name: t[row : row + 1] if name in by_row else t for name, t in case.operands().items()}
        alone = composites.dsa_decode(case.spec(), **given)
        assert alone[0][0].equal(out[row])
        assert alone[1][0].equal(lse[row])


@pytest.mark.parametrize("world", [1, 2])
def test_dsa_decode_in_pieces_is_the_call_in_one(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = DSACase()
    expected = dsa(case, world)
    monkeypatch.setattr(composites, "ATTENTION_ROWS", 2)
    got = dsa(case, world)
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


@pytest.mark.parametrize("world", [1, 2])
def test_dsa_decode_of_no_rows(world: int) -> None:
    out, lse = dsa(DSACase(rows=()), world)
    assert out.shape == (0, 4, 512)
    assert lse.shape == (0, 4)


def test_ranks_without_a_group_are_refused() -> None:
    case, dcp = DSACase(), DCP(world=2)
    with pytest.raises(GroupError, match=r"dcp\.world=2 needs a group"):
        composites.dsa_decode(case.spec(dcp), **case.operands(dcp))


# --- kda_layer_decode -----------------------------------------------------------------------------------


def kda_by_hand(case: KDACase, t: dict[str, Any]) -> Tensor:
    """Convolve, decode and norm with the operators themselves, row by row."""
    spec, (conv, *gate, norm) = case.spec, t["weights"]
    results = []
    for row in range(case.rows):
        one = slice(row, row + 1)
        cuts = torch.tensor([0, 1], dtype=torch.int32)
        y = kda.kda_conv(spec, t["x"][one], conv, t["conv_state"], t["state_ids"][one], cuts, dtype=F64)
        q, k, v = (part.view(1, case.heads, 128) for part in y.bfloat16().chunk(3, dim=1))
        g = (t["raw_g"][one], t["raw_beta"][one], *(gate or (None, None)))
        o = kda.kda_decode(spec, q, k, v, *g, t["state"], t["state_ids"][one], dtype=F64)
        mean = o.square().mean(dim=-1, keepdim=True)
        normed = o / torch.sqrt(mean + spec.norm_eps) * norm.double()
        results.append(normed * torch.sigmoid(t["out_gate"][one].double()))
    return torch.cat(results)


@pytest.mark.parametrize("conv_layout", ["width_channel", "channel_width"])
@pytest.mark.parametrize("gate", ["raw", "log"])
def test_kda_layer_decode_is_its_operators_row_by_row(gate: str, conv_layout: str) -> None:
    case = KDACase(gate=gate, conv_layout=conv_layout)
    t, by_hand = case.operands(), case.operands()
    o = composites.kda_layer_decode(case.spec, **t, dtype=F64)
    torch.testing.assert_close(o, kda_by_hand(case, by_hand), **CLOSE)
    assert t["conv_state"].equal(by_hand["conv_state"])
    assert t["state"].equal(by_hand["state"])


def test_strangers_states_keep_their_bits() -> None:
    case = KDACase(rows=2)
    t, before = case.operands(), case.operands()
    composites.kda_layer_decode(case.spec, **t)
    others = [slot for slot in range(case.slots) if slot not in t["state_ids"]]
    for name in ("conv_state", "state"):
        assert t[name][others].equal(before[name][others])
        assert not t[name][t["state_ids"].long()].equal(before[name][t["state_ids"].long()])


@pytest.mark.parametrize("bad", [-1, -7, 6, 2**31 - 1])
def test_a_row_without_a_state_is_zero_whatever_it_holds(bad: int) -> None:
    case = KDACase()
    t, whole = case.operands(), case.operands()
    t["state_ids"][1] = bad
    for name in ("x", "raw_g", "raw_beta", "out_gate"):
        t[name][1] = torch.nan
    o = composites.kda_layer_decode(case.spec, **t)
    expected = composites.kda_layer_decode(case.spec, **whole)
    assert o[1].count_nonzero() == 0
    assert o[[0, 2]].equal(expected[[0, 2]])


def test_bits_of_a_kda_row_depend_on_no_other_row() -> None:
    case = KDACase(rows=6)
    o = composites.kda_layer_decode(case.spec, **case.operands())
    for row in (0, 3, 5):
        t = case.operands()
        for name in ("x", "raw_g", "raw_beta", "out_gate", "state_ids"):
            t[name] = t[name][row : row + 1]
        assert composites.kda_layer_decode(case.spec, **t)[0].equal(o[row])


def test_kda_rows_in_pieces_are_the_rows_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = KDACase(rows=5)
    t, pieces = case.operands(), case.operands()
    expected = composites.kda_layer_decode(case.spec, **t)
    monkeypatch.setattr(composites, "KDA_ROWS", 2)
    assert composites.kda_layer_decode(case.spec, **pieces).equal(expected)
    assert pieces["state"].equal(t["state"])


def test_kda_float32_is_close_to_float64() -> None:
    case = KDACase()
    o = composites.kda_layer_decode(case.spec, **case.operands())
    oracle = composites.kda_layer_decode(case.spec, **case.operands(), dtype=F64)
    torch.testing.assert_close(o.double(), oracle, rtol=1e-4, atol=1e-5)


# --- moe_layer ------------------------------------------------------------------------------------------


def moe_rank(case: MoECase, x: Tensor, tp: int, rank: int, cut: str, **given: Any) -> Tensor:
    weights = list(case.weights(tp, rank, cut).values())
    return composites.moe_layer(case.spec(tp, rank, cut), x, weights, **{"dtype": F64, **given})


def moe_by_hand(case: MoECase, x: Tensor) -> Tensor:
    """Compute the layer expert by expert in float64."""
    t = {name: tensor.double() for name, tensor in case.dense.items()}
    packed = list(case.packed.values())
    spec, x = case.spec(), x.double()
    weights, ids = moe.moe_route(spec.route, (x @ t["gate"].T).float(), case.dense["bias"], dtype=F64)
    w13, w2 = (
        moe.formats.experts("experts.mxfp4-pack").decode(*pair, F64) for pair in (packed[:2], packed[2:])
    )
    z = x @ t["down"].T

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    y = torch.zeros(len(x), case.hidden, dtype=F64)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            gate, up = (w13[expert] @ z[row]).chunk(2)
            y[row] += weight * (w2[expert] @ situ(gate, up))
    y = y / torch.sqrt(y.square().mean(dim=-1, keepdim=True) + 1e-5) * t["norm"]
    gate, up = (x @ t["shared_w13"].T).chunk(2, dim=-1)
    return y @ t["up"].T + situ(gate, up) @ t["shared_w2"].T


def test_moe_layer_is_its_formula() -> None:
    case = MoECase()
    y = moe_rank(case, case.x, 1, 0, "columns")
    torch.testing.assert_close(y, moe_by_hand(case, case.x), rtol=1e-6, atol=1e-6)  # the route's float32


@pytest.mark.parametrize("cut", ["columns", "experts"])
@pytest.mark.parametrize("tp", [2, 4])
def test_any_number_of_ranks_adds_up_to_one(tp: int, cut: str) -> None:
    case = MoECase(experts=8)
    expected = moe_rank(case, case.x, 1, 0, cut)

    def rank(group: LoopbackGroup) -> Tensor:
        return moe_rank(case, case.x, tp, group.rank(), cut, group=group)

    results = LoopbackGroup.run(tp, rank)
    for result in results:
        torch.testing.assert_close(result, expected, **CLOSE)
        assert result.equal(results[0])  # the same bits on every rank


@pytest.mark.parametrize("live", [0, 1, 3, 5, 9, -2])
def test_padded_rows_are_zero_whatever_they_hold(live: int) -> None:
    case = MoECase()
    x = case.x.clone()
    kept = min(max(live, 0), case.rows)
    x[kept:] = torch.nan
    y = moe_rank(case, x, 1, 0, "columns", num_tokens=torch.tensor([live], dtype=torch.int32))
    assert y[kept:].count_nonzero() == 0
    torch.testing.assert_close(y[:kept], moe_rank(case, case.x[:kept], 1, 0, "columns"), **CLOSE)


def test_moe_rows_in_pieces_are_the_rows_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MoECase(rows=7)
    count = torch.tensor([6], dtype=torch.int32)
    expected = moe_rank(case, case.x, 1, 0, "columns", num_tokens=count)
    monkeypatch.setattr(composites, "MOE_ROWS", 4)
    got = moe_rank(case, case.x, 1, 0, "columns", num_tokens=count)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert got[6].count_nonzero() == 0


def test_a_layer_without_shared_experts_and_a_call_without_rows() -> None:
    case = MoECase(shared=0)
    assert moe_rank(case, case.x, 1, 0, "columns").isfinite().all()
    assert moe_rank(case, case.x[:0], 1, 0, "columns").shape == (0, case.width)


def test_moe_float32_is_close_to_float64() -> None:
    case = MoECase()
    y = moe_rank(case, case.x, 1, 0, "columns", dtype=torch.float32)
    oracle = moe_rank(case, case.x, 1, 0, "columns")
    torch.testing.assert_close(y.double(), oracle, rtol=1e-4, atol=1e-5)


def test_ranks_that_share_experts_need_a_group_of_their_size() -> None:
    case = MoECase()
    with pytest.raises(GroupError, match=r"tp=2 needs a group"):
        moe_rank(case, case.x, 2, 0, "columns")
    with pytest.raises(GroupError, match=r"the Spec is for tp=2, the group has 3 ranks"):
        LoopbackGroup.run(3, lambda group: moe_rank(case, case.x, 2, 0, "columns", group=group))
