"""Check what a plugin declares, and collect every problem as a sentence with the nearest legal name."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kimi_hal.dispatch import composed, contract, versions
from kimi_hal.dispatch.contract import (
    API_VERSION,
    Backend,
    Capability,
    Implementation,
    Preference,
    Probe,
    Properties,
    Split,
    Target,
    TensorCap,
)
from kimi_hal.dispatch.fields import leaves
from kimi_hal.dispatch.tuned_tables import variable
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.errors import nearest
from kimi_hal.settings import prefix

NAME = re.compile(r"[a-z][a-z0-9_]*")
REFERENCE_TO = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: ``auto`` means no plugin, ``composed`` is what the core makes of a backend's parts.
RESERVED_BACKENDS, RESERVED_IMPLEMENTATIONS = ("auto",), (composed.NAME,)
CONTIGUOUS = ("last", "heads", "all")
TIE_RULES, WRITER_TIES = ("contract", "any"), ("even", "away", "down")
#: Spec field -> kind of the format that it names.
FORMAT_FIELDS = {"index": "index", "latent": "latent", "weights": "experts"}


def name_problems(name: str) -> Iterator[str]:
    """Yield why a name cannot be a backend's: it stands in variables and before a dot."""
    if name in RESERVED_BACKENDS:
        yield f"the name {name!r} is reserved"
    if not NAME.fullmatch(name):
        yield f"the name {name!r} must be lower-case letters, digits and underscores, a letter first"


def backend_problems(name: str, backend: Any) -> Iterator[str]:
    """Yield what is wrong with the answer of a plugin's hook. ``name`` is its entry point's."""
    if not isinstance(backend, Backend):
        yield f"kimi_hal_backend() must return a Backend, it returned {_kind(backend)}"
        return
    if backend.api_version != API_VERSION:
        yield _versions(backend.api_version)
        return  # other fields may have changed their meaning
    if backend.name != name:
        yield f"its entry point is named {name!r} but its Backend {backend.name!r}; they must be equal"
    yield from _types("Backend", backend, Backend)
    yield from _references("Backend", backend, ("probe", "implementations", "device", "formats"))
    for table in ("variables", "removed_variables"):
        for declared in getattr(backend, table):
            if not declared.startswith(prefix(name)):
                yield f"{table}: {declared!r} must begin with {prefix(name)}"
    if backend.tables and variable(name) not in backend.variables:
        yield f"tables: a backend that ships some declares {variable(name)} in variables"
    yield from _composites(backend.overrides_composites)
    yield from _targets(backend.targets)


def implementations_problems(declared: Any) -> Iterator[str]:
    """Yield what is wrong with a backend's tuple of implementations, each problem with its place."""
    if not isinstance(declared, tuple):
        yield f"implementations must be a tuple of Implementation, got {_kind(declared)}"
        return
    seen: set[tuple[str, str]] = set()
    for i, item in enumerate(declared):
        if not isinstance(item, Implementation):
            yield f"implementations[{i}] must be an Implementation, got {_kind(item)}"
            continue
        where = f"{item.operator}.{item.name}"
        if (item.operator, item.name) in seen:
            yield f"{where} is declared twice"
        seen.add((item.operator, item.name))
        yield from (f"{where}: {problem}" for problem in _implementation(item))


def probe_problems(probe: Any) -> Iterator[str]:
    """Yield what is wrong with a probe's answer."""
    if not isinstance(probe, Probe):
        yield f"must return a Probe, it returned {_kind(probe)}"
        return
    yield from _types("Probe", probe, Probe)
    if probe.present and not probe.arch:
        yield "a present device needs `arch`, its architecture as capabilities name it"
    if not probe.present and not probe.why:
        yield "an absent device needs `why`, what was looked for and not found"


def _versions(theirs: Any) -> str:
    which = (
        "a newer kimi-hal" if isinstance(theirs, int) and theirs > API_VERSION else "a newer version of it"
    )
    return f"it was written for plugin API {theirs!r}, this kimi-hal has API {API_VERSION}; install {which}"


