"""The metadata check: one description, two forms, the same sentences."""

from __future__ import annotations

import pytest
import torch

from inputs import example
from kimi_hal.dispatch.contract import Capability, Properties, Sizes, TensorCap
from kimi_hal.errors import ContractError
from kimi_hal.ops import OPERATORS, all_gather, check, sparse_mla, store_latent
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.operator import output_shapes, torch_dtype
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits

SPEC = SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3fn.tensor", topk=64)
LIMITS = Limits(max_rows=8, max_reqs=4)


def operands(rows=4, **changes):
    tensors = {
        "q": torch.zeros(rows, 12, 576, dtype=torch.bfloat16),
        "cache": torch.zeros(3, 36864, dtype=torch.uint8),
        "indices": torch.zeros(rows, 64, dtype=torch.int32),
        "k_scale": torch.ones(1),
    }
    return {**tensors, **changes}


def reasons(tensors, spec=SPEC, **terms):
    with pytest.raises(ContractError) as caught:
        check.compiled(sparse_mla, spec, LIMITS, **terms)(**tensors)
    return list(caught.value.reasons)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_right_operands_pass(device):
    checker = check.compiled(sparse_mla, SPEC, LIMITS, device=device)
    out, lse = torch.empty(4, 12, 512, dtype=torch.bfloat16), torch.empty(4, 12)
    assert checker(**operands()) is None
    assert checker(**operands(), out=out, lse_out=lse) is None


def test_the_fast_path_decides_alone(monkeypatch):
    checker = check.compiled(sparse_mla, SPEC, LIMITS)
    monkeypatch.setattr(check, "problems", lambda *a: pytest.fail("the long way was taken"))
    strided = torch.zeros(4, 14, 576, dtype=torch.bfloat16)[:, :12]
    out, lse = torch.empty(4, 12, 512, dtype=torch.bfloat16), torch.empty(4, 12)
    checker(**operands(), out=out, lse_out=lse, workspace=torch.empty(256, dtype=torch.uint8))
    checker(**operands(q=strided))


