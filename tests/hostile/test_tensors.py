"""Hostile tensors: parameters, expanded views, what is no tensor at all."""

from __future__ import annotations

import pytest
import torch

import kimi_hal as hal
from kimi_hal.errors import ContractError
from kimi_hal.ops import values
from kimi_hal.specs import GatherSpec, KDASpec, Limits, StoreIndexSpec, TopKSpec

LIMITS = Limits(max_rows=8, max_reqs=8)
KDA = KDASpec(num_heads=1, head_dim=4)


def decode_operands(rows: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = torch.randn(4, rows, 1, 4, generator=draw).bfloat16()
    return {
        "q": q,
        "k": k,
        "v": v,
        "raw_g": g,
        "raw_beta": torch.randn(rows, 1, generator=draw).bfloat16(),
        "A_log": torch.randn(1, generator=draw),
        "dt_bias": torch.randn(4, generator=draw),
        "state": torch.randn(3, 1, 4, 4, generator=draw),
        "state_ids": torch.arange(rows, dtype=torch.int32),
    }


def test_parameters_leave_no_graph_in_a_state_that_is_written():
    plan = hal.plan("kda_decode", KDA, LIMITS, device="cpu")
    plain, given = decode_operands(), decode_operands()
    given["A_log"] = torch.nn.Parameter(given["A_log"])
    out = plan.run(**given)
    assert torch.equal(out, plan.run(**plain))
    assert torch.equal(given["state"], plain["state"])
    assert not out.requires_grad
    assert not given["state"].requires_grad


def test_a_state_that_requires_grad_is_written():
    plan = hal.plan("kda_decode", KDA, LIMITS, device="cpu")
    plain, given = decode_operands(), decode_operands()
    given["state"].requires_grad_()
    assert torch.equal(plan.run(**given), plan.run(**plain))
    assert torch.equal(given["state"], plain["state"])


def test_a_callers_output_gets_no_graph():
    plan = hal.plan("topk_select", TopKSpec(topk=2, return_selected=True), LIMITS, device="cpu")
    scores = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    out, selected = torch.empty(1, 2, dtype=torch.int32), torch.empty(1, 2)
    plan.run(scores, torch.tensor([3], dtype=torch.int32), out=out, scores_out=selected)
    assert not selected.requires_grad
    assert out.tolist() == [[1, 2]]


def test_bind_refuses_a_state_whose_slots_are_one():
    plan = hal.plan("kda_decode", KDA, LIMITS, device="cpu")
    given = decode_operands()
    given["state"] = given["state"][:1].expand(3, 1, 4, 4)
    with pytest.raises(ContractError) as error:
        plan.bind(**given)
    assert error.value.reasons == (
        "state is written and its elements share memory, got strides [0, 16, 4, 1]",
    )


def test_bind_refuses_an_expanded_output_and_a_cache_of_overlapping_pages():
    select = hal.plan("topk_select", TopKSpec(topk=2), LIMITS, device="cpu")
    out = torch.empty(1, 2, dtype=torch.int32).expand(2, 2)
    with pytest.raises(
        ContractError, match=r"out is written and its elements share memory, got strides \[0, 1\]"
    ):
        select.bind(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), out=out)
    store = hal.plan("store_index_keys", StoreIndexSpec(index="index.mxfp4.page64"), LIMITS, device="cpu")
    page = 64 * 68
    cache = torch.zeros(2 * page, dtype=torch.uint8).as_strided((2, page), (page - 1, 1))
    with pytest.raises(ContractError, match="cache is written and its elements share memory"):
        store.bind(torch.zeros(1, 128), torch.zeros(1, dtype=torch.int64), cache)


@pytest.mark.parametrize(
    ("shape", "stride", "shared"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 0), False),
        ((3, 4), (3, 1), True),
        ((2, 3), (3, 2), False),  # 0 2 4 and 3 5 7: interleaved, yet apart
        ((2, 4), (3, 2), False),
        ((3, 3), (2, 3), False),
        ((3, 4), (3, 2), True),  # 6 is both (2, 0) and (0, 3)
    ],
)
def test_shared_elements_are_found_exactly(shape, stride, shared):
    places = [
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist()
    ]
    assert values.shares_elements(shape, stride) is (len(set(places)) < len(places)) is shared


@pytest.mark.parametrize("scores", [[[1.0, 2.0]], "x", 5, None])
def test_the_convenience_form_says_what_is_no_tensor(scores):
    kind = type(scores).__name__
    said = "scores is required by this Spec" if scores is None else f"scores must be a tensor, got {kind}"
    with pytest.raises(ContractError) as error:
        hal.ops.topk_select(scores, torch.zeros(1, dtype=torch.int32), topk=1)
    assert said in error.value.reasons


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "block_table is required by this Spec"),
        (torch.tensor(0, dtype=torch.int32), "block_table must have 2 dimensions (R columns), got shape []"),
    ],
)
def test_the_convenience_form_reads_no_size_off_what_has_none(table, said):
    rows = torch.zeros(1, dtype=torch.int32)
    query = torch.zeros(1, 1, 128).to(torch.float8_e4m3fn)
    scale, weights = torch.zeros(1, 1, 0, dtype=torch.uint8), torch.zeros(1, 1)
    cache = torch.zeros(1, 64 * 132, dtype=torch.uint8)
    with pytest.raises(ContractError) as error:
        hal.ops.indexer_logits(
            query, scale, weights, cache, table, rows, rows, index="index.fp8.e4m3fn.f32.page64", num_heads=1
        )
    assert error.value.reasons == (said,)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.zeros(2, 3).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, 3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bind_says_which_tensor_is_not_dense(make, kind):
    plan = hal.plan("topk_select", TopKSpec(topk=2), LIMITS, device="cpu")
    with pytest.raises(ContractError) as error:
        plan.bind(make(), torch.zeros(2, dtype=torch.int32))
    assert error.value.reasons == (f"scores must be a dense tensor, got a {kind} one",)


@pytest.mark.parametrize(
    ("total", "kind"), [(True, "bool True"), (2.5, "float 2.5"), ("3", "str '3'"), ([3], "list [3]")]
)
def test_a_total_that_is_no_number_of_rows_is_a_sentence(total, kind):
    plan = hal.plan("all_gather", GatherSpec(layout="token_order", dtype="float32"), LIMITS, device="cpu")
    for call in (plan.run, plan.bind):
        with pytest.raises(ContractError) as error:
            call(torch.zeros(4, 2), total)
        assert error.value.reasons == (f"total must be a number of rows, got {kind}",)
