"""One array of blocks on torch-xla's device: a request that finds a prefix in it gets the bits of one that computed it.

The operators are those of ``tpu.xla``, planned for the device itself: a step's operands never leave it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla
import torch_xla.debug.metrics as metrics
from cache_cases import FP8, POW2, equal
from kda_cases import Layer, Rows
from torch import Tensor
from torch_xla.core import xla_model

import kimi_hal as hal
from kimi_hal import cache, formats
from kimi_hal.cache import TokenCache
from kimi_hal.cache.models import delta_attention
from kimi_hal.ops.indexer import IndexerTopKSpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_tpu.pallas import custom_call
from kimi_hal_tpu.pool import Pool, Step

pytestmark = pytest.mark.usefixtures("tpu")
DSA, KDA, BLOCK, BLOCKS, TOPK = 2, 0, 64, 16, 48
#: A prefix of two blocks, and what each request has behind it.
PREFIX, FIRST, SECOND = 128, 32, 16
HEADS, DIM = 2, 16
LIMITS = Limits(max_rows=256, max_reqs=SECOND, row_buckets=(SECOND, PREFIX, PREFIX + FIRST))
KDA_SPEC = KDASpec(num_heads=HEADS, head_dim=DIM, checkpoints=True)
SELECT = IndexerTopKSpec(index=POW2, num_heads=4, topk=TOPK, ordered=True, return_selected=True)
ATTEND = SparseMLASpec(num_heads=2, latent=FP8, page=BLOCK, topk=TOPK, index_space="position")


MODEL = (
    TokenCache(name="latent", layers=(DSA, 5), entry_bytes=576, format=FP8),
    TokenCache(name="index", layers=(DSA, 5), entry_bytes=132, format=POW2, page=64),
    delta_attention((KDA, 1), heads=HEADS, dim=DIM, width=3),
)


def there(value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int32)
    return tensor.to(torch_xla.device())


@dataclass
class Tokens:
    """What a model would compute of the tokens of a prompt, for one DSA and one KDA layer."""

    kv: Tensor
    pe: Tensor
    key: Tensor
    query: Tensor
    weights: Tensor
    q: Tensor
    rows: Rows

    @classmethod
    def random(cls, count: int, seed: int) -> Tokens:
        random = torch.Generator().manual_seed(seed)
        kv, pe, key, query, weights, q = (
            torch.randn(count, *shape, generator=random)
            for shape in ((512,), (64,), (128,), (4, 128), (4,), (2, 576))
        )
        codes = formats.index(POW2).encode_query(query)[0]
        return cls(kv, pe, key, codes, weights, q.bfloat16(), Rows.random(KDA_SPEC, count, seed))

    def followed_by(self, other: Tokens) -> Tokens:
        return Tokens(
            *(
                torch.cat([getattr(self, n), getattr(other, n)])
                for n in ("kv", "pe", "key", "query", "weights", "q")
            ),
            Rows(*(torch.cat([getattr(self.rows, n), getattr(other.rows, n)]) for n in vars(self.rows))),
        )

    def some(self, start: int, stop: int) -> Tokens:
        part = slice(start, stop)
        names = ("kv", "pe", "key", "query", "weights", "q")
        return Tokens(*(getattr(self, n)[part] for n in names), self.rows.some(part))


@dataclass
class Engine:
    """A pool and plans on torch-xla's device."""

    pool: Pool = field(
        default_factory=lambda: Pool(
            cache.plan(MODEL, block_size=BLOCK, num_blocks=BLOCKS), device=torch_xla.device()
        )
    )
    plans: dict[str, Any] = field(default_factory=dict)
    layer: Layer = field(default_factory=lambda: Layer.random(KDA_SPEC))

    def run(self, operator: str, spec: Any, *operands: Any, **named: Any) -> Any:
        if operator not in self.plans:
            self.plans[operator] = hal.plan(operator, spec, LIMITS, device="xla", implementation="tpu.xla")
        found = self.plans[operator].run(*operands, **named)
        torch_xla.sync()  # a program an operator: compiled as one, a step takes a CPU minutes
        return found

    def step(
        self, tokens: Tokens, done: int, blocks: list[int], live: int, kept: int = -1
    ) -> dict[str, Tensor]:
        """Compute the tokens of one request from position ``done`` on; keep the state after the prefix in ``kept``."""
        count = len(tokens.kv)
        rows, positions = there([0] * count), there(torch.arange(done, done + count))
        own = self.pool.step(there([blocks]))
        picked, scores, out, lse = self.dsa(tokens, own, rows, positions)
        o = self.kda(tokens.rows, self.pool.step(there([[live], [kept]])), done, PREFIX if kept >= 0 else -1)
        found = {"picked": picked, "scores": scores, "out": out, "lse": lse, "kda": o}
        return {name: value.cpu() for name, value in found.items()}

    def dsa(self, tokens: Tokens, own: Step, rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        scale, lengths = there(torch.tensor([0.5])), (positions + 1).int()
        latents, keys = self.pool.take("latent", DSA, own), self.pool.take("index", DSA, own)
        table, slots = own.numbers("latent", own.slots(rows, positions, "latent"))
        pages, key_slots = own.numbers("index", own.slots(rows, positions, "index"))
        latent_spec = StoreLatentSpec(latent=FP8, page=BLOCK)
        self.run("store_latent", latent_spec, there(tokens.kv), there(tokens.pe), slots, latents, scale)
        self.run("store_index_keys", StoreIndexSpec(index=POW2), there(tokens.key), key_slots, keys)
        self.pool.put("latent", DSA, own, latents)
        self.pool.put("index", DSA, own, keys)
        none = there(torch.zeros(*tokens.weights.shape, 0, dtype=torch.uint8))
        query = (there(tokens.query), none, there(tokens.weights))
        picked, scores = self.run("indexer_topk", SELECT, *query, keys, pages, rows, lengths)
        named = {"block_table": table, "row_req": rows}
        out, lse = self.run("sparse_mla", ATTEND, there(tokens.q), latents, picked, scale, **named)
        return picked, scores, out, lse

    def kda(self, rows: Rows, own: Step, done: int, keep: int) -> Tensor:
        conv, state = self.pool.take("conv", KDA, own), self.pool.take("recurrent", KDA, own)
        live, kept = own.table[:1, 0].contiguous(), own.table[1:, 0].contiguous()
        count = len(rows)
        places = (live, there([0, count]), there(torch.tensor([done > 0])), there([keep]), kept)
        y = self.run("kda_conv", KDA_SPEC, there(rows.x), there(self.layer.weight), conv, *places)
        q, k, v = y.unflatten(1, (3, HEADS, DIM)).unbind(1)
        assert self.layer.A_log is not None
        assert self.layer.dt_bias is not None
        gate = (there(rows.raw_g), there(rows.raw_beta), there(self.layer.A_log), there(self.layer.dt_bias))
        o: Tensor = self.run("kda_prefill", KDA_SPEC, q, k, v, *gate, state, *places)
        self.pool.put("conv", KDA, own, conv)
        self.pool.put("recurrent", KDA, own, state)
        return o


def test_a_request_that_finds_a_prefix_gets_the_bits_of_one_that_computed_it() -> None:
    prefix, first, second = Tokens.random(PREFIX, 1), Tokens.random(FIRST, 2), Tokens.random(SECOND, 3)

    alone = Engine()
    alone.step(prefix, 0, [5, 0, 9], live=4)
    expected = alone.step(second, PREFIX, [5, 0, 9], live=4)

    shared = Engine(plans=alone.plans)
    shared.step(prefix.followed_by(first), 0, [3, 1, 8], live=6, kept=7)
    shared.pool.copy(there([7]), there([2]))
    found = shared.step(second, PREFIX, [3, 1, 4], live=2)

    assert (found["picked"][:, 0] >= 0).all()
    assert (found["picked"] < PREFIX).any()
    assert (found["picked"] >= PREFIX).any()
    for name, value in expected.items():
        assert equal(found[name], value), name

    # Blocks in the wrong order, or a state that is not the prefix's, would be seen.
    shared.pool.copy(there([6]), there([5]))
    wrong = shared.step(second, PREFIX, [1, 3, 4], live=5)
    for name in ("picked", "out", "kda"):
        assert not equal(wrong[name], expected[name]), name


def test_a_step_of_the_dsa_layer_stays_in_the_trace() -> None:
    """torch-xla counts what it computes on the host under the name that torch has for it."""
    engine, tokens = Engine(), Tokens.random(SECOND, 4)
    torch_xla.sync(wait=True)
    metrics.clear_all()
    own = engine.pool.step(there([[3, 1, 4]]))
    engine.dsa(tokens, own, there([0] * SECOND), there(torch.arange(SECOND)))
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []


def test_pallas_kernels_advance_states_that_were_taken_from_the_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(custom_call, "on_tpu", lambda: True)
    engine, rows = Engine(), Rows.random(KDA_SPEC, SECOND, 5)
    own = engine.pool.step(there([[b] for b in range(SECOND)]))
    state, layer = engine.pool.take("recurrent", KDA, own), engine.layer
    plan = hal.plan("kda_decode", KDA_SPEC, LIMITS, device="xla", implementation="tpu.pallas")
    assert layer.A_log is not None
    assert layer.dt_bias is not None
    gate = (there(rows.raw_g), there(rows.raw_beta), there(layer.A_log), there(layer.dt_bias))
    plan.run(there(rows.q), there(rows.k), there(rows.v), *gate, state, own.table[:, 0].contiguous())
    engine.pool.put("recurrent", KDA, own, state)
    assert "@tpu_custom_call" in xla_model.get_stablehlo([engine.pool.blocks])
