"""``kimi-hal list``: the support matrix, read off the capability tables. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.dispatch.loader import Loaded, Registry, candidates, load
from kimi_hal.errors import UnknownNameError
from kimi_hal.ops import OPERATORS
from kimi_hal.ops.operator import get
from kimi_hal.settings import Settings

MARKS = {"native": "●", "portable": "◐", "interpreted": "○", "compile_only": "·"}
LEGEND = "● native  ◐ portable, anywhere  ○ interpreted, on the CPU  · compiles anywhere"


@click.command(name="list")
@click.argument("operator", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, with every capability.")
def command(operator: str | None, as_json: bool) -> None:
    """Print which backend implements which operator; with OPERATOR, what each implementation covers."""
    registry = load(Settings(), strict=False)
    if operator in registry.backends and operator not in OPERATORS:
        raise UnknownNameError(
            f"{operator!r} is a backend: `kimi-hal list` has a column for it, `kimi-hal list OPERATOR` what it covers"
        )
    names = [get(operator).name] if operator else list(OPERATORS)
    if as_json:
        click.echo(json.dumps(matrix(registry, names), indent=2))
    elif operator:
        print_details(registry, operator)
    else:
        print_matrix(registry, names)


def matrix(registry: Registry, operators: list[str]) -> dict[str, Any]:
    """Return the matrix as JSON-ready data: operator -> backend -> implementations."""
    rows = {
        name: {
            loaded.name: [describe(loaded, i) for i in available(loaded, name)]
            for loaded in columns(registry)
        }
        for name in operators
    }
    failures = {name: failure.message for name, failure in sorted(registry.failures.items())}
    return {"operators": rows, "failures": failures}


def columns(registry: Registry) -> list[Loaded]:
    """Return the backends as the matrix shows them: the reference, then the plugins by name."""
    return sorted(registry.backends.values(), key=lambda loaded: (loaded.name != "reference", loaded.name))


def available(loaded: Loaded, operator: str) -> list[Implementation]:
    """Return a backend's implementations; a composition only as far as the parts that one rank needs run."""
    needed = [part for part in get(operator).parts if not get(part).grouped]
    found = []
    for item in candidates(loaded, operator):
        ways = item.execution
        if item.name == composed.NAME:
            ways = tuple(way for way in ways if all(runs(loaded, part, way) for part in needed))
        if ways:
            found.append(dataclasses.replace(item, execution=ways))
    return found


def runs(loaded: Loaded, operator: str, execution: str) -> bool:
    """Tell whether a backend has an implementation of an operator that runs in this way."""
    return any(execution in implementation.execution for implementation in loaded.of(operator))


def targets(loaded: Loaded, implementation: Implementation) -> list[str]:
    """Return the targets that an implementation's kernels can be compiled for, without the device."""
    claimed = {arch for c in implementation.capabilities for arch in c.arch}
    found = [t.name for t in loaded.backend.targets if {t.arch, "*"} & claimed]
    return found if implementation.compile else []


def describe(loaded: Loaded, implementation: Implementation) -> dict[str, Any]:
    """Return one implementation as JSON-ready data."""
    return {
        "name": implementation.name,
        "execution": list(implementation.execution),
        "targets": targets(loaded, implementation),
        "numerics": list(implementation.numerics),
        "not_run": implementation.not_run,
        "capabilities": [covered(c) for c in implementation.capabilities],
    }


def covered(capability: Capability) -> dict[str, Any]:
    """Return one capability as JSON-ready data."""
    properties = capability.properties
    return {
        "arch": list(capability.arch),
        "spec": {field: str(domain) for field, domain in capability.spec.items()},
        "limits": {field: str(domain) for field, domain in capability.limits.items()},
        "properties": {name: getattr(properties, name) for name in properties.__dataclass_fields__},
        "requires": dict(capability.requires),
    }


def print_matrix(registry: Registry, operators: list[str]) -> None:
    """Print operators by backends; a cell names implementations with the ways in which they run."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from kimi_hal.cli.tables import print_whole

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("operator", no_wrap=True)
    for loaded in columns(registry):
        table.add_column(loaded.name, no_wrap=True)
    for name in operators:
        table.add_row(name, *(cell(loaded, name) for loaded in columns(registry)))
    console = Console()
    print_whole(table, console)
    console.print(LEGEND, highlight=False, soft_wrap=True)
    for name, failure in sorted(registry.failures.items()):
        console.print(f"plugin {name}: {failure.message}", style="red", markup=False, soft_wrap=True)


def cell(loaded: Loaded, operator: str) -> str:
    """Return one cell: the implementations and how each may run; ``–`` where there is none."""
    found = available(loaded, operator)
    return "\n".join(f"{i.name} {marks(loaded, i)}" for i in found) or "–"


def marks(loaded: Loaded, implementation: Implementation) -> str:
    """Return how an implementation may run, and whether its code can be looked at."""
    ways = {*implementation.execution} | ({"compile_only"} if targets(loaded, implementation) else set())
    return "".join(mark for way, mark in MARKS.items() if way in ways)


def needed(capability: Capability) -> str:
    """Return what a capability requires, which may be all that tells it from another."""
    listed = ", ".join(f"{name} {versions}".rstrip() for name, versions in capability.requires.items())
    return f" with {listed}" if listed else ""


def print_details(registry: Registry, operator: str) -> None:
    """Print the capabilities of every implementation of one operator."""
    for backend in sorted(registry.backends):
        loaded = registry.backends[backend]
        for implementation in available(loaded, operator):
            never = f", not run: {implementation.not_run}" if implementation.not_run else ""
            click.echo(f"{backend}.{implementation.name}: {', '.join(implementation.execution)}{never}")
            if names := targets(loaded, implementation):
                click.echo(f"  compiled for {', '.join(names)} by `kimi-hal conformance run --compile-only`")
            for capability in implementation.capabilities:
                click.echo(f"  on {', '.join(capability.arch)}{needed(capability)}")
                for field, domain in {**capability.spec, **capability.limits}.items():
                    click.echo(f"    {field}: {domain}")
