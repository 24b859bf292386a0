"""The automatic implementation of a composite: a backend's own operators, planned one by one and joined.

Every backend has one candidate ``<backend>.composed`` for each composite. It covers every legal Spec; what
its parts don't cover is said by their own selection when they are planned. Imports no torch until it builds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kimi_hal import formats
from kimi_hal.dispatch import contract, signatures
from kimi_hal.dispatch.contract import BuildContext, Capability, Implementation, Properties, Sizes
from kimi_hal.errors import KimiHalError, SelectionError
from kimi_hal.ops.composites import Part, ordered_weights, part_specs
from kimi_hal.ops.operator import Operator, get

if TYPE_CHECKING:
    from kimi_hal.dispatch.selection import Choice

NAME = "composed"
#: Bytes that a part's share of the step buffer is aligned to.
ALIGN = 256
#: The stages of graph capture, from the least.
CAPTURES = contract.CAPTURES
#: What stands between the parts is deterministic; where it is matrix products, their bits depend on the batch.
GLUE = Properties(deterministic=True, batch_invariant=True, capture="full", concurrent=True)
GLUE_OF = {"moe_layer": Properties(deterministic=True, capture="full", concurrent=True)}

PlanPart = Callable[[Part], Any]


def implementation(op: Operator) -> Implementation:
    """Return the declaration of ``<backend>.composed`` for one composite; it is the same for every backend."""
    return _implementation(op, formats.names())


@cache
def _implementation(op: Operator, known_formats: tuple[str, ...]) -> Implementation:
    from kimi_hal.reference.capabilities import coverage

    properties = GLUE_OF.get(op.name, GLUE)
    return Implementation(
        operator=op.name,
        name=NAME,
        build="kimi_hal.dispatch.composed:build",
        capabilities=tuple(Capability(("*",), c, properties=properties) for c in coverage(op.spec_type)),
        prepare="kimi_hal.dispatch.composed:prepare" if op.name == "dsa_decode" else None,
        weights="kimi_hal.dispatch.composed:weights" if "weights" in op.args else None,
        source=("kimi_hal/dispatch/composed.py", "kimi_hal/reference/composites.py"),
        execution=("native", "portable", "interpreted"),
    )


def plan_parts(op: Operator, spec: Any, limits: Any, backend: str, plan_part: PlanPart) -> dict[str, Any]:
    """Plan every part of a composite; ``plan_part`` plans one, on ``backend`` and under the same policy.

    Raises:
        SelectionError: a part cannot be planned; names the composite and the part.
    """
    plans = {}
    for name, part in part_specs(op.name, spec, limits).items():
        try:
            plans[name] = plan_part(part)
        except KimiHalError as error:
            raise needs(op, backend, name, error) from error
    return plans


def needs(op: Operator, backend: str, part: str, error: KimiHalError) -> SelectionError:
    """Return the error of a composition of which a part cannot be planned."""
    return SelectionError(f"{op.name}: {backend}.{NAME} needs {part}: {error}")


def properties(op: Operator, plans: Mapping[str, Any]) -> Properties:
    """Return what a composition promises: what all of its parts and what stands between them promise."""
    parts = [GLUE_OF.get(op.name, GLUE), *(plan.properties for plan in plans.values())]
    ids = [plan.properties.numerics_id for plan in plans.values()]
    return Properties(
        deterministic=all(p.deterministic for p in parts),
        batch_invariant=all(p.batch_invariant for p in parts),
        capture=min((p.capture for p in parts), key=CAPTURES.index),
        static_rows=any(p.static_rows for p in parts),
        concurrent=all(p.concurrent for p in parts),
        tie_rule="any" if any(p.tie_rule == "any" for p in parts) else "contract",
        numerics_id="+".join(ids) if all(ids) else "",
    )


def sizes(plans: Mapping[str, Any]) -> Sizes:
    """Return the bytes of a composition: steps behind each other, one workspace that the parts use in turn.

    What a part keeps is allocated by the part's own plan and not counted again.
    """
    return Sizes(
        workspace=max((plan.workspace_bytes for plan in plans.values()), default=0),
        step=sum(_aligned(plan.step_bytes) for plan in plans.values()),
    )


def completed(op: Operator, choice: Choice, plans: Mapping[str, Any]) -> Choice:
    """Return the choice of a composition with what its planned parts promise and round."""
    capability = dataclasses.replace(choice.capability, properties=properties(op, plans))
    rounded = sorted({name for plan in plans.values() for name in plan.implementation.numerics})
    return dataclasses.replace(
        choice,
        capability=capability,
        implementation=dataclasses.replace(choice.implementation, numerics=tuple(rounded)),
        conforming=all(plan.choice.conforming for plan in plans.values()),
    )


def source_hash(own: str, plans: Mapping[str, Any]) -> str:
    """Return the source hash of a composition: its own, and which implementation of which source is each part."""
    parts = [f"{plan.name} {plan.source_hash}" for plan in plans.values()]
    return hashlib.sha256("\n".join([own, *parts]).encode()).hexdigest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Buffers:
    """Which bytes of the step buffer, and whether the workspace, each part gets.

    Args:
        steps: part -> first byte and length of its share.
        workspaces: the parts that take a workspace.
    """

    steps: Mapping[str, tuple[int, int]]
    workspaces: tuple[str, ...]

    @classmethod
    def of(cls, plans: Mapping[str, Any]) -> Buffers:
        """Lay the parts' steps behind each other."""
        steps, start = {}, 0
        for name, plan in plans.items():
            if plan.step_bytes:
                steps[name] = (start, plan.step_bytes)
                start += _aligned(plan.step_bytes)
        return cls(steps, tuple(n for n in plans if "workspace" in get(n).signature.parameters))

    def share(self, name: str, step: Any) -> Any:
        """Return a part's share of the step buffer."""
        start, length = self.steps[name]
        return step[start : start + length]

    def more(self, step: Any | None, workspace: Any | None) -> dict[str, dict[str, Any]]:
        """Return the keyword operands of one call, by part."""
        found: dict[str, dict[str, Any]] = {}
        if workspace is not None:
            found = {name: {"workspace": workspace} for name in self.workspaces}
        if step is not None:
            for name in self.steps:
                found.setdefault(name, {})["step"] = self.share(name, step)
        return found


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Join the planned parts (``ctx.parts``) into the composite's run function."""
    return _BUILDERS[ctx.operator](ctx)


