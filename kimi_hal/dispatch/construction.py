"""Make a chosen implementation's functions: sizes, the persistent buffer, the context, and what is built.

Whatever a plugin does wrong here is a PluginError at plan time that names the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.dispatch import composed, signatures
from kimi_hal.dispatch.contract import BuildContext, Implementation, Sizes
from kimi_hal.dispatch.loader import resolve
from kimi_hal.dispatch.selection import Choice
from kimi_hal.errors import KimiHalError, PluginError, UnknownNameError
from kimi_hal.ops import check
from kimi_hal.ops.composites import Part
from kimi_hal.ops.operator import Operator, get
from kimi_hal.ops.spec import Limits, Spec


@dataclass(frozen=True)
class Place:
    """Where and for what an implementation is built.

    Args:
        op: the operator.
        spec: its Spec.
        limits: the sizes.
        device: the torch device.
        group: the ranks, or ``None``.
        settings: the plugin's own variables that are set.
        configuration: what the builder is told.
    """

    op: Operator
    spec: Spec
    limits: Limits
    device: str
    group: Any | None
    settings: dict[str, str]
    configuration: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """What came of it."""

    context: BuildContext
    run: Callable[..., Any]
    prepare: Callable[..., None] | None


class MissingError(Exception):
    """A library that an implementation needs is not there. Another implementation may do without."""


def build(place: Place, choice: Choice) -> Built:
    """Call the builders of an implementation.

    Raises:
        MissingError: importing or building raised ImportError.
        PluginError: anything else that is raised; a size or a signature that is not the contract's.
    """
    implementation = choice.implementation
    parts = _parts(place, choice)
    sizes = composed.sizes(parts) if parts else _sizes(place, choice)
    context = BuildContext(
        operator=place.op.name,
        spec=place.spec,
        limits=place.limits,
        device=place.device,
        arch=choice.probe.arch,
        sizes=sizes,
        group=place.group,
        persistent=_persistent(place.device, choice, sizes),
        check=check.compiled(
            place.op,
            place.spec,
            place.limits,
            sizes,
            capability=choice.capability,
            device=place.device,
        ),
        settings=place.settings,
        parts=parts,
        configuration=place.configuration,
    )
    run = _call(choice, implementation.build, lambda: _found(choice, implementation.build)(context))
    wrong = list(signatures.mismatches(place.op, run))
    if wrong:
        raise PluginError(
            choice.backend.name,
            f"{implementation.build} returned a function that is not {place.op.name}{place.op.signature}: "
            f"{'; '.join(wrong)}.",
        )
    return Built(context, run, _prepare(choice, implementation, context))


def _parts(place: Place, choice: Choice) -> dict[str, Any]:
    """Plan what a composition is made of, on the same backend; nothing for any other implementation."""
    if choice.implementation.name != composed.NAME:
        return {}
    from kimi_hal.dispatch.plan import plan_part

    backend, device = choice.backend.name, place.device

    def plan(part: Part) -> Any:
        group = place.group if get(part.operator).grouped else None
        return plan_part(
            backend, part.operator, part.spec, part.limits or place.limits, device=device, group=group
        )

    return composed.plan_parts(place.op, place.spec, place.limits, backend, plan)


def _prepare(
    choice: Choice, implementation: Implementation, context: BuildContext
) -> Callable[..., None] | None:
    where = implementation.prepare
    if where is None:
        return None
    prepare: Callable[..., None] = _call(choice, where, lambda: _found(choice, where)(context))
    if not callable(prepare):
        raise PluginError(choice.backend.name, f"{where} returned {type(prepare).__name__}, not a function.")
    return prepare


def _sizes(place: Place, choice: Choice) -> Sizes:
    where = choice.implementation.size
    if where is None:
        return Sizes()
    sizes = _call(choice, where, lambda: _found(choice, where)(place.spec, place.limits, choice.probe.arch))
    if not isinstance(sizes, Sizes):
        raise PluginError(choice.backend.name, f"{where} returned {type(sizes).__name__}, not Sizes.")
    wrong = {n: b for n, b in vars(sizes).items() if isinstance(b, bool) or not isinstance(b, int) or b < 0}
    if wrong:
        listed = ", ".join(f"{name}={size!r}" for name, size in wrong.items())
        raise PluginError(
            choice.backend.name, f"{where} returned {listed}; sizes are whole bytes, 0 or more."
        )
    return sizes


def _persistent(device: str, choice: Choice, sizes: Sizes) -> Any | None:
    if not sizes.persistent:
        return None
    import torch

    keeps = f"{choice.full_name} keeps {sizes.persistent:,} bytes"
    try:
        kept = torch.zeros(sizes.persistent, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # what torch raises where memory is short, on every device
        raise PluginError(
            choice.backend.name,
            f"{keeps}, which {device} does not have free; plan with smaller Limits.",
        ) from error
    try:
        kept[-1].item()  # waits for the zeros: the plan's first call may be on another stream
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise PluginError(
            choice.backend.name,
            f"{keeps}, which could not be made zero on {device} ({first}); plan before a capture begins.",
        ) from error
    return kept


def _found(choice: Choice, where: str) -> Callable[..., Any]:
    """Return what a declaration names; a name that does not exist is the plugin's fault, not the caller's."""
    try:
        found: Callable[..., Any] = resolve(where)
    except UnknownNameError as error:
        raise PluginError(choice.backend.name, f"{where}: {error}") from error
    return found


def _call(choice: Choice, where: str, call: Callable[[], Any]) -> Any:
    """Run a plugin's code. Our own errors pass: they say what the caller did wrong."""
    try:
        return call()
    except ImportError as error:
        raise MissingError(f"{where} raised {type(error).__name__}: {error}") from error
    except (KimiHalError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a library that calls sys.exit must not end the engine
        raise PluginError(
            choice.backend.name,
            f"{where} raised {type(error).__name__}: {error}. "
            f"KIMI_HAL_OPS={choice.implementation.operator}=<another> takes another implementation.",
        ) from error
