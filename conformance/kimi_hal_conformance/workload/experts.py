"""Experts at K3.1's full width from the encoder's feed-forward weights, as a checkpoint shard in K3's naming.

The encoder's layers have an inner width of 1536 over 384, the experts 3072 over 3584. Expert e is layer
e mod 6, widened by the map that widens hidden states, so that on a widened state every gate row computes what
the trained neuron computes on the narrow one:

- w1 (gate): the 1536 neurons, then the same ones negated.
- w3 (up): the same neurons rolled by 1 + 10·⌊e/6⌋ places, twice: each gate neuron gates another one.
- w2 (down): the layer's output weights, twice; the second half negated where ⌊e/6⌋ is odd.

So no two of 896 experts compute the same. K3's experts have no biases: the encoder's are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from kimi_hal.errors import KimiHalError
from kimi_hal.model import K3_1_PRO
from kimi_hal.workload import experts_path, file, maps
from kimi_hal_conformance.workload import cache, package, shard
from kimi_hal_conformance.workload.encoder import LAYERS, WIDTH, Encoder
from kimi_hal_conformance.workload.progress import bar

#: One rank of 32 under expert parallelism.
EXPERTS = K3_1_PRO.experts // 32
#: K3's layer 0 is dense; the experts stand in the first layer that has some.
PREFIX = "model.layers.1.block_sparse_moe.experts"
QUANTISER = "compressed-tensors"
SCHEME = "MXFP4A16"
ROLL = 10
MATRICES = ("w1", "w2", "w3")


class Experts:
    """The experts before quantisation, made one matrix at a time."""

    def __init__(self, encoder: Encoder, seed: int) -> None:
        """Take the encoder's weights; ``seed`` is that of the activations, whose map the experts share."""
        self.encoder = encoder
        self.map = maps.isometry(seed, "hidden", WIDTH, K3_1_PRO.moe_hidden)

    def matrix(self, expert: int, name: str) -> Tensor:
        """Return ``w1``, ``w3 [3072, 3584]`` or ``w2 [3584, 3072]`` of one expert, bfloat16."""
        layer, turn = expert % LAYERS, expert // LAYERS
        if name == "w2":
            weight = self.encoder.weight(layer, "output.dense.weight")
            both = torch.cat([weight, -weight if turn % 2 else weight], 1)
            return self.map.expand(both.T.double(), self.map.gain, torch.bfloat16).T.contiguous()
        weight = self.encoder.weight(layer, "intermediate.dense.weight")
        both = (
            torch.cat([weight, -weight]) if name == "w1" else torch.cat([weight.roll(1 + ROLL * turn, 0)] * 2)
        )
        return self.map.expand(both.double(), 1 / self.map.gain, torch.bfloat16)


class Quantiser:
    """MXFP4 as the compressed-tensors library computes and packs it."""

    @cached_property
    def scheme(self) -> object:
        """Return the library's preset for 4-bit weights in groups of 32 with 16-bit activations."""
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

        return preset_name_to_scheme(SCHEME, ["Linear"])

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise ``[rows, K]`` bfloat16 to ``packed [rows, K/2]`` and ``scale [rows, K/32]``, uint8."""
        from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        weights = self.scheme.weights  # type: ignore[attr-defined]
        groups = weight.view(len(weight), -1, weights.group_size)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
        packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, self.scheme)
        return packed["weight_packed"], packed["weight_scale"]


def build(experts: int = EXPERTS, seed: int = 31, folder: Path | None = None) -> Path:
    """Build the shard of the first ``experts`` experts, or find it in the cache; an interrupted build resumes.

    Args:
        experts: 1 to 896; each takes 16.7 MiB and about two seconds.
        seed: that of the activations.
        folder: where to keep it; default the cache.

    Returns:
        The shard's path; ``experts.safetensors`` beside it points at it.

    Raises:
        KimiHalError: more experts than the model has, or a package is missing; says what to type.
    """
    if not 1 <= experts <= K3_1_PRO.experts:
        raise KimiHalError(
            f"{experts} experts; possible: 1 to {K3_1_PRO.experts}, --experts {EXPERTS} by default"
        )
    link = (folder or experts_path().parent) / experts_path().name
    made_by = _parameters(experts, seed)
    path = link.with_name(f"experts-{cache.key(made_by)}.safetensors")
    with cache.locked(link.parent):
        if not path.is_file():
            _write(path, experts, seed, made_by)
        cache.publish(path, link)
    return path


def _write(path: Path, experts: int, seed: int, made_by: dict[str, str | int]) -> None:
    source, quantise = Experts(Encoder(), seed), Quantiser()
    notes = {name: str(value) for name, value in made_by.items()} | {"disclaimer": file.DISCLAIMER}
    layout = shard.Layout([_shapes(e) for e in range(experts)], notes)
    with shard.Writer(path, layout) as writer, bar("experts", experts, writer.done) as advance:
        for expert in range(writer.done, experts):
            writer.add(_tensors(source, quantise, expert))
            advance(1)


def _tensors(source: Experts, quantise: Quantiser, expert: int) -> Iterator[Tensor]:
    for name in MATRICES:
        yield from quantise(source.matrix(expert, name))


def _shapes(expert: int) -> dict[str, tuple[int, int]]:
    """Return names and shapes of one expert's tensors, in the order in which they are written."""
    hidden, inner = K3_1_PRO.moe_hidden, K3_1_PRO.moe_intermediate
    shapes = {}
    for name in MATRICES:
        rows, columns = (hidden, inner) if name == "w2" else (inner, hidden)
        shapes[f"{PREFIX}.{expert}.{name}.weight_packed"] = (rows, columns // 2)
        shapes[f"{PREFIX}.{expert}.{name}.weight_scale"] = (rows, columns // 32)
    return shapes


def _parameters(experts: int, seed: int) -> dict[str, str | int]:
    try:
        quantiser = f"{QUANTISER} {metadata.version(QUANTISER)}"
    except metadata.PackageNotFoundError:
        raise KimiHalError(f"{QUANTISER} is not installed: {package.INSTALL}") from None
    return {
        "format": "pt",
        "quantization": "mxfp4-pack-quantized",
        "recipe": 1,
        "model": package.version(),
        "quantiser": quantiser,
        "experts": experts,
        "seed": seed,
    }
