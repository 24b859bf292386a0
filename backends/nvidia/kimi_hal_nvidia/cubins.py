"""Where the compiled kernels are, and from which sources: a cubin is kept for each source and architecture."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kimi_hal.errors import PluginError

HERE = Path(__file__).parent
SOURCES, KEPT = HERE / "kernels", HERE / "cubins"
MANIFEST = KEPT / "manifest.json"

#: Architecture as a probe names it -> target of the code, which is this architecture's own.
TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}
#: What every form of selection includes.
SELECTION = (
    "together.cuh",
    "copies.cuh",
    "halves.cuh",
    "selection.cuh",
    "order.cuh",
    "block.cuh",
    "shards.cuh",
)
#: What every form of scores includes.
SCORING = (
    "scoring.cuh",
    "copies.cuh",
    "elements.cuh",
    "products.cuh",
    "places.cuh",
    "block.cuh",
    "shards.cuh",
)
#: Sources that are compiled, each with what it includes.
STEMS = {
    "topk_short": ("held.cuh", *SELECTION),
    "topk_whole": ("held.cuh", *SELECTION),
    "topk_team": ("held.cuh", *SELECTION),
    "topk_wide": ("slices.cuh", *SELECTION),
    "topk_many": ("slices.cuh", *SELECTION),
    "index_scores_fp8": ("scores.cuh", *SCORING),
    "index_scores_fp8_sum": ("sums.cuh", *SCORING),
    "index_scores_fp4": ("scores.cuh", *SCORING),
    "sparse_mla": (
        "few.cuh",
        "copies.cuh",
        "latents.cuh",
        "meeting.cuh",
        "relay.cuh",
        "tall.cuh",
        "block.cuh",
    ),
    "merge_states": ("block.cuh",),
    "quantize_query": ("block.cuh",),
}


#: Sources that only some architectures have instructions for, with those.
ONLY = {"index_scores_fp8_sum": ("sm_90",)}


def kept() -> list[tuple[str, str]]:
    """Return every source with each architecture that it is compiled for."""
    return [(stem, arch) for stem in STEMS for arch in ONLY.get(stem, tuple(TARGETS))]


def file_name(stem: str, arch: str) -> str:
    """Return the name of a kept cubin."""
    return f"{stem}.{TARGETS[arch]}.cubin"


def source_hash(stem: str) -> str:
    """Return a hash of a source and of all that it includes."""
    digest = hashlib.sha256()
    for name in (f"{stem}.cu", *STEMS[stem]):
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes())
    return digest.hexdigest()


def manifest() -> dict[str, dict[str, str]]:
    """Return what is kept: file name -> hashes of the file and of its source, and the compiler."""
    found: dict[str, dict[str, str]] = json.loads(MANIFEST.read_text())
    return found


def read(stem: str, arch: str) -> bytes:
    """Return the code of a source for an architecture.

    Raises:
        PluginError: there is none.
    """
    if arch not in TARGETS:
        raise PluginError("nvidia", f"no kernel was compiled for {arch}, only for {', '.join(TARGETS)}")
    path = KEPT / file_name(stem, arch)
    if not path.is_file():
        raise PluginError(
            "nvidia",
            f"{path.name} is missing: reinstall kimi-hal-nvidia, or run python -m kimi_hal_nvidia.build",
        )
    return path.read_bytes()