def test_every_reason_of_every_operand_is_told_at_once():
    found = reasons(
        operands(
            q=torch.zeros(4, 12, 575),
            cache=torch.zeros(3, 36865, dtype=torch.int8),
            k_scale=None,
            q_scale=torch.ones(1),
        )
    )
    assert found == [
        "q must be bfloat16, got float32",
        "q must be [T H D] with D=576, got shape [4, 12, 575]",
        "cache must be uint8, got int8",
        "cache must be [pages page_bytes] with page_bytes=36864, got shape [3, 36865]",
        "k_scale is required by this Spec",
        "q_scale is refused by this Spec",
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": None}, "q is required by this Spec"),
        ({"q": [1.0]}, "q must be a tensor, got list"),
        (
            {"q": torch.zeros(4, 12, dtype=torch.bfloat16)},
            "q must have 3 dimensions (T H D), got shape [4, 12]",
        ),
        (
            {"indices": torch.zeros(5, 64, dtype=torch.int32)},
            "indices must be [T <=topk] with T=4, got shape [5, 64]",
        ),
        (
            {"indices": torch.zeros(4, 65, dtype=torch.int32)},
            "indices must be [T <=topk] with topk=64, got shape [4, 65]",
        ),
        ({"indices": torch.zeros(4, 64, dtype=torch.int64)}, "indices must be int32, got int64"),
        (
            {"cache": torch.zeros(36864, 3, dtype=torch.uint8).T},
            "cache must have stride 1 in its last dimension, got strides [1, 3]",
        ),
        ({"out": torch.zeros(4, 12, 512)}, "out must be bfloat16, got float32"),
        ({"out": 3}, "out must be a tensor, got int"),
        ({"lse_out": torch.zeros(4, 11)}, "lse_out must be [T L] with L=12, got shape [4, 11]"),
        (
            {"out": torch.zeros(4, 12, 1024, dtype=torch.bfloat16)[..., ::2]},
            "out must have stride 1 in its last dimension, got strides [12288, 1024, 2]",
        ),
        ({"step": torch.zeros(4)}, "step must be a contiguous 1-D uint8 tensor, got [4] torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_wrong_operand_gives_one_sentence(change, reason):
    assert reasons(operands(**change)) == [reason]
    assert reasons(operands(**change), device="cpu") == [reason]


def test_rows_beyond_the_limits_are_refused():
    assert reasons(operands(rows=9)) == ["T=9 is more than the plan's max_rows=8; plan with larger Limits"]


def test_a_static_shape_plan_refuses_other_row_counts():
    limits = Limits(max_rows=8, max_reqs=4, row_buckets=(4, 8))
    static = Capability(arch=("*",), spec={}, properties=Properties(static_rows=True))
    checker = check.compiled(sparse_mla, SPEC, limits, capability=static)
    checker(**operands(rows=4))
    with pytest.raises(
        ContractError, match=r"T=3 is none of the plan's row_buckets \[4, 8\]; pad to the next one"
    ):
        checker(**operands(rows=3))


def test_a_small_or_misaligned_workspace_is_refused():
    room = torch.empty(4096, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    sizes = Sizes(workspace=1024, step=16)
    good = room[start : start + 1024]
    check.compiled(sparse_mla, SPEC, LIMITS, sizes)(**operands(workspace=good, step=good[:16]))
    assert reasons(operands(workspace=good[:512], step=good[:8]), sizes=sizes) == [
        "step has 8 bytes, the plan needs 16 (plan.step_bytes)",
        "workspace has 512 bytes, the plan needs 1024 (plan.workspace_bytes)",
    ]
    late = room[start + 16 : start + 16 + 1024]
    assert reasons(operands(workspace=late), sizes=sizes) == [
        "workspace must start at a multiple of 256 bytes, starts 16 past one"
    ]


def test_operands_on_two_devices_are_refused():
    assert reasons(operands(k_scale=torch.ones(1, device="meta"))) == [
        "k_scale is on meta, the first operand on cpu"
    ]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xla"])
def test_operands_away_from_the_plans_device_are_refused(device):
    assert reasons(operands(), device=device) == [
        f"{name} is on cpu, this plan is for {device}" for name in ("q", "cache", "k_scale", "indices")
    ]


class OnAccelerator:
    """A tensor as the fast path sees it, on device ``index`` of an accelerator."""

    def __init__(self, tensor, index):
        self.tensor, self.index = tensor, index

    is_cpu = False
    device = torch.device("cuda", 0)

    def get_device(self):
        return self.index

    def __getattr__(self, name):
        return getattr(self.tensor, name)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_on_an_accelerator_the_index_is_compared(monkeypatch, device):
    refused = []
    monkeypatch.setattr(check, "problems", lambda *a: refused.append(1) or [])
    checker = check.compiled(sparse_mla, SPEC, LIMITS, device=device)
    on = {name: OnAccelerator(tensor, 1) for name, tensor in operands().items()}
    checker(**on)
    assert not refused
    checker(**{**on, "cache": OnAccelerator(on["cache"].tensor, 0)})
    checker(**{**on, "cache": on["cache"].tensor})
    assert len(refused) == 2


def test_fault_23_int64_selections_are_refused_before_they_are_read_as_int32():
    wrong = torch.tensor([[1, 2, 3, 4]] * 4)
    assert reasons(operands(indices=wrong)) == ["indices must be int32, got int64"]


CAP = Capability(
    arch=("*",),
    spec={},
    tensors={
        "q": TensorCap(align=16, contiguous=("heads",)),
        "indices": TensorCap(align=16, contiguous=("all",)),
        "cache": TensorCap(align=16),
    },
)


def test_what_the_kernel_needs_beyond_the_contract_is_refused_by_name():
    wide = torch.zeros(4, 13, 576, dtype=torch.bfloat16)
    check.compiled(sparse_mla, SPEC, LIMITS, capability=CAP)(**operands(q=wide[:, :12]))
    per_head = torch.zeros(4, 12, 600, dtype=torch.bfloat16)[..., :576]
    assert reasons(operands(q=per_head), capability=CAP) == [
        "q must be contiguous in its last two dimensions, got strides [7200, 600, 1]"
    ]
    columns = torch.zeros(4, 96, dtype=torch.int32)[:, :64]
    assert reasons(operands(indices=columns), capability=CAP) == [
        "indices must be contiguous, got strides [96, 1]"
    ]


def test_fault_23_a_misaligned_operand_is_refused_where_the_kernel_needs_alignment():
    flat = torch.zeros(3 * 36864 + 64, dtype=torch.uint8)
    start = -flat.data_ptr() % 16
    shifted = flat[start + 1 : start + 1 + 3 * 36864].view(3, 36864)
    assert reasons(operands(cache=shifted), capability=CAP) == [
        "cache must start at a multiple of 16 bytes, starts 1 past one"
    ]
    check.compiled(sparse_mla, SPEC, LIMITS)(**operands(cache=shifted))  # the contract itself does not ask

    odd = flat[start : start + 2 * 36865 + 36864].as_strided((3, 36864), (36865, 1))
    assert reasons(operands(cache=odd), capability=CAP) == [
        "cache must have strides of whole 16 bytes (16 elements) but for the last, got strides [36865, 1]"
    ]


def test_a_kernel_may_take_fewer_dtypes_than_the_contract():
    spec = StoreLatentSpec(latent="latent.fp8.e4m3fn.tensor")
    cap = Capability(arch=("*",), spec={}, tensors={"kv_c": TensorCap(dtypes=("bfloat16",), align=1)})
    checker = check.compiled(store_latent, spec, LIMITS, capability=cap)
    given = {
        "k_pe": torch.zeros(4, 64),
        "slots": torch.zeros(4, dtype=torch.int64),
        "cache": torch.zeros(3, 36864, dtype=torch.uint8),
        "k_scale": torch.ones(1),
    }
    checker(kv_c=torch.zeros(4, 512, dtype=torch.bfloat16), **given)
    with pytest.raises(ContractError, match="kv_c must be bfloat16 for this implementation, got float32"):
        checker(kv_c=torch.zeros(4, 512), **given)


def test_more_rows_than_slots_are_legal_and_fewer_are_not():
    spec = StoreLatentSpec(latent="latent.fp8.e4m3fn.tensor")
    checker = check.compiled(store_latent, spec, LIMITS)
    given = {
        "slots": torch.zeros(4, dtype=torch.int64),
        "cache": torch.zeros(3, 36864, dtype=torch.uint8),
        "k_scale": torch.ones(1),
        "k_pe": torch.zeros(4, 64),
    }
    checker(kv_c=torch.zeros(6, 512), **given)
    with pytest.raises(ContractError, match=r"kv_c must be \[>=T kv_rank\] with T=4, got shape \[3, 512\]"):
        checker(kv_c=torch.zeros(3, 512), **given)


def test_a_letter_that_stands_for_several_dimensions_is_told_as_numbers():
    spec = GatherSpec(layout="token_order", dtype="float32")
    checker = check.compiled(all_gather, spec, LIMITS)
    checker(x=torch.zeros(4, 6), total=3, out=torch.zeros(3, 6))
    for wrong in (torch.zeros(4, 6), torch.zeros(3, 6, 1)):
        with pytest.raises(ContractError) as caught:
            checker(x=torch.zeros(4, 6), total=3, out=wrong)
        assert caught.value.reasons == (f"out must be [3, 6], got shape {list(wrong.shape)}",)


def test_no_rows_are_legal():
    out = torch.empty(0, 12, 512, dtype=torch.bfloat16)
    check.compiled(sparse_mla, SPEC, LIMITS)(**operands(rows=0), out=out)


def test_strides_that_are_never_used_do_not_matter():
    one_row = torch.zeros(1, 12, 577, dtype=torch.bfloat16)[..., :576].as_strided((1, 12, 576), (7, 576, 1))
    check.compiled(sparse_mla, SPEC, LIMITS, capability=CAP)(**operands(rows=1, q=one_row))


def test_the_fast_path_has_no_try_and_reads_no_environment():
    text = check.compiled(sparse_mla, SPEC, LIMITS).__doc__
    assert text.startswith("def check_sparse_mla(q=None, cache=None,")
    assert "try" not in text
    assert "environ" not in text


def written(name):
    """Return an operator's example with all of its outputs, and the tensors that a call writes, by label."""
    op = OPERATORS[name]
    spec, limits, args, kwargs = example(name)
    given = dict(op.signature.bind(*args, **kwargs).arguments)
    for out in output_shapes(op, spec, limits, given):
        given[out.keyword] = torch.empty(out.shape, dtype=torch_dtype(out.dtype))
    found = {}
    for key in (*op.mutated, *(out.keyword for out in op.outs)):
        value = given[key]
        found |= {f"{key}[{i}]": t for i, t in enumerate(value)} if isinstance(value, list) else {key: value}
    return op, spec, limits, given, found


def replaced(given, label, tensor):
    name, _, index = label.partition("[")
    if not index:
        return {**given, name: tensor}
    place = int(index.rstrip("]"))
    return {**given, name: [tensor if i == place else t for i, t in enumerate(given[name])]}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_what_a_call_writes_may_not_share_elements(name):
    op, spec, limits, given, tensors = written(name)
    checker = check.compiled(op, spec, limits)
    checker(**given)
    for label, tensor in tensors.items():
        if tensor.dim() < 2 or tensor.shape[0] < 2 or not tensor.numel():
            continue
        for stride in (0, tensor.stride(0) - 1):  # expanded, and rows that reach into the next
            shared = tensor.as_strided(tensor.shape, (stride, *tensor.stride()[1:]))
            with pytest.raises(ContractError) as error:
                checker(**replaced(given, label, shared))
            assert error.value.reasons == (
                f"{label} is written and its elements share memory, got strides {list(shared.stride())}",
            )


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_gaps_and_turned_dimensions_of_what_is_written_pass_the_fast_path(name, monkeypatch):
    op, spec, limits, given, tensors = written(name)
    checker = check.compiled(op, spec, limits)
    monkeypatch.setattr(check, "problems", lambda *a: pytest.fail("the long way was taken"))
    for label, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor.numel():
            continue
        outer, whole = 3 * tensor[0].numel(), torch.empty(3 * tensor.numel(), dtype=tensor.dtype)
        gaps = whole.as_strided(tensor.shape, (outer, *tensor.stride()[1:]))
        checker(**replaced(given, label, gaps))
        if tensor.dim() == 3:
            turned = torch.empty_like(tensor.transpose(0, 1), memory_format=torch.contiguous_format)
            checker(**replaced(given, label, turned.transpose(0, 1)))


def test_a_kernel_that_wants_packed_heads_and_writes_is_told_both():
    wanted = Capability(("*",), {}, tensors={"out": TensorCap(contiguous=("heads",))})
    out = torch.empty(1, 12, 512, dtype=torch.bfloat16).expand(4, 12, 512)
    assert reasons({**operands(), "out": out}, capability=wanted) == [
        "out is written and its elements share memory, got strides [0, 512, 1]"
    ]
    out = torch.empty(4, 512, dtype=torch.bfloat16)[:, None].expand(4, 12, 512)
    assert reasons({**operands(), "out": out}, capability=wanted) == [
        "out must be contiguous in its last two dimensions, got strides [512, 0, 1]",
        "out is written and its elements share memory, got strides [512, 0, 1]",
    ]
