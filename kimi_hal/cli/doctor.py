"""``kimi-hal doctor``: what is installed, what was found, what is wrong, and what to type."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping

import click

from kimi_hal import __version__
from kimi_hal.dispatch.loader import Loaded, Registry, load, problems_of_settings
from kimi_hal.dispatch.policy import source_hash
from kimi_hal.dispatch.tuned import Table
from kimi_hal.errors import KimiHalError
from kimi_hal.settings import Settings, variables

NOT_INSTALLED = "not installed"
#: Distributions that some part of the project uses where they are present.
LIBRARIES = ("torch", "pluggy", "triton", "click", "rich", "msgspec", "safetensors", "kimi-hal-conformance")
#: The closing line where there is no problem, and what it does not speak of.
RIGHT = "nothing is wrong; kernels' modules were not imported, which a plan does"


@click.command(name="doctor")
@click.option("--probe/--no-probe", default=True, help="Ask each plugin whether its device is here.")
@click.option("--traceback", is_flag=True, help="Show what a broken plugin raised.")
@click.pass_context
def command(ctx: click.Context, probe: bool, traceback: bool) -> None:
    """Say what is installed, what was found and what is wrong; exit status 1 if something is wrong."""
    click.echo(
        f"kimi-hal {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    for name in LIBRARIES:
        click.echo(f"  {name}: {version(name)}")
    problems: list[str] = []
    registry = load(dataclasses.replace(check_settings(problems), backend="auto"), strict=False)
    problems += problems_of_settings(registry)
    for name in sorted(registry.backends):
        click.echo(describe(registry, name, probe))
        if probe:
            problems += tell_tables(registry, name)
    for name, failure in sorted(registry.failures.items()):
        problems.append(f"plugin {name}: {failure.message}")
        if traceback and failure.traceback:
            problems.append(failure.traceback)
    for problem in problems:
        click.secho(f"problem: {problem}", fg="red")
    click.echo(RIGHT if not problems else f"{len(problems)} to mend")
    ctx.exit(1 if problems else 0)


def version(distribution: str) -> str:
    """Return an installed version, or say that it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def check_settings(problems: list[str]) -> Settings:
    """Print the variables that are set, add what is wrong with them, and return what they say."""
    for name, value in sorted(variables(os.environ).items()):
        click.echo(f"  {name}={value}")
    try:
        return Settings.from_env()
    except KimiHalError as error:
        problems.append(str(error))
        return Settings()


def describe(registry: Registry, name: str, probe: bool) -> str:
    """Return one line about a backend: version, how much it implements, its device, and what it lacks here."""
    loaded = registry.backends[name]
    count = len(loaded.implementations)
    line = f"backend {name} {loaded.backend.version}: {count} implementation{'' if count == 1 else 's'}"
    if not probe:
        return line
    found = registry.probe(name)
    lacks = "".join(
        f"; {count} cannot run: {what} not found" for what, count in lacking(loaded, found.facts).items()
    )
    if not found.present:
        return f"{line}{lacks}; no device: {found.why}"
    facts = "".join(f", {key} {value}" for key, value in found.facts.items())
    return f"{line}{lacks}; {', '.join(found.devices) or 'present'} ({found.arch}){facts}"


def tell_tables(registry: Registry, name: str) -> list[str]:
    """Print a line for each table of measurements of a backend, and return what is wrong with the chosen one."""
    try:
        found = registry.tables(name)
    except KimiHalError as error:
        return [str(error)]
    if found.used is not None:
        table = found.used
        changed = sorted(set(stale(registry.backends[name], table)))
        since = f"; changed since: {', '.join(changed)}" if changed else ""
        click.echo(
            f"  table {table.label}: {len(table.lines)} lines, {table.device}, {table.measured}{since}"
        )
    for label, why in found.unused.items():
        click.echo(f"  table {label}: not used: {why}")
    return []


def stale(loaded: Loaded, table: Table) -> Iterator[str]:
    """Yield what a table ranks and whose sources are not those that were measured."""
    for line in table.lines:
        for entry in line.ranking:
            own = [i for i in loaded.of(line.operator) if i.name == entry.implementation]
            if not own or not source_hash(loaded.backend, own[0]).startswith(entry.source):
                yield f"{line.operator}={loaded.name}.{entry.implementation}"


def lacking(loaded: Loaded, facts: Mapping[str, str]) -> Counter[str]:
    """Return how many implementations need in each of their capabilities what is not here, by what they need.

    That is a library that is not installed, or a fact (a driver, say) that the probe did not find. Neither is an
    error: nobody needs every library.
    """
    found: Counter[str] = Counter()
    for implementation in loaded.implementations:
        absent = [
            [f"{name}{wanted}" for name, wanted in c.requires.items() if name not in facts and not here(name)]
            for c in implementation.capabilities
        ]
        if absent and all(absent):
            found[absent[0][0]] += 1
    return found


def here(distribution: str) -> bool:
    """Tell whether a distribution is installed. Imports nothing."""
    return version(distribution) != NOT_INSTALLED
