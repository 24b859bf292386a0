"""What surrounds the attention operators in ``minimal_engine.py``: four layers of small width, random weights.

Layers 1 and 3 are sparse attention, 0 and 2 are KDA. Of K3.1 Pro it has the widths that formats and kernels see
(512 + 64 latent, 128 index, 128 a KDA head) and fewer of everything that is counted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kimi_hal.model import K3_1_PRO

MODEL = dataclasses.replace(
    K3_1_PRO,
    name="a tiny model",
    hidden=128,
    vocabulary=512,
    layers=4,
    full_attention_layers=(1, 3),
    mla_heads=4,
    kda_heads=4,
    index_heads=8,
    topk=64,
    max_context=2048,
)
#: Letters: M hidden, H heads of all ranks, D a KDA head, I index heads.
SIZES = {"M": MODEL.hidden, "H": MODEL.kda_heads, "D": MODEL.kda_dim, "I": MODEL.index_heads}
KDA = {"qkv": "M 3 H D", "g": "M H D", "beta": "M H", "out": "H D M"}
KDA |= {"conv": "3 H D 4", "A_log": "H", "dt_bias": "H D"}
DSA = {"kv": "M 512", "pe": "M 64", "key": "M 128", "query": "M I 128", "weight": "M I"}
DSA |= {"q": "M H 576", "out": "H 512 M"}


class TinyModel:
    """The projections of one tensor-parallel rank; every rank draws the same weights and keeps its own heads."""

    def __init__(self, world: int, rank: int, device: str) -> None:
        self.world, self.rank, self.device = world, rank, device
        self.embedding, self.head = (self._draw(f"{MODEL.vocabulary} M", seed) for seed in (1, 2))
        self.layers = [self._layer(n) for n in range(MODEL.layers)]

    def _layer(self, number: int) -> dict[str, Tensor]:
        kinds = DSA if number in MODEL.full_attention_layers else KDA
        return {
            name: self._draw(dims, 100 * (number + 1) + i) for i, (name, dims) in enumerate(kinds.items())
        }

    def _draw(self, dims: str, seed: int) -> Tensor:
        letters = dims.split()
        shape = [SIZES.get(letter) or int(letter) for letter in letters]
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if "H" in letters:
            whole = whole.chunk(self.world, letters.index("H"))[self.rank].contiguous()
        if "M" in letters:
            whole = (whole * MODEL.hidden**-0.5).bfloat16().double()
        return whole.to(self.device)

    def embed(self, tokens: list[int]) -> Tensor:
        """Return ``[T, M]`` bf16."""
        return self.embedding[tokens].bfloat16()

    def logits(self, x: Tensor) -> Tensor:
        """Return ``[T, vocabulary]`` float32."""
        return multiply(normal(x), self.head.T).float()

    def kda(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Return what a KDA layer takes: x ``[T, C]``, weight ``[C, 4]``, raw_g, raw_beta, A_log, dt_bias."""
        w = self.layers[layer]
        qkv, raw_g, raw_beta = (multiply(normal(x), w[name]).bfloat16() for name in ("qkv", "g", "beta"))
        return qkv.flatten(1), w["conv"].flatten(0, 2), raw_g, raw_beta, w["A_log"], w["dt_bias"].flatten()

    def dsa(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Return what a sparse-attention layer takes: kv_c, k_pe, index key, index query, its weights, q."""
        w, x = self.layers[layer], normal(x)
        parts = (multiply(x, w[name]).bfloat16() for name in ("kv", "pe", "key", "query", "weight", "q"))
        kv, pe, key, query, weight, q = parts
        return normal(kv), pe, normal(key), query, weight, q

    def output(self, layer: int, o: Tensor) -> Tensor:
        """Return ``[T, M]`` float64: what this rank's heads ``[T, H, …]`` add to the stream."""
        return multiply(o, self.layers[layer]["out"], 2)


def multiply(x: Tensor, weight: Tensor, dims: int = 1) -> Tensor:
    """Multiply in float64, where sums of bf16 products are exact: a row's bits don't depend on its batch."""
    product: Tensor = torch.tensordot(x.double(), weight, dims)
    return product


def normal(x: Tensor) -> Tensor:
    """Return RMSNorm without a weight, bf16."""
    x = x.double()
    return (x * (x.square().mean(-1, keepdim=True) + MODEL.norm_eps).rsqrt()).bfloat16()
