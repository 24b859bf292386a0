"""A vendor's plugin as it is installed: modules and a dist-info folder, found by this process and its children."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PLUGIN = """
from kimi_hal.dispatch.contract import API_VERSION, Backend, Capability, Implementation, OneOf, Probe, Range
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.ops import get
from kimi_hal.reference.capabilities import coverage, implementation


@hookimpl
def kimi_hal_backend():
    return Backend(
        name="{name}",
        version="1.0",
        api_version=API_VERSION,
        probe="{name}_plugin:probe",
        implementations="{name}_plugin:IMPLEMENTATIONS",
        device="{device}",
        torch_device="cpu",
    )


def probe():
    return Probe(present=True, arch="{name}1", devices=("The {name} one",), facts={{"{name}-driver": "5.1"}})


def covering(operator, name, **fields):
    capabilities = tuple(Capability(("*",), covered) for covered in coverage(get(operator).spec_type))
    fields = {{"capabilities": capabilities, **fields}}
    return Implementation(operator, name, build="{name}_kernels:" + name, **fields)


"""


def write(
    folder: Path,
    name: str,
    implementations: str,
    kernels: str,
    device: str = "kimi_hal.dispatch.device:HostDevice",
) -> None:
    """Write a plugin distribution; ``implementations`` is the source that defines ``IMPLEMENTATIONS``."""
    head = PLUGIN.format(name=name, device=device)
    (folder / f"{name}_plugin.py").write_text(head + textwrap.dedent(implementations))
    (folder / f"{name}_kernels.py").write_text(textwrap.dedent(kernels))
    info = folder / f"kimi_hal_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kimi-hal-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kimi_hal]\n{name} = {name}_plugin\n")


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Let this process and every child find what is in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield
