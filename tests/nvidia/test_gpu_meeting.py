"""Parts of rows of ``sparse_mla`` that meet in memory, on a device: their bits are those of clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia.attention_plan import FORMS, Way, counter_bytes, workspace_bytes
from kimi_hal_nvidia.sizes import ATTENTION_LAUNCHES
from kimi_hal_nvidia.sparse_mla import Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D = "cuda"
FP8, NVFP4 = "latent.fp8.e4m3fn.tensor", "latent.nvfp4.352"
BYTES = {FP8: 576, NVFP4: 352}
PAGES, TOPK = 64, 2048
BY_NAME = {form.name: form for form in FORMS}
#: Heads, rows, form and parts: one part a block and several, parts of one row in one, two and more blocks.
WAYS = [
    (12, 32, "16", 4),
    (12, 5, "16", 8),
    (12, 45, "16", 3),
    (12, 300, "16", 2),
    (16, 140, "16", 5),
    (12, 67, "16", 8),
    (96, 8, "32", 5),
    (24, 160, "32", 4),
    (96, 32, "48", 2),
    (90, 9, "48", 8),
    (40, 200, "48", 3),
]


def codes(*shape: int) -> Tensor:
    """Return bytes that are finite numbers of any of the formats."""
    found = torch.randint(0, 256, shape, dtype=torch.uint8, device=D)
    return torch.where(found & 0x7F == 0x7F, found & 0x80, found)


@dataclass
class Case:
    """Operands of a call, and the ways to make it."""

    latent: str
    heads: int
    rows: int
    way: Way

    def __post_init__(self) -> None:
        torch.manual_seed(self.rows)
        self.spec = SparseMLASpec(num_heads=self.heads, latent=self.latent, topk=TOPK, has_index_len=True)
        self.limits = Limits(max_rows=self.rows, max_reqs=self.rows)
        self.cache = codes(PAGES, 64 * BYTES[self.latent])
        self.scale = torch.tensor([0.013], device=D) if self.latent == FP8 else None
        self.renew()
        self.room = torch.empty(
            workspace_bytes(self.spec, self.limits, self.way), dtype=torch.uint8, device=D
        )
        counts = ATTENTION_LAUNCHES * counter_bytes(self.spec, self.limits, self.way)
        self.words = torch.zeros(counts, dtype=torch.uint8, device=D)
        self.memory = self.attention(self.words)

    def renew(self) -> None:
        """Make other operands, of rows of all lengths, some of which have no key."""
        q = torch.randn(self.rows, self.heads, 576, device=D)
        self.q = (q * torch.logspace(-2, 1, self.heads, device=D)[None, :, None]).bfloat16()
        self.indices = torch.randint(-100, PAGES * 64 + 9, (self.rows, TOPK), device=D, dtype=torch.int32)
        lengths = torch.randint(0, TOPK + 3, (self.rows,), device=D, dtype=torch.int32)
        self.lengths = torch.where(torch.rand(self.rows, device=D) < 0.5, TOPK, lengths)
        self.lengths[self.rows // 2] = 0

    def attention(self, words: Tensor | None) -> Attention:
        """Return what attends by memory, or without words by clusters."""
        return Attention(self.spec, self.limits, self.way, "sm_90", 0, words)

    def attend(
        self, attend: Attention, rows: slice = slice(None), room: Tensor | None = None
    ) -> list[Tensor]:
        """Attend for some rows into poisoned buffers; return the bits."""
        q, indices, lengths = self.q[rows], self.indices[rows], self.lengths[rows]
        out = torch.full((len(q), self.heads, 512), torch.nan, device=D, dtype=torch.bfloat16)
        lse = torch.full((len(q), self.heads), torch.nan, device=D)
        room = self.room if room is None else room
        attend(q, self.cache, indices, self.scale, None, lengths, None, None, out, lse, room)
        return [out.view(torch.int16), lse.view(torch.int32)]


def differing(found: list[Tensor], other: list[Tensor]) -> list[tuple[list[int], int, int]]:
    """Return where bits of outputs and LSEs differ, and what they are there: the first few."""
    return [
        (at.tolist(), int(x[tuple(at)]), int(y[tuple(at)]))
        for x, y in zip(found, other, strict=True)
        for at in (x != y).nonzero()[:4]
    ]


@pytest.mark.parametrize("latent", [FP8, NVFP4])
@pytest.mark.parametrize(("heads", "rows", "form", "parts"), WAYS)
def test_bits_are_those_of_clusters_and_of_a_row_alone(
    latent: str, heads: int, rows: int, form: str, parts: int
) -> None:
    case = Case(latent, heads, rows, Way(BY_NAME[form], parts, in_memory=True))
    expected = case.attend(case.attention(None))
    assert not expected[0].view(torch.bfloat16).isnan().any()
    for _ in range(3):
        case.room.fill_(0xFF)
        assert not differing(case.attend(case.memory), expected)
        assert not case.words.any()
    for row in {0, 1, rows // 2, rows - 1}:
        alone = slice(row, row + 1)
        assert not differing(case.attend(case.memory, alone), [x[alone] for x in expected])
    some = slice(1, rows - 1)
    assert not differing(case.attend(case.memory, some), [x[some] for x in expected])
    assert not case.words.any()


@pytest.mark.parametrize(("heads", "rows", "form", "parts"), [WAYS[0], WAYS[3], WAYS[8]])
def test_a_graph_attends_to_new_data_and_another_stream_beside_it(
    heads: int, rows: int, form: str, parts: int
) -> None:
    case = Case(FP8, heads, rows, Way(BY_NAME[form], parts, in_memory=True))
    clusters = case.attention(None)
    case.attend(case.memory)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = case.attend(case.memory)
    other, room = torch.cuda.Stream(), torch.empty_like(case.room)
    given = case.q, case.indices, case.lengths
    for _ in range(3):
        case.renew()
        for into, new in zip(given, (case.q, case.indices, case.lengths), strict=True):
            into.copy_(new)
        expected = case.attend(clusters)
        case.room.fill_(0xFF), room.fill_(0xFF)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(other):
            beside = [case.attend(case.memory, room=room) for _ in range(5)]
        graph.replay()
        torch.cuda.synchronize()
        assert not differing(held, expected)
        assert not any(differing(found, expected) for found in beside)
        assert not case.words.any()


def test_heads_and_outputs_that_are_not_there_are_left_alone() -> None:
    case = Case(FP8, 12, 40, Way(BY_NAME["16"], 4, in_memory=True))
    whole: Any = torch.full((40, 14, 520), 7.0, device=D, dtype=torch.bfloat16)
    lse = torch.full((40, 13), 7.0, device=D)
    args = (case.q, case.cache, case.indices, case.scale, None, case.lengths, None, None)
    case.memory(*args, whole[:, :12, :512], lse[:, :12], case.room)
    expected = case.attend(case.attention(None))
    assert torch.equal(whole[:, :12, :512].contiguous().view(torch.int16), expected[0])
    assert torch.equal(lse[:, :12].contiguous().view(torch.int32), expected[1])
    for untouched in (whole[:, 12:], whole[:, :, 512:], lse[:, 12:]):
        assert (untouched == 7).all()