def _implementation(item: Implementation) -> Iterator[str]:
    from kimi_hal.ops import OPERATORS

    if not NAME.fullmatch(item.name):
        yield f"the name {item.name!r} must be lower-case letters, digits and underscores, a letter first"
    if item.name in RESERVED_IMPLEMENTATIONS:
        yield f"the name {item.name!r} is reserved"
    wrong = list(_types("Implementation", item, Implementation))
    yield from wrong
    if wrong:
        return
    yield from _references("", item, ("build", "prepare", "weights", "size", "compile", "configurations"))
    yield from _members("execution", item.execution, contract.EXECUTIONS)
    yield from _members("numerics", item.numerics, contract.NUMERICS)
    if not item.execution:
        yield "execution is empty; it needs one of " + ", ".join(contract.EXECUTIONS)
    if not item.capabilities:
        yield "capabilities is empty; it covers nothing"
    if item.operator not in OPERATORS:
        yield f"unknown operator {item.operator!r}{nearest(item.operator, OPERATORS)}"
        return
    for i, capability in enumerate(item.capabilities):
        yield from (f"capabilities[{i}]: {p}" for p in _capability(item.operator, capability))
    yield from _splits(item)
    for i, preference in enumerate(item.preferences):
        yield from (f"preferences[{i}]: {p}" for p in _preference(item.operator, preference))


def _capability(operator: str, item: Capability) -> Iterator[str]:
    from kimi_hal.ops import get

    op = get(operator)
    wrong = list(_types("Capability", item, Capability))
    yield from wrong
    if wrong:
        return
    if not item.arch:
        yield "arch is empty; name architectures, or '*' for portable code"
    yield from _domains("spec", item.spec, op.spec_type)
    yield from _limits(item.limits)
    for name, tensor in item.tensors.items():
        if name not in op.args:
            yield f"tensors: {operator} has no argument {name!r}{nearest(name, op.args)}"
        yield from (f"tensors[{name!r}]: {p}" for p in _tensor(tensor))
    yield from _properties(item.properties)
    for name, specifier in item.requires.items():
        if problem := versions.problem(specifier):
            yield f"requires[{name!r}]: {problem}"
    if item.checkpoint_multiple < 1:
        yield f"checkpoint_multiple must be 1 or more, got {item.checkpoint_multiple}"


def _splits(item: Implementation) -> Iterator[str]:
    """Yield splits that say nothing, that contradict each other, or for what no capability covers."""
    covered = {arch for capability in item.capabilities for arch in _names(capability.arch)}
    seen: set[str] = set()
    for i, split in enumerate(item.split):
        where = f"split[{i}]"
        wrong = list(_types("Split", split, Split))
        yield from (f"{where}: {problem}" for problem in wrong)
        if wrong:
            continue
        if not split.arch or not split.parts:
            yield f"{where}: it needs architectures and what each compute unit does there"
        for arch in split.arch:
            if arch in seen:
                yield f"{where}: {arch!r} has a split already"
            elif arch not in covered and "*" not in (arch, *covered):
                yield f"{where}: no capability covers {arch!r}{nearest(arch, covered)}"
            seen.add(arch)


def _names(arch: Any) -> tuple[str, ...]:
    return tuple(a for a in arch if isinstance(a, str)) if isinstance(arch, tuple) else ()


def _preference(operator: str, item: Preference) -> Iterator[str]:
    from kimi_hal.ops import get

    wrong = list(_types("Preference", item, Preference))
    yield from wrong
    if not wrong:
        yield from _domains("spec", item.spec, get(operator).spec_type)
        yield from _limits(item.limits)


def _domains(what: str, named: Mapping[str, Any], record: Any) -> Iterator[str]:
    known = leaves(record)
    for name, domain in named.items():
        if name not in known:
            yield f"{what}: {record.__name__} has no field {name!r}{nearest(name, known)}"
        elif not isinstance(domain, OneOf | Range):
            yield f"{what}[{name!r}] must be OneOf or Range, got {_kind(domain)}"
        elif wrong := list(_form(domain)):
            yield from (f"{what}[{name!r}]: {p}" for p in wrong)
        else:
            yield from (f"{what}[{name!r}]: {p}" for p in _values(name, domain, known[name].legal))


def _form(domain: Any) -> Iterator[str]:
    """Yield why nothing could be looked up in a domain, or nothing is in it."""
    if isinstance(domain, OneOf):
        values: Any = domain.values
        if not isinstance(values, tuple):
            yield f"OneOf takes a tuple of values, got {_kind(values)}"
        elif not values:
            yield "OneOf is empty; it covers nothing"
        return
    numbers = [n for n in (domain.low, domain.high) if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) < 2 or not domain.low <= domain.high:
        yield f"Range takes a low number and one as high or higher, got {domain.low!r} and {domain.high!r}"
    if not _fits(domain.multiple, int) or domain.multiple < 1:
        yield f"Range.multiple must be a whole number, 1 or more, got {domain.multiple!r}"