def _runs(ctx: BuildContext) -> dict[str, Callable[..., Any]]:
    return {name: plan.run for name, plan in ctx.parts.items()}


def _joined(ctx: BuildContext, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the operator's signature that checks a call, then gives it to ``call``.

    ``call`` takes the operands by name, the parts' share of step and workspace (``more``), and all arguments.
    """
    op, buffers, check = get(ctx.operator), Buffers.of(ctx.parts), ctx.check

    def checked(given: dict[str, Any]) -> Any:
        check(**given)
        operands = {name: given[name] for name in op.args}
        return call(operands, buffers.more(given.get("step"), given["workspace"]), given)

    return signatures.function(op, op.name, checked)


def _dsa_decode(ctx: BuildContext) -> Callable[..., Any]:
    from kimi_hal.reference.composites import compose_dsa_decode

    group = ctx.group if ctx.spec.dcp.world > 1 else None
    runs = _runs(ctx)
    body = compose_dsa_decode(ctx.spec, runs, group)
    last = "merge_attn_states" if group is not None else "sparse_mla"

    def call(operands: dict[str, Any], more: dict[str, dict[str, Any]], given: dict[str, Any]) -> Any:
        more.setdefault(last, {}).update(out=given["out"], lse_out=given["lse_out"])
        return body(**operands, more=more)

    run = _joined(ctx, call)
    flag = getattr(runs.get("topk_merge"), "flag", None)
    if flag is not None:  # rows that a captured merge could not answer
        run.flag = flag  # type: ignore[attr-defined]
    return run


def _kda_layer_decode(ctx: BuildContext) -> Callable[..., Any]:
    import torch

    from kimi_hal.reference.composites import compose_kda_layer_decode

    return _joined(ctx, _rounded(compose_kda_layer_decode(ctx.spec, _runs(ctx), torch.float32)))


def _moe_layer(ctx: BuildContext) -> Callable[..., Any]:
    import torch

    from kimi_hal.reference.composites import compose_moe_layer

    group = ctx.group if ctx.spec.tp > 1 else None
    body = compose_moe_layer(ctx.spec, _runs(ctx), group, wide=torch.float32, narrow=torch.bfloat16)
    return _joined(ctx, _rounded(body))


def _rounded(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a body whose one result is rounded once, to bf16 or into the caller's ``out``."""

    def call(operands: dict[str, Any], more: dict[str, dict[str, Any]], given: dict[str, Any]) -> Any:
        result, out = body(**operands, more=more), given["out"]
        return result.bfloat16() if out is None else out.copy_(result)

    return call


_BUILDERS: Mapping[str, Callable[[BuildContext], Callable[..., Any]]] = {
    "dsa_decode": _dsa_decode,
    "kda_layer_decode": _kda_layer_decode,
    "moe_layer": _moe_layer,
}


def prepare(ctx: BuildContext) -> Callable[..., None]:
    """Return the function that fills the step buffer of ``dsa_decode``: each part's own prepare, in its share.

    It takes both block tables, ``fn(row_req, row_len, latent_table, index_table, *, step, …)``.
    """
    buffers, plans = Buffers.of(ctx.parts), ctx.parts

    def fill(
        row_req: Any,
        row_len: Any,
        latent_table: Any,
        index_table: Any,
        *,
        step: Any,
        cu_seqlens: Any = None,
        cu_seqlens_host: Any = None,
        max_context: Any = None,
    ) -> None:
        tables = {"indexer_topk": index_table, "sparse_mla": latent_table}
        hints = {"cu_seqlens": cu_seqlens, "cu_seqlens_host": cu_seqlens_host, "max_context": max_context}
        for name in tables.keys() & buffers.steps.keys():
            plans[name].prepare(row_req, row_len, tables[name], step=buffers.share(name, step), **hints)

    return fill


def weights(ctx: BuildContext, *, donate: bool = False, **checkpoint: Any) -> list[Any]:
    """Return the checkpoint's tensors in the order that the composition takes, experts prepared by their part.

    Raises:
        ContractError: names that are missing or not known.
    """
    return ordered_weights(
        ctx.operator,
        ctx.spec,
        checkpoint,
        lambda **experts: ctx.parts["moe_experts"].weights(donate=donate, **experts),
    )
