"""Reads the routed experts of one layer from a checkpoint's safetensors shards, for one rank.

K3 names them ``….layers.{layer}.….experts.{e}.w{1,2,3}.weight_packed`` and ``.weight_scale``: w1 is the gate,
w3 the up and w2 the down projection (vLLM ``models/kimi_k3/nvidia/model.py``; compressed-tensors
``mxfp4-pack-quantized``). Only the slices that the rank needs are read, one at a time, into tensors that are
allocated once; the shards stay mapped on disk.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.errors import ContractError, FormatError, KimiHalError
from kimi_hal.ops.moe import MoESpec, expert_shapes

NAME = re.compile(
    r"(?P<prefix>(?:.+\.)?layers\.(?P<layer>\d+)\.(?:.+\.)?experts)"
    r"\.(?P<expert>\d+)\.(?P<matrix>w[123])\.(?P<kind>weight_packed|weight_scale)"
)
MATRICES, KINDS = ("w1", "w2", "w3"), ("weight_packed", "weight_scale")
INDEX = "model.safetensors.index.json"
#: Sentences of one error; a checkpoint with another group size would break every tensor of the layer.
SHOWN = 8

Source = str | Path | Iterable[str | Path]


class ExpertWeights(NamedTuple):
    """One layer's experts of one rank, in the argument order of ``prepare_moe_weights``, uint8 on the CPU."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


@dataclass(frozen=True)
class _Part:
    """Where a checkpoint tensor is, and what its header says: nothing of it has been read."""

    file: Any
    path: Path
    name: str

    @property
    def stored(self) -> Any:
        """The tensor on disk: its shape and dtype, and what an index expression reads of it."""
        return self.file.get_slice(self.name)


_Parts = dict[tuple[int, str, str], _Part]


def read_experts(
    source: Source,
    layer: int,
    spec: MoESpec,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    experts: Sequence[int] | None = None,
) -> ExpertWeights:
    """Read the experts of one layer that one rank of an expert- and tensor-parallel group holds.

    Args:
        source: a checkpoint folder, whose ``model.safetensors.index.json`` says which shards hold the layer;
            or one shard; or several.
        layer: 0-based, as in the tensors' names.
        spec: the rank's MoESpec: ``intermediate`` is its share, ``expert_offset`` and ``num_local`` say which
            experts.
        tp: tensor-parallel ranks; the checkpoint's experts are ``spec.intermediate * tp`` wide.
        tp_rank: which share: the rank's rows of w1 and of w3, its columns of w2 and of w2's scales.
        experts: global ids in local order, for a ``spec`` with an expert map; default the run of ids from
            ``expert_offset``.

    Returns:
        ``w13 [El, 2·In, Hid/2]`` (the rank's gate rows, then its up rows), ``w13_scale [El, 2·In, Hid/g]``,
        ``w2 [El, Hid, In/2]``, ``w2_scale [El, Hid, In/g]``.

    Raises:
        ContractError: a rank outside its group, or ``experts`` that are not ``num_local`` ids of the model.
        FormatError: a shard cut short; a tensor that is missing, twice there, or of another type, shape or
            group size. All reasons together, before anything is allocated.
    """
    wanted = _wanted(spec, tp, tp_rank, experts)
    paths = _shards(source, layer)
    with ExitStack() as stack:
        files = [(path, stack.enter_context(_open(path))) for path in paths]
        parts = _find(files, layer)
        _refuse(layer, list(_problems(spec, parts, wanted, tp)))
        return _read(spec, parts, wanted, tp_rank)


def _wanted(spec: MoESpec, tp: int, tp_rank: int, experts: Sequence[int] | None) -> Sequence[int]:
    reasons = []
    if not 0 <= tp_rank < tp:
        reasons.append(f"tp_rank={tp_rank} is outside tp={tp}")
    if experts is None:
        if spec.has_expert_map:
            reasons.append("experts is required by a Spec with has_expert_map=True: the ids in local order")
        experts = range(spec.expert_offset, spec.expert_offset + spec.num_local)
    try:
        experts = [operator.index(expert) for expert in experts]
    except TypeError:
        raise ContractError("read_experts", [f"experts must be ids of experts, got {experts!r}"]) from None
    if len(experts) != spec.num_local:
        reasons.append(f"experts names {len(experts)} experts, num_local={spec.num_local}")
    outside = [e for e in experts if not 0 <= e < spec.num_experts]
    if outside:
        reasons.append(f"experts names {outside[0]}, outside num_experts={spec.num_experts}")
    if reasons:
        raise ContractError("read_experts", reasons)
    return experts


