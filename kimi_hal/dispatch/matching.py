"""Compare what is asked with what a capability covers. Every refusal is a reason; none ends the search.

Closed world: a Spec field that a capability does not name is covered at its default only. ``None``, where it
is the default, is always covered. An optional record is covered when it is ``None``, and otherwise when the
capability names a field below it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.dispatch import fields, versions
from kimi_hal.dispatch.contract import Capability, Preference, TensorCap
from kimi_hal.domain import Domain
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec


@dataclass(frozen=True)
class Target:
    """Where an implementation would run.

    Args:
        arch: the probe's architecture; ``""`` where it is foreign.
        facts: the probe's facts.
        foreign: there is no such device, or the code runs away from it (interpreted, portable).
        probed: names that the probe finds on a device; where it is foreign they are not required.
    """

    arch: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False
    probed: tuple[str, ...] = ()


def refusals(
    op: Operator, spec: Spec, limits: Limits | None, capability: Capability, target: Target
) -> Iterator[str]:
    """Yield every reason why a capability does not cover this request."""
    yield from _arch(capability.arch, target)
    yield from _spec(spec, capability.spec)
    yield from _tensors(op, spec, capability.tensors)
    yield from _limits(limits, capability.limits)
    if capability.properties.static_rows and not (limits and limits.row_buckets):
        yield "it needs Limits.row_buckets, the row counts to compile for"
    yield from unmet(capability.requires, target)


def prefers(preference: Preference, spec: Spec, limits: Limits | None, target: Target) -> bool:
    """Tell whether a preference is about this request. A field that it does not name may be anything.

    Away from its device, code has no architecture, and a preference for any one counts.
    """
    found = fields.values(spec)
    sizes = fields.values(limits) if limits else {}
    return (
        (target.foreign or "*" in preference.arch or target.arch in preference.arch)
        and all(name in found and found[name] in domain for name, domain in preference.spec.items())
        and all(name in sizes and _within(sizes[name], domain) for name, domain in preference.limits.items())
    )


def _arch(covered: tuple[str, ...], target: Target) -> Iterator[str]:
    if not target.foreign and "*" not in covered and target.arch not in covered:
        yield f"arch {target.arch} is not {' | '.join(covered)}"


def _spec(spec: Spec, covered: Mapping[str, Domain]) -> Iterator[str]:
    known = fields.leaves(type(spec))
    for name, value in fields.values(spec).items():
        leaf = known[name]
        if value == leaf.default and (value is None or name not in covered):
            continue
        if leaf.record is not None:
            yield from _presence(leaf, value, covered)
        elif name in covered and value not in covered[name]:
            yield f"{name}={value!r} is not {covered[name]}"
        elif name not in covered:
            yield f"{name}={value!r} is not covered" + _default(leaf)


def _presence(leaf: fields.Leaf, value: Any, covered: Mapping[str, Domain]) -> Iterator[str]:
    below = any(name.startswith(leaf.name + ".") for name in covered)
    if value is None and not (leaf.name in covered and None in covered[leaf.name]):
        yield f"{leaf.name}=None is not covered"
    if value is not None and not below:
        yield f"{leaf.name} is given; it is not covered" + _default(leaf)


def _default(leaf: fields.Leaf) -> str:
    return "" if leaf.default is fields.REQUIRED else f", only its default {leaf.default!r}"


def _tensors(op: Operator, spec: Spec, covered: Mapping[str, TensorCap]) -> Iterator[str]:
    for name, tensor in covered.items():
        asked = op.args[name].dtypes(spec)
        if tensor.dtypes and not set(tensor.dtypes) & set(asked):
            yield f"{name}: {' | '.join(tensor.dtypes)} only, Spec asks {' or '.join(asked)}"


def _limits(limits: Limits | None, covered: Mapping[str, Domain]) -> Iterator[str]:
    sizes = fields.values(limits) if limits else {}
    for name, domain in covered.items():
        if name not in sizes:
            yield f"{name} is unknown without Limits; it covers {domain}"
        elif not _within(sizes[name], domain):
            yield f"{name}={sizes[name]!r} is not {domain}"


def _within(value: Any, domain: Domain) -> bool:
    """A tuple (``row_buckets``) is within a domain when all its items are."""
    return all(v in domain for v in value) if isinstance(value, tuple) else value in domain


def unmet(required: Mapping[str, str], target: Target) -> Iterator[str]:
    """Yield what is not installed, or not in a version that is asked for."""
    for name, specifier in required.items():
        version = target.facts.get(name) or distribution(name)
        if version is None:
            if not (target.foreign and name in target.probed):
                yield f"{name} is not installed; it needs {name}{specifier}"
            continue
        try:
            if not versions.satisfies(version, specifier):
                yield f"{name} {version} is installed; it needs {name}{specifier}"
        except ValueError as error:
            yield f"{name}{specifier} cannot be checked: {error}"


def distribution(name: str) -> str | None:
    """Return the version of an installed distribution, or ``None``. Imports nothing of it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
