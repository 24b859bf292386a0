"""Small index caches whose every other byte is poison, the plain formula of the scores, and a plain order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import check
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.parallel import ownership
from kimi_hal.reference import backend
from kimi_hal.reference import indexer as reference

POW2 = "index.fp8.e4m3fn.pow2.page64"
MXFP4 = "index.mxfp4.page64"

Oracle = torch.float64


def int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(got: Tensor, wanted: Tensor, lengths: Tensor) -> None:
    """Compare the scores of keys as closely as float32 sums allow."""
    keys = torch.arange(wanted.shape[1]) < lengths[:, None]
    torch.testing.assert_close(
        got[:, : wanted.shape[1]][keys].double(),
        wanted[keys].double(),
        rtol=3e-6,
        atol=1e-6,
        equal_nan=True,
    )


class Index:
    """Keys of several requests on one rank, in shuffled pages; bytes that hold no key are 0xFF (NaN).

    Pages of ``padding`` more bytes make the page stride free; the table's unused entries are 2^30.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        name: str = POW2,
        *,
        heads: int = 4,
        dcp: DCP | None = None,
        padding: int = 0,
        extra_pages: int = 1,
        seed: int = 0,
    ) -> None:
        self.name, self.heads, self.dcp = name, heads, dcp or DCP()
        self.fmt = formats.index(name)
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = [ownership.local_length(n, ownership.of_keys(self.dcp)) for n in lengths]
        needed = [math.ceil(n / 64) for n in self.lengths]
        pool = torch.full((sum(needed) + extra_pages, self.fmt.page_bytes + padding), 0xFF, dtype=torch.uint8)
        self.cache = pool[:, : self.fmt.page_bytes]
        pages = torch.randperm(len(self.cache), generator=self.generator).tolist()
        self.table = torch.full((len(lengths), max(needed) + 1), 1 << 30, dtype=torch.int32)
        for request, count in enumerate(needed):
            self.table[request, :count] = int32([pages.pop() for _ in range(count)])
        for request, (whole, n) in enumerate(zip(lengths, self.lengths, strict=True)):
            # A key depends on its request and position alone, so that every sharding holds the same keys.
            keys = torch.randn(whole, 128, generator=torch.Generator().manual_seed(1000 * seed + request))
            self.put(request, keys[self.positions(n)])

    def positions(self, count: int) -> Tensor:
        """Return the global positions of the first ``count`` local ones."""
        return ownership.position(torch.arange(count), ownership.of_keys(self.dcp))

    def slots(self, request: int, count: int | None = None) -> Tensor:
        """Return the slots of a request's local positions."""
        local = torch.arange(self.lengths[request] if count is None else count)
        return self.table[request, local // 64].long() * 64 + local % 64

    def put(self, request: int, keys: Tensor) -> None:
        """Write a request's first keys."""
        if len(keys):
            self.fmt.write(self.cache, self.slots(request, len(keys)), keys)

    def keys(self, request: int) -> Tensor:
        """Return a request's decoded keys in float64."""
        return self.fmt.read(self.cache, self.slots(request), dtype=Oracle)

    def query(self, rows: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Return a quantised query, its scales and the folded weights of ``rows`` rows."""
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(rows, self.heads, 128, generator=generator)
        weights = torch.randn(rows, self.heads, generator=generator)
        spec = IndexQuerySpec(index=self.name, num_heads=self.heads)
        return reference.quantize_index_query(spec, q, weights)

    def spec(self, **fields: Any) -> IndexerSpec:
        """Return the Spec of ``indexer_logits``."""
        return IndexerSpec(index=self.name, num_heads=self.heads, dcp=self.dcp, **fields)

    def topk_spec(self, k: int, **fields: Any) -> IndexerTopKSpec:
        """Return the Spec of ``indexer_topk``."""
        return IndexerTopKSpec(index=self.name, num_heads=self.heads, dcp=self.dcp, topk=k, **fields)

    def logits(
        self, query: tuple[Tensor, ...], row_req: Tensor, row_len: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Run the reference of ``indexer_logits``."""
        operands = (*query, self.cache, self.table, row_req, row_len)
        return reference.indexer_logits(self.spec(), *operands, dtype=dtype)

    def topk(
        self, query: tuple[Tensor, ...], row_req: Tensor, row_len: Tensor, k: int, **fields: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the reference of ``indexer_topk``."""
        operands = (*query, self.cache, self.table, row_req, row_len)
        return reference.indexer_topk(self.topk_spec(k, **fields), *operands)

    def plain(self, query: tuple[Tensor, ...], row: int, request: int) -> Tensor:
        """Return one row's scores over all keys of a request, as the formula says, in float64."""
        q, q_scale, weights = query
        decoded = self.fmt.decode_query(q[row], q_scale[row], dtype=Oracle)
        dots = torch.einsum("hd,sd->hs", decoded, self.keys(request))
        return (weights[row].to(Oracle)[:, None] * dots.clamp(min=0)).sum(0)


def plain_selection(scores: Sequence[float], k: int) -> list[int]:
    """Select by sorting Python floats under rule 2: descending, then smaller position, NaN last."""
    order = sorted(
        range(len(scores)),
        key=lambda i: (math.isnan(scores[i]), -scores[i] if scores[i] == scores[i] else 0, i),
    )
    return sorted(order[:k])


def filled(index: Sequence[int], k: int) -> list[int]:
    """Return a row of selected positions, filled up with −1."""
    return [*index, *[-1] * (k - len(index))]


def planned(op: Operator, spec: Spec, limits: Limits | None = None, group: Any = None) -> Callable[..., Any]:
    """Return the reference's run function, with its metadata check."""
    context = BuildContext(
        operator=op.name,
        spec=spec,
        limits=limits,
        device="cpu",
        arch="cpu",
        sizes=Sizes(),
        group=group,
        persistent=None,
        check=check.compiled(op, spec, limits),
        settings={},
    )
    return backend.build(context)