def _shards(source: Source, layer: int) -> list[Path]:
    """Return the shards to open, each once, in a fixed order."""
    if not isinstance(source, str | Path):
        return sorted({Path(p) for p in source})
    folder = Path(source)
    if not folder.is_dir():
        return [folder]
    index = folder / INDEX
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise FormatError(f"{folder} holds neither {INDEX} nor any .safetensors file")
        return found
    weight_map = _weight_map(index)
    shards = sorted({folder / shard for name, shard in weight_map.items() if _layer(name) == layer})
    if not shards:
        _refuse(layer, [f"no routed experts in {index}; {_layers_known(map(_layer, weight_map))}"])
    return shards


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise FormatError(f"{index} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{index} is not a safetensors index: it has no weight_map of names") from error
    if not isinstance(weight_map, dict):
        raise FormatError(f"{index} is not a safetensors index: it has no weight_map of names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise FormatError(f"{index} is not a safetensors index: {name} is in {shard!r}, which is no file")
    return weight_map


def _layers_known(layers: Iterable[int | None]) -> str:
    known = ", ".join(map(str, sorted({layer for layer in layers if layer is not None}))) or "none"
    return f"layers that have some: {known}"


def _layer(name: str) -> int | None:
    match = NAME.fullmatch(name)
    return int(match["layer"]) if match else None


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise KimiHalError(
            "reading a checkpoint needs safetensors, which is not installed: pip install safetensors"
        ) from error
    if not path.is_file():
        raise FormatError(f"{path} does not exist; the checkpoint is incomplete or the path is another")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise FormatError(
            f"{path} is cut short or no safetensors file ({size} bytes); copy or download it again"
        ) from error


def _find(files: Iterable[tuple[Path, Any]], layer: int) -> _Parts:
    """Find the layer's expert tensors by name; a name in two shards, or two sets of experts, is an error."""
    parts: _Parts = {}
    problems, layers, prefixes = [], set(), set()
    for path, file in files:
        for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
            match = NAME.fullmatch(name)
            if not match:
                continue
            layers.add(int(match["layer"]))
            if int(match["layer"]) != layer:
                continue
            prefixes.add(match["prefix"])
            key = (int(match["expert"]), match["matrix"], match["kind"])
            if key in parts and parts[key].name == name:
                problems.append(f"{name} is in both {parts[key].path} and {path}")
            parts.setdefault(key, _Part(file, path, name))
    if len(prefixes) > 1:
        problems.append(f"two sets of experts, {' and '.join(sorted(prefixes))}")
    if not parts:
        problems.append(f"no routed experts here; {_layers_known(layers)}")
    _refuse(layer, problems)
    return parts


def _refuse(layer: int, problems: Sequence[str]) -> None:
    if problems:
        rest = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise FormatError(f"layer {layer}: " + "; ".join(problems[:SHOWN]) + rest)


def _problems(spec: MoESpec, parts: _Parts, wanted: Sequence[int], tp: int) -> Iterator[str]:
    """Yield every tensor that is missing or is not what the Spec says, from the headers alone."""
    present = {expert for expert, _, _ in parts}
    missing = [e for e in wanted if e not in present]
    if missing:
        shown = ", ".join(map(str, missing[:SHOWN])) + (", …" if len(missing) > SHOWN else "")
        yield f"{len(missing)} of {len(wanted)} experts are missing: {shown}"
    prefix = next(iter(parts.values())).name.partition(".experts.")[0]
    for expert, matrix, kind in product(wanted, MATRICES, KINDS):
        part = parts.get((expert, matrix, kind))
        if part is not None:
            yield from _part_problems(spec, part, matrix, kind, tp)
        elif expert in present:
            yield f"{prefix}.experts.{expert}.{matrix}.{kind} is missing"


def _part_problems(spec: MoESpec, part: _Part, matrix: str, kind: str, tp: int) -> Iterator[str]:
    rows, columns = spec.intermediate * tp, spec.hidden
    if matrix == "w2":
        rows, columns = columns, rows
    group = formats.experts(spec.weights).group
    width = columns // (2 if kind == "weight_packed" else group)
    dtype, shape = part.stored.get_dtype(), list(part.stored.get_shape())
    if dtype != "U8":
        yield f"{part.name} must be U8, is {dtype}"
    if shape == [rows, width]:
        return
    if kind == "weight_scale" and shape[:-1] == [rows] and shape[-1] and columns % shape[-1] == 0:
        yield (
            f"{part.name} has {shape[-1]} scales for {columns} columns, groups of {columns // shape[-1]}; "
            f"{spec.weights} has groups of {group}, {width} scales"
        )
    else:
        yield f"{part.name} must be {[rows, width]}, is {shape}"


def _read(spec: MoESpec, parts: _Parts, wanted: Sequence[int], tp_rank: int) -> ExpertWeights:
    weights = ExpertWeights(*(torch.empty(shape, dtype=torch.uint8) for shape in expert_shapes(spec)))
    for local, expert in enumerate(wanted):
        for kind, w13, w2 in zip(KINDS, weights[:2], weights[2:], strict=True):
            gate, down, up = (parts[expert, matrix, kind].stored for matrix in MATRICES)
            rows, columns = _share(spec.intermediate, tp_rank), _share(w2.shape[-1], tp_rank)
            # w1 and w3 are cut apart: one cut through their concatenation would give gates alone.
            w13[local, : spec.intermediate] = gate[rows]
            w13[local, spec.intermediate :] = up[rows]
            w2[local] = down[:, columns]
    return weights


def _share(width: int, rank: int) -> slice:
    return slice(rank * width, (rank + 1) * width)
