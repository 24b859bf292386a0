"""One sparse-attention layer of a decode step: one tensor-parallel rank alone, or one of W that share the cache."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale import links
from benchmarks.scale.figures import Device, Transport, kernel
from benchmarks.scale.merges import K, merge, select
from kimi_hal.model import K3_1_PRO

HEADS, DIM, VALUE = K3_1_PRO.mla_heads, K3_1_PRO.kv_rank + K3_1_PRO.pe_dim, K3_1_PRO.kv_rank
INDEX_BYTES, LATENT_BYTES = 132, 576


@dataclass(frozen=True)
class Step:
    """A decode step: requests, rows of each (1 + drafts), and tokens of each request's context."""

    requests: int
    context: int
    rows_a_request: int = 1

    @property
    def rows(self) -> int:
        """Return T."""
        return self.requests * self.rows_a_request


def alone(on: Device, step: Step, tp: int = 8) -> dict[str, float]:
    """Return µs by part where every rank holds the whole cache and attends with its own heads."""
    return {
        "index": index(on, step, 1),
        "select": select(on, step.rows, step.context),
        "attention": attention(on, step.rows, HEADS / tp, min(K, step.context)),
    }


def shared(on: Device, how: Transport, step: Step, world: int, protocol: str) -> dict[str, float]:
    """Return µs by part where W ranks hold a W-th of the cache and of the heads each."""
    own, result = HEADS / world, VALUE * 2 + 4
    return {
        "index": index(on, step, world),
        "select": select(on, step.rows, step.context / world),
        "merge": merge(on, how, protocol, world, step.rows).time,
        "heads": links.gather(on, how, world, step.rows * own * DIM * 2),
        "attention": attention(on, step.rows, HEADS, min(K, step.context) / world),
        "exchange": links.exchange(on, how, world, step.rows * own * result),
        "combine": kernel("pass")["floor"] + step.rows * HEADS * result / on.memory / 1e3,
    }


def index(on: Device, step: Step, world: int) -> float:
    """Return the time of scoring: keys are read once a request, products are of every row."""
    figure, keys = kernel("index"), step.context / world
    read = step.requests * keys * INDEX_BYTES / (on.memory * figure["memory"]) / 1e3
    heads, dim = K3_1_PRO.index_heads, K3_1_PRO.index_dim
    product = step.rows * keys * heads * dim * 2 / (on.fp8 * figure["fp8"]) / 1e6
    return figure["floor"] + max(read, product)


def attention(on: Device, rows: int, heads: float, keys: float) -> float:
    """Return the time of sparse attention; the kernels pad heads to 64 or 128."""
    figure = kernel("attention")
    padded = figure["heads"] * (1 if heads <= figure["heads"] else 2)
    product = rows * padded * keys * (DIM + VALUE) * 2 / (on.bf16 * figure["bf16"]) / 1e6
    read = rows * keys * LATENT_BYTES / (on.memory * figure["memory"]) / 1e3
    return figure["floor"] + max(product, read)
