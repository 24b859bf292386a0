"""Run a mutant as the field's tests would, on plain inputs and by the field's tolerances."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats, ops
from kimi_hal.ops.operator import Operator, torch_dtype
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal_conformance.mutants.builders import clone
from kimi_hal_conformance.mutants.clone import Clone
from kimi_hal_conformance.mutants.mutant import Mutant
from kimi_hal_conformance.mutants.plain import KEYS, PLAIN, Plain
from kimi_hal_conformance.mutants.tolerances import FIELD
from kimi_hal_conformance.properties import USES
from kimi_hal_conformance.ranks import at_rank

#: Standard deviations of the inputs: one, and a tenth, which hides what a bound on absolute errors lets pass.
SPREADS = (1.0, 0.1)
#: Selections, which are compared by what they select.
SELECTED = ("topk_select", "indexer_topk")

#: What is no tolerance: nothing differs.
SAME = "same"

Modules = Callable[[str], ModuleType]
Pair = tuple[str, Tensor, Tensor]


def accepted(mutant: Mutant, seed: int = 0) -> dict[str, tuple[str, ...]]:
    """Return by operator, or by area, the tolerances that take the mutant for right on plain inputs."""
    if not mutant.operators:
        return {area: tuple(sorted(_taking(mutant, area))) for area in mutant.areas}
    return {name: tuple(sorted(_accepting(mutant, name, seed))) for name in mutant.operators}


def _taking(mutant: Mutant, area: str) -> Iterator[str]:
    """Yield the tolerances that take the ordinary use of an area for right; ``SAME`` where nothing differs."""
    copy = Clone(f"kimi_hal_plain_{mutant.id}", None, mutant)
    right, wrong = USES[area](real), USES[area](copy.module)
    if not isinstance(right, Tensor) or not isinstance(wrong, Tensor):
        yield from (SAME,) if right == wrong else ()
        return
    for name, tolerance in FIELD.items():
        if tolerance(wrong.double(), right.double()):
            yield name
    if torch.equal(wrong, right):
        yield SAME


def real(name: str) -> ModuleType:
    """Import a module of the core itself."""
    return importlib.import_module(f"kimi_hal.{name}")


def _accepting(mutant: Mutant, operator: str, seed: int) -> Iterator[str]:
    by_spread = [
        [pair for draw in PLAIN[operator] for pair in compared(mutant, operator, draw, spread, seed)]
        for spread in SPREADS
    ]
    for name, tolerance in FIELD.items():
        if any(all(tolerance(got, wanted) for _, got, wanted in pairs) for pairs in by_spread):
            yield name


def compared(mutant: Mutant, operator: str, draw: Any, spread: float, seed: int) -> list[Pair]:
    """Return what the mutant gave beside what is right, as float64."""
    plain = draw(torch.Generator().manual_seed(seed), spread)
    op = ops.get(operator)
    wrong = results(op, plain, clone(mutant.id).module)
    right = results(op, plain, real)
    return [(name, got.double(), right[name].double()) for name, got in wrong.items()]


def results(op: Operator, plain: Plain, modules: Modules) -> dict[str, Tensor]:
    """Return what an implementation's tests would compare."""
    if not plain.ranks:
        return one(op, plain.spec, plain.operands, modules)

    def rank(group: LoopbackGroup) -> dict[str, Tensor]:
        own = group.rank()
        return one(op, at_rank(plain.spec, own), plain.ranks[own], modules, group)

    found = LoopbackGroup.run(len(plain.ranks), rank)
    return {f"rank {i} {name}": value for i, answer in enumerate(found) for name, value in answer.items()}


def one(
    op: Operator, spec: Any, operands: Mapping[str, Any], modules: Modules, group: LoopbackGroup | None = None
) -> dict[str, Tensor]:
    """Call the reference function of some modules on copies of the operands."""
    given = {name: _copy(value) for name, value in operands.items()}
    if op.name == "kda_commit":
        return committed(spec, given, modules)
    if op.name == "prepare_moe_weights":
        return used(spec, given, modules)
    context = {"group": group} if op.grouped else {}
    outputs = _call(modules, op, spec, given, context)
    found = {
        out.keyword: value.to(torch_dtype(out.dtype_name(spec)))
        for out, value in zip(op.outs, outputs, strict=True)
    }
    if op.name in SELECTED:
        return {"selected": _selected(op, spec, given, found["out"])}
    if op.name == "quantize_index_query":
        fmt = formats.index(spec.index)
        return {"folded": fmt.decode_query(found["q_out"], None) * found["weights_out"][..., None]}
    if op.name == "moe_route":
        routes = torch.zeros_like(given["logits"])
        return {"routes": routes.scatter(1, found["ids_out"].long().clamp(min=0), found["weights_out"])}
    return found | {name: _readable(spec, name, given[name]) for name in op.mutated if name != "records"}


def _call(
    modules: Modules, op: Operator, spec: Any, given: Mapping[str, Any], context: Any
) -> tuple[Any, ...]:
    outputs = getattr(modules(f"reference.{op.family}"), op.name)(spec, **given, **context)
    return outputs if isinstance(outputs, tuple) else (outputs,) if op.outs else ()


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _readable(spec: Any, name: str, buffer: Tensor) -> Tensor:
    """Return a cache's values, and any other buffer as it is."""
    if name != "cache":
        return buffer
    if hasattr(spec, "latent"):
        slots = torch.arange(buffer.shape[0] * spec.page)
        return formats.latent(spec.latent).read(buffer, spec.page, slots, torch.ones(1))
    return formats.index(spec.index).read_pages(buffer)


def _selected(op: Operator, spec: Any, given: Mapping[str, Any], index: Tensor) -> Tensor:
    """Return the right scores of what was selected."""
    scores = given.get("scores")
    if scores is None:
        from kimi_hal.ops.indexer import IndexerSpec
        from kimi_hal.reference.indexer import indexer_logits

        scores = indexer_logits(IndexerSpec(index=spec.index), **given)[:, :KEYS]
    return scores.gather(1, index.long().clamp(min=0)).masked_fill(index < 0, -torch.inf)


def committed(spec: Any, given: dict[str, Any], modules: Modules) -> dict[str, Tensor]:
    """Verify, then commit every row, and return the states."""
    kda = modules("reference.kda")
    kda.kda_verify(spec, **given)
    lists = ([given[name]] for name in ("conv_state", "state", "records", "A_log", "dt_bias"))
    accepted_rows = given["cu_seqlens"].diff().int()
    kda.kda_commit(spec, *lists, given["state_ids"], accepted_rows)
    return {name: given[name] for name in ("conv_state", "state")}


def used(spec: Any, given: dict[str, Any], modules: Modules) -> dict[str, Tensor]:
    """Prepare weights and return what experts make of them."""
    prepared = modules("reference.moe").prepare_moe_weights(spec, **given)
    plain = PLAIN["moe_experts"][0](torch.Generator().manual_seed(1), 1.0)
    operands = {**plain.operands, "weights": prepared}
    return one(ops.get("moe_experts"), spec, operands, real)
