"""``dsa_decode`` in launches that overlap, bit for bit beside its parts one behind the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D, PAGE = "cuda", 64
FP8, FP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
LATENT, NVFP4 = "latent.fp8.e4m3fn.tensor", "latent.nvfp4.352"


class Layer:
    """Caches, queries and plans of one layer's decode: ours, and the parts that it is made of."""

    def __init__(
        self, index: str, latent: str, requests: int, context: int, each: int = 1, heads: int = 12
    ) -> None:
        kept, rows = formats.index(index), requests * each
        pages = requests * context // PAGE
        self.context, self.rows = context, rows
        self.index_cache = torch.empty(pages, kept.page_bytes, dtype=torch.uint8, device=D)
        keys = torch.randn(pages * PAGE, 128, device=D).bfloat16()
        put = hal.plan(
            "store_index_keys", StoreIndexSpec(index=index), Limits(max_rows=len(keys), max_reqs=1), device=D
        )
        put.run(keys, torch.arange(len(keys), device=D), self.index_cache)
        bytes_of_page = PAGE * formats.latent(latent).row_bytes
        self.latent_cache = torch.randint(0, 120, (999, bytes_of_page), dtype=torch.uint8, device=D)
        self.index_table = torch.randperm(pages, device=D, dtype=torch.int32).view(requests, -1)
        self.latent_table = torch.randint_like(self.index_table, 0, 999)
        self.row_req = torch.arange(requests, device=D, dtype=torch.int32).repeat_interleave(each)
        self.row_len = torch.full((rows,), context, dtype=torch.int32, device=D)
        spec = DSASpec(
            query=IndexQuerySpec(index=index),
            indexer=IndexerTopKSpec(index=index),
            attn=SparseMLASpec(
                num_heads=heads,
                latent=latent,
                page=PAGE,
                topk=2048,
                index_space="position",
                return_lse=True,
            ),
        )
        limits = Limits(max_rows=rows, max_reqs=requests, max_context=context, rows_per_req=each)
        self.ours, self.parts = (
            hal.plan("dsa_decode", spec, limits, device=D, implementation=f"nvidia.{name}")
            for name in ("cuda", "composed")
        )
        self.queries = [
            torch.empty(rows, heads, 576, dtype=torch.bfloat16, device=D),
            torch.empty(rows, 32, 128, dtype=torch.bfloat16, device=D),
            torch.empty(rows, 32, device=D),
        ]
        self.scale = torch.tensor([0.01], device=D) if latent == LATENT else None
        self.room = torch.empty(self.ours.workspace_bytes, dtype=torch.uint8, device=D)
        self.out = torch.empty(rows, heads, 512, dtype=torch.bfloat16, device=D)
        self.lse = torch.empty(rows, heads, device=D)
        self.new(self.queries)

    @staticmethod
    def new(queries: list[torch.Tensor]) -> None:
        """Draw queries anew."""
        for tensor in queries:
            tensor.normal_()

    def operands(self) -> tuple[Any, ...]:
        tables = (self.latent_table, self.index_table, self.row_req, self.row_len, self.scale)
        return (*self.queries, self.latent_cache, self.index_cache, *tables)

    def run(self) -> None:
        self.ours.run(*self.operands(), out=self.out, lse_out=self.lse, workspace=self.room)

    def poison(self) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.room.fill_(0xFF)

    def agrees(self) -> bool:
        """Tell whether what was written last is what the parts give now."""
        got = self.out.clone(), self.lse.clone()
        return all(map(torch.equal, got, self.parts.run(*self.operands())))


@pytest.fixture(autouse=True)
def own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are this backend's own kernels, whatever a table says is faster."""
    names = ("quantize_index_query", "indexer_topk", "sparse_mla")
    monkeypatch.setenv("KIMI_HAL_OPS", ",".join(f"{name}=nvidia.cuda" for name in names))


@pytest.mark.parametrize(
    ("index", "latent", "requests", "context", "each", "heads"),
    [
        (FP8, LATENT, 1, 32768, 1, 12),
        (FP8, LATENT, 3, 8192, 1, 12),
        (FP8, LATENT, 1, 131072, 1, 12),
        (FP4, NVFP4, 5, 40960, 2, 12),
        (FP8, LATENT, 40, 16384, 1, 96),
        (FP8, LATENT, 64, 32768, 1, 12),
    ],
)
def test_calls_behind_each_other_have_the_bits_of_their_parts(
    index: str, latent: str, requests: int, context: int, each: int, heads: int
) -> None:
    layer = Layer(index, latent, requests, context, each, heads)
    for turn in range(30):
        layer.new(layer.queries)
        layer.row_len.random_(context // 2, context + 1)
        if turn % 5 == 0 and layer.rows > 1:
            layer.row_len[0] = turn // 5 - 1
        if turn % 3 == 0:
            layer.poison()
        for _ in range(1 + turn % 2):
            layer.run()
        assert layer.agrees(), turn


def alone(layer: Layer, given: list[torch.Tensor]) -> None:
    """Only the call, behind nothing."""
    layer.run()


def behind_kernels(layer: Layer, given: list[torch.Tensor]) -> None:
    """Somebody else's kernels write what it reads."""
    torch._foreach_copy_(layer.queries, given)
    layer.run()


def behind_a_memset(layer: Layer, given: list[torch.Tensor]) -> None:
    """What goes before is no kernel."""
    layer.room.zero_()
    layer.lse.zero_()
    layer.run()


def behind_two_streams(layer: Layer, given: list[torch.Tensor]) -> None:
    """It waits for two kernels."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        layer.queries[0].copy_(given[0])
        layer.queries[1].copy_(given[1])
    layer.queries[2].copy_(given[2])
    here.wait_stream(side)
    layer.run()


def behind_itself(layer: Layer, given: list[torch.Tensor]) -> None:
    """One call writes where the one before still reads."""
    layer.run()
    torch._foreach_copy_(layer.queries, given)
    layer.run()
    layer.run()


@pytest.mark.parametrize("calls", [alone, behind_kernels, behind_a_memset, behind_two_streams, behind_itself])
@pytest.mark.parametrize(("requests", "context"), [(1, 32768), (1, 131072), (24, 16384)])
def test_a_captured_call_follows_what_goes_before_it(
    calls: Callable[[Layer, list[torch.Tensor]], None], requests: int, context: int
) -> None:
    layer = Layer(FP8, LATENT, requests, context)
    given = [torch.randn_like(tensor) for tensor in layer.queries]
    for _ in range(3):
        layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls(layer, given)
    for turn in range(20):
        layer.new(given)
        layer.new(layer.queries)
        layer.poison()
        for _ in range(1 + turn % 2):
            graph.replay()
        assert layer.agrees(), turn
