"""Builds the activation file: text, encoder, integers, router, decay parameters; at most 12 MiB."""

from __future__ import annotations

import hashlib
import json
import platform
import zlib
from pathlib import Path

import torch
from torch import Tensor

from kimi_hal.errors import KimiHalError
from kimi_hal.workload import activations_path, file
from kimi_hal.workload.reader import Workload
from kimi_hal_conformance.workload import cache, decay, integers, package, router, text
from kimi_hal_conformance.workload.encoder import Encoder
from kimi_hal_conformance.workload.progress import bar
from kimi_hal_conformance.workload.text import Corpus
from kimi_hal_conformance.workload.tokens import Tokens, tokenize, window

TOKENS = 32768
SEED = 31
#: The third of the encoder's six layers: two below it have mixed the context in.
LAYER = 2
#: The heads of it that make the index keys. These look for tokens alike in meaning; others of its heads look
#: for a place in the window of 510 tokens, which means nothing in a longer text.
HEADS = (4, 6, 9, 10)
LIMIT = 12 << 20
#: Changes when the same parameters would give other contents.
RECIPE = 1


def activations(tokens: int = TOKENS, seed: int = SEED, folder: Path | None = None) -> Path:
    """Build the activation file, or find it in the cache.

    Args:
        tokens: length of the context.
        seed: of the maps and of whatever the encoder has no counterpart of.
        folder: where to keep it; default the cache, where ``kimi_hal.workload.load`` looks.

    Returns:
        The file's path; ``activations.safetensors`` beside it points at it.

    Raises:
        KimiHalError: the encoder's package or the library's sources are missing, the text is too short, or
            the file would exceed 12 MiB.
    """
    link = (folder or activations_path().parent) / activations_path().name
    corpus = text.read()
    pieces = window(tokenize(corpus.content, tokens), corpus.content, tokens)
    corpus = corpus.until(int(pieces.start[-1] + pieces.length[-1]))
    made_by = _parameters(tokens, seed, corpus)
    path = link.with_name(f"activations-{cache.key(made_by)}.safetensors")
    with cache.locked(link.parent):
        if not path.is_file():
            cache.write(path, _file(corpus, pieces, seed, made_by))
        cache.publish(path, link)
    return path


def _parameters(tokens: int, seed: int, corpus: Corpus) -> dict[str, str | int]:
    return {
        "format": file.FORMAT,
        "recipe": RECIPE,
        "model": package.version(),
        "text_sha256": corpus.sha256,
        "tokens": tokens,
        "seed": seed,
        "layer": LAYER,
        "heads": json.dumps(HEADS),
    }


def _file(corpus: Corpus, pieces: Tokens, seed: int, made_by: dict[str, str | int]) -> bytes:
    tensors = _tensors(Encoder(), corpus, pieces, seed)
    metadata = {name: str(value) for name, value in made_by.items()} | _provenance(corpus)
    workload = Workload(tensors, metadata)
    tensors["router.bias"] = _bias(workload)
    data = file.encode(tensors, metadata | {"expansion_sha256": workload.expansion_sha256()})
    if len(data) > LIMIT:
        fits = len(pieces.ids) * LIMIT // len(data) // 512 * 512
        raise KimiHalError(
            f"a workload of {len(pieces.ids):,} tokens takes {len(data) / 2**20:.1f} MiB, more than "
            f"{LIMIT >> 20}; ask for fewer: --tokens {fits}"
        )
    return data


def _tensors(encoder: Encoder, corpus: Corpus, pieces: Tokens, seed: int) -> dict[str, Tensor]:
    with bar("encoder", len(pieces.ids)) as advance:
        states = encoder.hidden(pieces.ids, LAYER, advance)
    return {
        **integers.hidden(states),
        **integers.projections(encoder, LAYER),
        **router.directions(states, pieces.ids, seed),
        "router.bias": torch.zeros(0),
        **decay.parameters(seed),
        "token.ids": pieces.ids.to(torch.int16),
        "token.start": pieces.start.to(torch.int32),
        "token.length": pieces.length.to(torch.int16),
        "text.zlib": torch.frombuffer(
            bytearray(zlib.compress(corpus.content.encode(), level=9)), dtype=torch.uint8
        ),
    }


def _bias(workload: Workload) -> Tensor:
    rows = range(0, workload.context, -(-workload.context // router.ROWS))
    with bar("balancing the router", router.STEPS) as advance:
        return router.balance(workload.router_logits(rows), advance)


def _provenance(corpus: Corpus) -> dict[str, str]:
    weights = (package.folder() / "model.safetensors").read_bytes()
    return {
        "files": json.dumps(corpus.files),
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
