"""What a plan for torch-xla's device refuses: numbers that it has no type for, rows that are no bucket, SparseCore."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla

import kimi_hal as hal
from kimi_hal.dispatch.contract import Probe
from kimi_hal.errors import ContractError, SelectionError
from kimi_hal.ops.all_gather import DTYPES, GatherSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_tpu.xla_claims import TYPELESS

pytestmark = pytest.mark.usefixtures("tpu")
FNUZ = "index.fp8.e4m3fnuz.f32.page64"
NOT_INTERPRETED = "arch v5e is not interpreted"
FORMATS = (
    "'index.fp8.e4m3fn.f32.page64' | 'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64' | "
    "'index.mxfp4.page64' | 'index.mxfp4.gfx950.page64' (torch-xla 2.9 has no type for fnuz numbers)"
)
QUERY = {"latent": "latent.bf16", "num_heads": 1, "q_dtype": "float8_e4m3fnuz"}
#: What torch-xla has no type for: where it stands in a Spec, and what may stand there.
REFUSED: dict[str, tuple[str, Spec, str]] = {
    "query": (
        "quantize_index_query",
        IndexQuerySpec(index=FNUZ, num_heads=1),
        f"index='{FNUZ}' is not {FORMATS}",
    ),
    "logits": ("indexer_logits", IndexerSpec(index=FNUZ, num_heads=1), f"index='{FNUZ}' is not {FORMATS}"),
    "select": (
        "indexer_topk",
        IndexerTopKSpec(index=FNUZ, num_heads=1, topk=4),
        f"index='{FNUZ}' is not {FORMATS}",
    ),
    "attend": (
        "sparse_mla",
        SparseMLASpec(**QUERY),  # type: ignore[arg-type]
        "q_dtype='float8_e4m3fnuz' is not 'bfloat16' | 'float8_e4m3fn' "
        "(torch-xla 2.9 has no type for fnuz numbers)",
    ),
    "gather": (
        "all_gather",
        GatherSpec(layout="rank_major", dtype="float8_e8m0fnu"),
        "dtype='float8_e8m0fnu' is not 'uint8' | 'int8' | 'int16' | 'int32' | 'int64' | 'bfloat16' | 'float32' | "
        "'float8_e4m3fn' | 'float8_e5m2' (torch-xla 2.9 has no type for fnuz and e8m0 numbers)",
    ),
}


@pytest.fixture
def seen() -> Probe:
    """Return what is seen of a machine with a TPU v5e."""
    return Probe(present=True, arch="v5e", devices=("TPU v5e",), facts={})


def has_a_type(name: str) -> bool:
    try:
        torch.zeros(1, dtype=getattr(torch, name), device=torch_xla.device())
    except RuntimeError:
        return False
    return True


def test_what_is_covered_interpreted_alone_is_what_torch_xla_has_no_type_for() -> None:
    assert set(TYPELESS["all_gather"]["dtype"].values) == {  # type: ignore[union-attr]
        name for name in DTYPES if not has_a_type(name)
    }


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_numbers_without_a_type_are_refused_when_they_are_planned(name: str) -> None:
    operator, spec, reason = REFUSED[name]
    with pytest.raises(SelectionError) as error:
        hal.plan(operator, spec, device="xla", implementation="tpu.xla")
    (said,) = (refusals for who, refusals in error.value.refusals.items() if who == "tpu.xla")
    assert said == (f"[1 of 2] {reason}", f"[2 of 2] {NOT_INTERPRETED}")
    assert "These fit: reference.torch" in str(error.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_interpreted_they_are_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    operator, spec, _ = REFUSED[name]
    assert hal.plan(operator, spec, device="cpu", implementation="tpu.xla").name == "tpu.xla"


@pytest.mark.parametrize(
    ("operator", "spec"),
    [
        ("store_index_keys", StoreIndexSpec(index=FNUZ)),
        ("store_latent", StoreLatentSpec(latent="latent.fp8.e4m3fnuz.tensor")),
        ("sparse_mla", SparseMLASpec(latent="latent.fp8.e4m3fnuz.tensor", num_heads=1)),
    ],
)
def test_caches_are_bytes_and_are_served(operator: str, spec: Any) -> None:
    assert hal.plan(operator, spec, device="xla").name == "tpu.xla"


def test_kernels_of_sparse_core_are_refused_with_the_generations_that_have_it() -> None:
    with pytest.raises(SelectionError) as error:
        hal.plan("topk_select", TopKSpec(topk=4), device="xla", implementation="tpu.pallas")
    assert "arch v5e is not v5p | v6e | tpu7x" in error.value.refusals["tpu.pallas"]
    assert "These fit: tpu.xla" in str(error.value)


@pytest.mark.parametrize("rows", [5, 6])
def test_rows_of_the_device_are_a_bucket_or_all_that_the_plan_has(rows: int) -> None:
    limits, device = Limits(max_rows=6, max_reqs=2), torch_xla.device()
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="xla")
    scores, lengths = torch.randn(rows, 8), torch.full((rows,), 8, dtype=torch.int32)
    given = scores.to(device), lengths.to(device)
    if rows == limits.max_rows:
        assert plan.run(*given)[0].cpu().tolist() == scores.topk(4).indices.sort().values.tolist()
        return
    with pytest.raises(ContractError, match="T=5 is in no bucket; this plan compiles for 6"):
        plan.run(*given)
