"""all-MiniLM-L6-v2's forward pass in plain torch: a six-layer BERT, 384 wide, 12 heads of 32.

Source: the BERT paper (post-norm layers, exact GELU, learned positions) and the package's ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kimi_hal_conformance.workload import package
from kimi_hal_conformance.workload.tokens import tokenize

LAYERS, HEADS, HEAD_DIM, WIDTH, INNER = 6, 12, 32, 384, 1536
WINDOW = 512
BEGIN, END = 101, 102
NORM_EPS = 1e-12
#: Windows that go through a layer together.
BATCH = 8


class Encoder:
    """The encoder's weights, float32, and what is computed with them."""

    def __init__(self, folder: Path | None = None) -> None:
        """Read the weights; ``folder`` holds ``model.safetensors``, default the installed package."""
        from safetensors.torch import load_file

        self.folder = folder or package.folder()
        self.weights = load_file(self.folder / "model.safetensors")

    def weight(self, layer: int, name: str) -> Tensor:
        """Return a layer's tensor, such as ``weight(2, "attention.self.query.bias")``."""
        return self.weights[f"encoder.layer.{layer}.{name}"]

    @torch.inference_mode()
    def hidden(self, ids: Tensor, layers: int, advance: Callable[[int], None] | None = None) -> Tensor:
        """Return the hidden states of a long text after ``layers`` layers, ``[S, 384]`` float32.

        The text goes through in windows of 510 tokens between the two marks that the encoder was trained
        with; the marks' own states are dropped. Positions begin anew in each window.

        Args:
            ids: ``[S]`` vocabulary ids.
            layers: 0 (embeddings) to 6.
            advance: called with the number of tokens done since the last call.
        """
        parts = []
        for batch in _batches(ids):
            x = self._embed(batch)
            for layer in range(layers):
                x = self._layer(layer, x)
            parts.append(x[:, 1:-1].flatten(0, 1))
            if advance:
                advance(len(parts[-1]))
        return torch.cat(parts) if parts else torch.empty(0, WIDTH)

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str]) -> Tensor:
        """Return sentence embeddings ``[N, 384]``: the mean over a sentence's states, of length 1."""
        return torch.cat([self._sentence(sentence) for sentence in sentences])

    def _sentence(self, sentence: str) -> Tensor:
        ids = tokenize(sentence, folder=self.folder).ids[: WINDOW - 2]
        x = self._embed(_marked(ids[None]))
        for layer in range(LAYERS):
            x = self._layer(layer, x)
        return F.normalize(x.mean(1), dim=-1)

    def _embed(self, ids: Tensor) -> Tensor:
        w = self.weights
        x = F.embedding(ids, w["embeddings.word_embeddings.weight"])
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        return F.layer_norm(
            x, (WIDTH,), w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], NORM_EPS
        )

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        x = self._norm(layer, "attention.output", x + self._attend(layer, x))
        inner = F.gelu(self._linear(layer, "intermediate.dense", x))
        return self._norm(layer, "output", x + self._linear(layer, "output.dense", inner))

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        query, key, value = (self._heads(layer, name, x) for name in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self._linear(layer, "attention.output.dense", mixed.transpose(1, 2).flatten(2))

    def _heads(self, layer: int, name: str, x: Tensor) -> Tensor:
        wide = self._linear(layer, f"attention.self.{name}", x)
        return wide.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(layer, f"{name}.weight"), self.weight(layer, f"{name}.bias"))

    def _norm(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weight(layer, f"{name}.LayerNorm.{part}") for part in ("weight", "bias"))
        return F.layer_norm(x, (WIDTH,), weight, bias, NORM_EPS)


def _batches(ids: Tensor) -> Iterator[Tensor]:
    """Yield windows ``[B, ≤512]`` with their marks; the last, shorter window goes alone."""
    inner = WINDOW - 2
    whole = len(ids) // inner * inner
    windows = ids[:whole].view(-1, inner)
    for at in range(0, len(windows), BATCH):
        yield _marked(windows[at : at + BATCH])
    if len(ids) > whole:
        yield _marked(ids[None, whole:])


def _marked(ids: Tensor) -> Tensor:
    return F.pad(F.pad(ids, (1, 0), value=BEGIN), (0, 1), value=END)
