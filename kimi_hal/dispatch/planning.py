"""How a plan is made: choose, build, guard as the settings say, name by a key, compare over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch import composed, construction, keys, pairing, policy, ranks
from kimi_hal.dispatch.candidate import Candidate
from kimi_hal.dispatch.checked import checked
from kimi_hal.dispatch.construction import Built, MissingError
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.dispatch.loader import Registry, resolve
from kimi_hal.dispatch.planned import Plan
from kimi_hal.dispatch.selection import Choice, select
from kimi_hal.dispatch.shadow import Shadow, refusal, shadowed
from kimi_hal.dispatch.table import PLANS
from kimi_hal.dispatch.tuned import told
from kimi_hal.dispatch.wish import REFERENCE
from kimi_hal.errors import PluginError, SelectionError, SpecError
from kimi_hal.log import log
from kimi_hal.ops.check import Terms
from kimi_hal.ops.operator import OPERATORS, Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

if TYPE_CHECKING:
    from kimi_hal.parallel.groups import Group

Run = Callable[..., Any]

#: What ``limits=None`` stands for: a call may hold a whole context.
UNLIMITED = Limits(max_rows=1 << 20, max_reqs=1 << 16, rows_per_req=1 << 10, uniform=False)


@dataclass(frozen=True)
class Wanted:
    """What a plan is asked for; the arguments of ``plan``, resolved.

    Args:
        op: the operator.
        spec: its meaning.
        limits: the sizes.
        device: a torch device.
        group: the ranks, or ``None``.
        implementation: full name, or ``None``.
        pair: the plan whose records this one reads, or ``None``.
        settings: the variables.
        registry: the loaded backends.
        configuration: what the builder is told; ``None``: what a table of measurements says.
    """

    op: Operator
    spec: Spec
    limits: Limits
    device: str
    group: Group | None
    implementation: str | None
    pair: Plan | None
    settings: Settings
    registry: Registry
    configuration: Mapping[str, int] | None = None

    @property
    def named(self) -> str | None:
        """Return the full name that the caller or ``KIMI_HAL_OPS`` asks for."""
        return self.implementation or self.settings.override(self.op.name)


def make(wanted: Wanted) -> Plan:
    """Make a plan and keep it in the process's table; ranks of a group compare theirs, once.

    A rank that cannot plan tells the others, so that all fail together and none waits.
    """
    require_spec(wanted.op, wanted.spec)
    try:
        ranks.require(wanted.op, wanted.spec, wanted.group)
        made = _make(wanted)
    except Exception as error:
        ranks.fail(wanted.group, wanted.op.name, error)
        raise
    name = made.name + told(made.built.context.configuration)
    shared = keys.shared(wanted.op.name, wanted.spec, wanted.limits, name, made.source_hash)
    ranks.agree(wanted.group, shared)
    PLANS.add(made)
    return made


def require_spec(op: Operator, spec: Any) -> None:
    """Refuse what is not a Spec of this operator.

    Raises:
        SpecError: names the class that it takes, and what the one given is for.
    """
    if type(spec) is op.spec_type:
        return
    given = type(spec).__name__
    uses = sorted(o.name for o in OPERATORS.values() if o.spec_type is type(spec))
    meant = f", which is for {', '.join(uses)}" if uses else ""
    raise SpecError(f"{op.name} takes a {op.spec_type.__name__}, got a {given}{meant}")


def _make(wanted: Wanted) -> Plan:
    op, group = wanted.op, wanted.group
    source = pairing.writer(op, wanted.spec, wanted.limits, wanted.device, wanted.pair, PLANS)
    choice, built = _choose(wanted, source)
    if source is not None:
        pairing.check_sizes(op, source, built.context.sizes.records)
    source_hash = policy.source_hash(choice.backend, choice.implementation)
    if built.context.parts:
        choice = composed.completed(op, choice, built.context.parts)
        source_hash = composed.source_hash(source_hash, built.context.parts)
    rank = (group.rank(), group.size()) if group is not None else None
    run, unshadowed = _guarded(wanted, choice, built)
    return Plan(
        operator=op,
        spec=wanted.spec,
        limits=wanted.limits,
        device=wanted.device,
        run=run,
        key=keys.key(
            op.name,
            wanted.spec,
            wanted.limits,
            choice.full_name,
            source_hash,
            rank,
            built.context.configuration,
        ),
        source_hash=source_hash,
        group=group,
        choice=choice,
        sizes=built.context.sizes,
        settings=wanted.settings,
        built=built,
        failures={name: failure.message for name, failure in sorted(wanted.registry.failures.items())},
        unshadowed=unshadowed,
        pair=source,
    )


def _choose(wanted: Wanted, source: Plan | None) -> tuple[Choice, Built]:
    """Select and build. What misses a library is passed over, unless it was named, and the choice says so."""
    missing: dict[str, tuple[str, ...]] = {}
    registry = wanted.registry
    while True:
        try:
            choice = _select(wanted, registry, source)
        except SelectionError as error:
            if not missing:
                raise
            message = f"{wanted.op.name}: nothing that fits could be built"
            raise SelectionError(message, {**missing, **error.refusals}) from error
        try:
            built = construction.build(_place(wanted, choice), choice)
        except MissingError as error:
            if wanted.named is not None:
                raise PluginError(choice.backend.name, f"{choice.full_name}: {error}.") from error
            log.warning("%s is passed over for %s: %s", choice.full_name, wanted.op.name, error)
            missing[choice.full_name] = (str(error),)
            registry = _without(registry, choice)
            continue
        passed = tuple(Candidate(name, reasons, chosen=False) for name, reasons in missing.items())
        return dataclasses.replace(choice, candidates=(*choice.candidates, *passed)), built


def _select(wanted: Wanted, registry: Registry, source: Plan | None) -> Choice:
    choice = _selected(wanted, registry, wanted.implementation)
    if source is None or choice.implementation.records == source.implementation.records:
        return choice
    return _selected(wanted, registry, pairing.reader(wanted.op, source, registry, wanted.named))


def _selected(wanted: Wanted, registry: Registry, implementation: str | None) -> Choice:
    return select(
        wanted.op,
        wanted.spec,
        wanted.limits,
        device=wanted.device,
        implementation=implementation,
        settings=wanted.settings,
        registry=registry,
    )


def _place(wanted: Wanted, choice: Choice) -> construction.Place:
    return construction.Place(
        op=wanted.op,
        spec=wanted.spec,
        limits=wanted.limits,
        device=wanted.device,
        group=wanted.group,
        settings=wanted.registry.variables(choice.backend.name),
        configuration=choice.configuration if wanted.configuration is None else wanted.configuration,
    )


def _without(registry: Registry, choice: Choice) -> Registry:
    """Return the registry as if one implementation did not exist."""
    loaded = registry.backends[choice.backend.name]
    rest = tuple(i for i in loaded.implementations if i is not choice.implementation)
    backends = {**registry.backends, loaded.name: dataclasses.replace(loaded, implementations=rest)}
    return dataclasses.replace(registry, backends=backends)


def _guarded(wanted: Wanted, choice: Choice, built: Built) -> tuple[Run, str]:
    """Return the run function under ``KIMI_HAL_CHECK``, and why a shadow check is not made."""
    if wanted.settings.check == "args":
        terms = Terms.of(wanted.limits, built.context.sizes, choice.capability, wanted.device)
        return checked(wanted.op, wanted.spec, terms, built.run), ""
    own = choice.backend.name != REFERENCE and not built.context.parts  # parts are compared one by one
    if wanted.settings.check == "shadow" and own:
        return _shadowed(wanted, choice, built)
    return built.run, ""


def _shadowed(wanted: Wanted, choice: Choice, built: Built) -> tuple[Run, str]:
    reference = wanted.registry.get(REFERENCE).of(wanted.op.name)[0]
    why = refusal(wanted.op, choice.implementation, reference)
    if why is not None:
        log.warning("%s: KIMI_HAL_CHECK=shadow cannot compare %s: %s", wanted.op.name, choice.full_name, why)
        return built.run, why
    sizes = resolve(reference.size)(wanted.spec, wanted.limits, "") if reference.size else None
    shadow = Shadow(
        op=wanted.op,
        spec=wanted.spec,
        name=choice.full_name,
        implementation=choice.implementation,
        writer_tie=choice.capability.properties.writer_tie,
        reference=resolve(reference.build)(_unchecked(built.context)),
        records_bytes=sizes.records if sizes else 0,
        every=wanted.settings.shadow,
    )
    return shadowed(shadow, built.run), ""


def _unchecked(context: BuildContext) -> BuildContext:
    """Return the context for the reference: what it would check, the implementation has checked."""
    return dataclasses.replace(context, arch="", persistent=None, settings={}, check=lambda **operands: None)
