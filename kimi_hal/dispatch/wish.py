"""Who decides which backend an operator gets: an argument, a variable, or the plugins' probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.loader import Registry, find
from kimi_hal.errors import SelectionError
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

REFERENCE = "reference"


@dataclass(frozen=True)
class Request:
    """What a plan asks for.

    Args:
        op: the operator.
        spec: its Spec.
        limits: the sizes, or ``None`` where they are not known.
        device: a torch device (``"cuda:1"``), of which only the type counts.
        implementation: the argument ``implementation=``, or ``None``.
        settings: the variables.
    """

    op: Operator
    spec: Spec
    limits: Limits | None
    device: str
    implementation: str | None
    settings: Settings

    @property
    def device_type(self) -> str:
        """Return the torch device type."""
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class Wish:
    """Which backend, or which implementation, is asked for, and by whom.

    Args:
        source: as it would be typed: ``"KIMI_HAL_BACKEND=nvidia"``; for ``auto`` what it found.
        backend: its name; ``None`` = ``auto`` found no device.
        implementation: the full name where one was given: it is that one or an error.
        auto: the probes decided.
    """

    source: str
    backend: str | None
    implementation: str | None = None
    auto: bool = False


def wish(request: Request, registry: Registry) -> Wish:
    """Return the highest authority's wish.

    Raises:
        UnknownNameError: no such backend or implementation.
        PluginError: the plugin that is asked for cannot be used.
        SelectionError: ``auto`` found two accelerators.
    """
    named = request.implementation
    override = request.settings.override(request.op.name)
    if named is not None:
        return Wish(f"implementation={named!r}", _owner(registry, request, named), named)
    if override is not None:
        source = f"KIMI_HAL_OPS={request.op.name}={override}"
        return Wish(source, _owner(registry, request, override), override)
    return of_backend(request.settings, request.device_type, registry)


def of_backend(settings: Settings, device: str, registry: Registry) -> Wish:
    """Return which backend the settings lead to on a torch device where no implementation is named.

    Raises:
        UnknownNameError: no such backend.
        PluginError: the backend that is asked for cannot be used.
        SelectionError: ``auto`` found two accelerators.
    """
    if settings.backend != "auto":
        name = registry.get(settings.backend).name
        return Wish(f"KIMI_HAL_BACKEND={name}", name)
    return _auto(device.partition(":")[0], registry)


def _owner(registry: Registry, request: Request, full_name: str) -> str:
    loaded, _ = find(registry, request.op.name, full_name)
    return loaded.name


def _auto(device: str, registry: Registry) -> Wish:
    """Ask the probes. The reference is the CPU's own backend unless a plugin claims the CPU."""
    probes = {name: registry.probe(name) for name in sorted(registry.backends) if name != REFERENCE}
    on_cpu = {name for name in probes if registry.backends[name].backend.torch_device == "cpu"}
    here = [n for n, p in probes.items() if p.present and (n in on_cpu) == (device == "cpu")]
    if len(here) > 1:
        raise SelectionError(_two({name: probes[name] for name in here}))
    if here:
        return Wish(f"auto found {_devices(probes[here[0]])}", here[0], auto=True)
    if device == "cpu":
        return Wish("auto found no plugin that claims the CPU", REFERENCE, auto=True)
    return Wish(f"auto found no device ({_nothing(probes, registry)})", None, auto=True)


def _devices(probe: Probe) -> str:
    return f"{probe.devices[0]} ({probe.arch})" if probe.devices else probe.arch


def _two(here: Mapping[str, Probe]) -> str:
    listed = " and ".join(f"{name} ({', '.join(p.devices) or p.arch})" for name, p in here.items())
    claims = [device for probe in here.values() for device in probe.devices]
    shared = sorted({device for device in claims if claims.count(device) > 1})
    both = f" Both claim {', '.join(map(repr, shared))}." if shared else ""
    names = " or ".join(f"KIMI_HAL_BACKEND={name}" for name in here)
    return f"auto found {len(here)} accelerators: {listed}.{both} Name one: {names}"


def _nothing(probes: Mapping[str, Probe], registry: Registry) -> str:
    seen = [f"{name}: {probe.why}" for name, probe in probes.items()]
    seen += [f"{n}: {f.message}" for n, f in sorted(registry.failures.items()) if n not in probes]
    return "; ".join(seen) or "no plugin is installed"
