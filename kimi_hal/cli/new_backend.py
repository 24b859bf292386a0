"""``kimi-hal new-backend NAME``: write a vendor's plugin package that installs, runs and passes the suite.

What it writes is the files under ``templates/backend``, with the backend's names filled in.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template

import click

from kimi_hal import __version__
from kimi_hal.dispatch import points
from kimi_hal.dispatch.validation import name_problems
from kimi_hal.errors import KimiHalError
from kimi_hal.settings import VARIABLES, prefix

#: Where a template's text goes; the path is a template too.
FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    ".github/workflows/ci.yml": "ci.yml.tmpl",
    "$package/__init__.py": "init.py.tmpl",
    "$package/plugin.py": "plugin.py.tmpl",
    "$package/implementations.py": "implementations.py.tmpl",
    "$package/kernels.py": "kernels.py.tmpl",
    "tests/test_plugin.py": "test_plugin.py.tmpl",
    "tests/test_conformance.py": "test_conformance.py.tmpl",
}

#: No plugin's name: what ``KIMI_HAL_BACKEND`` says otherwise, and this project's own distributions.
RESERVED = ("auto", "reference", "conformance")
#: Letters of a name: a file's may have 255 bytes, with what stands around it.
LONGEST = 64


class NewBackendError(KimiHalError):
    """A name that no backend can have, or a folder that is in use."""


@click.command(name="new-backend")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to write it; default: kimi-hal-NAME in this folder.",
)
def command(name: str, directory: Path | None) -> None:
    """Write a backend package for the device NAME: installable, with two operators, tests and a CI file."""
    folder = directory or Path(distribution(name))
    written = write(name, folder)
    click.echo(f"{distribution(name)}: backend {name}, {len(written)} files in {folder}")
    for path in written:
        click.echo(f"  {path.relative_to(folder)}")
    click.echo("Next:")
    for line in next_steps(name, folder):
        click.echo(f"  {line}")


def write(name: str, folder: Path) -> list[Path]:
    """Write the package of a backend.

    Args:
        name: the backend's name.
        folder: made with its parents if it is not there; must be empty if it is.

    Returns:
        The files, in the order of ``FILES``.

    Raises:
        NewBackendError: the name cannot be a backend's (all reasons together), the folder is in use, or it
            cannot be written.
    """
    for problems in (problems_of_name(name), problems_of_folder(folder)):
        found = list(problems)
        if found:
            raise NewBackendError("; ".join(found))
    names = names_of(name)
    templates = importlib.resources.files(__package__) / "templates" / "backend"
    written = []
    try:
        for path, template in FILES.items():
            target = folder / Template(path).substitute(names)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            target.write_text(Template(text).substitute(names), encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise NewBackendError(f"{folder} cannot be written: {error.strerror or error}") from error
    return written


def names_of(name: str) -> Mapping[str, str]:
    """Return what the templates call the backend, and the versions of kimi-hal that it is written for."""
    major, minor, *_ = __version__.split(".")
    return {
        "name": name,
        "package": package(name),
        "distribution": distribution(name),
        "oldest": f"{major}.{minor}",
        "next": f"{major}.{int(minor) + 1}",
    }


def package(name: str) -> str:
    """Return the import name of a backend's package."""
    return f"kimi_hal_{name}"


def distribution(name: str) -> str:
    """Return the name that pip installs a backend by."""
    return f"kimi-hal-{name.replace('_', '-')}"


def problems_of_name(name: str) -> Iterator[str]:
    """Yield why a name cannot be a new backend's: its form, or who has it."""
    if name in RESERVED:
        yield f"the name {name!r} is kimi-hal's own; choose your device's"
        return
    form = list(name_problems(name)) or list(_distribution_problems(name))
    if form:
        yield "; ".join(form) + _suggestion(name)
        return
    yield from _taken(name)


def _distribution_problems(name: str) -> Iterator[str]:
    """Yield why no distribution can be called after this name (PEP 508: it ends with a letter or digit)."""
    if len(name) > LONGEST:
        yield f"the name has {len(name)} letters, {LONGEST} at most fit the names of files and variables"
    if name.endswith("_") or "__" in name:
        yield (
            f"the name {name!r} must not end with an underscore or hold two in a row, "
            f"since pip would call it {distribution(name)}"
        )


def _suggestion(name: str) -> str:
    proposed = re.sub(r"[^a-z0-9]+", "_", name.lower()).lstrip("_0123456789").rstrip("_")
    if not proposed or proposed == name or list(name_problems(proposed)):
        return ""
    return f"; try {proposed!r}"


def _taken(name: str) -> Iterator[str]:
    point = next(iter(points.found().select(name=name)), None)
    if point is not None:
        who = points.distribution(point)
        yield (
            f"a backend {name!r} is installed{f', {who}' if who else ''}; choose another name, "
            f"or first: pip uninstall {who.partition(' ')[0] or distribution(name)}"
        )
    elif importlib.util.find_spec(package(name)) is not None:
        yield f"a package {package(name)} can be imported already; choose another name"
    for variable in VARIABLES:
        if variable.startswith(prefix(name)):
            yield (
                f"variables of a backend {name!r} begin with {prefix(name)}, as kimi-hal's own {variable} does; "
                "choose another name"
            )


def problems_of_folder(folder: Path) -> Iterator[str]:
    """Yield why a package cannot be written there: nothing is ever overwritten."""
    if folder.exists() and not folder.is_dir():
        yield f"{folder} is a file; choose another place with --directory"
    elif folder.is_dir() and any(folder.iterdir()):
        yield f"{folder} is not empty, and nothing is overwritten; choose another place with --directory"


def next_steps(name: str, folder: Path) -> Iterator[str]:
    """Yield the commands that install, list and check the new backend without its device."""
    yield f"pip install -e {folder}[test]"
    yield "kimi-hal list"
    yield f"kimi-hal conformance run --backend {name} --execution interpreted --repeats 1"
    yield f"pytest {folder}"