def _limits(named: Mapping[str, Any]) -> Iterator[str]:
    from kimi_hal.ops.spec import Limits

    return _domains("limits", named, Limits)


def _values(name: str, domain: Domain, legal: Domain | None) -> Iterator[str]:
    """Yield listed values that no Spec can hold: a claim that could never be tested."""
    if not isinstance(domain, OneOf):
        return
    for value in domain.values:
        if legal is not None and value is not None and value not in legal:
            listed = legal.values if isinstance(legal, OneOf) and isinstance(value, str) else ()
            yield f"{value!r} is not {legal}{nearest(str(value), [v for v in listed if isinstance(v, str)])}"
        yield from _format(name, value)


def _format(name: str, value: Any) -> Iterator[str]:
    from kimi_hal import formats

    *parents, last = name.split(".")
    kind = FORMAT_FIELDS.get(last)
    if kind is not None and isinstance(value, str) and parents[-1:] != ["dcp"]:
        yield from formats.problems(kind, value)


def _tensor(item: Any) -> Iterator[str]:
    if not isinstance(item, TensorCap):
        yield f"must be a TensorCap, got {_kind(item)}"
        return
    yield from _types("TensorCap", item, TensorCap)
    yield from _members("contiguous", item.contiguous, CONTIGUOUS)
    if isinstance(item.align, int) and (item.align < 1 or item.align & (item.align - 1)):
        yield f"align must be a power of two, got {item.align}"


def _properties(item: Properties) -> Iterator[str]:
    yield from _types("Properties", item, Properties)
    yield from _members("capture", (item.capture,), contract.CAPTURES)
    yield from _members("tie_rule", (item.tie_rule,), TIE_RULES)
    yield from _members("writer_tie", (item.writer_tie,), WRITER_TIES)


def _composites(named: Iterable[str]) -> Iterator[str]:
    from kimi_hal.ops import OPERATORS

    known = [op.name for op in OPERATORS.values() if op.composite]
    for name in named:
        if name not in known:
            yield f"overrides_composites: unknown composite {name!r}{nearest(name, known)}"


def _targets(declared: Any) -> Iterator[str]:
    seen: set[str] = set()
    for target in declared if isinstance(declared, tuple) else ():
        if not isinstance(target, Target):
            continue
        wrong = list(_types("Target", target, Target))
        yield from (f"targets: {problem}" for problem in wrong)
        if not wrong and not (target.name and target.arch):
            yield f"targets: a target needs a name and an arch, got {target!r}"
        if not wrong and target.name in seen:
            yield f"targets: {target.name!r} is declared twice"
        seen.add(str(target.name))


def _members(what: str, given: Iterable[Any], legal: Iterable[str]) -> Iterator[str]:
    legal = tuple(legal)
    for value in given:
        if value not in legal:
            yield f"{what}: unknown {value!r}{nearest(str(value), legal) or '.'} Possible: {', '.join(legal)}"


def _references(what: str, item: Any, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = getattr(item, name)
        if isinstance(value, str) and not REFERENCE_TO.fullmatch(value):
            label = f"{what}.{name}" if what else name
            yield f"{label}={value!r} is not of the form 'module:function'"


def _types(what: str, item: Any, cls: type) -> Iterator[str]:
    """Yield fields whose value has another type than the contract says; what a mapping holds, if text."""
    for name, hint in typing.get_type_hints(cls).items():
        value = getattr(item, name)
        if not _fits(value, hint):
            yield f"{what}.{name} must be {_hint(hint)}, got {_kind(value)}"


def _fits(value: Any, hint: Any) -> bool:
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arms[0]) for v in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        texts = (
            [*value, *(value.values() if arms[1] is str else ())] if isinstance(value, Mapping) else [None]
        )
        return all(isinstance(text, str) for text in texts)
    if arms:  # str | None, OneOf | Range
        return any(_fits(value, arm) for arm in arms)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _hint(hint: Any) -> str:
    text = getattr(hint, "__name__", None) if not typing.get_args(hint) else None
    return text or re.sub(r"\w+\.", "", str(hint))


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]
