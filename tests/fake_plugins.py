"""Plugins for one test: a module made on the spot and an entry point that names it. Nothing is installed."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from importlib.metadata import EntryPoint, EntryPoints

from kimi_hal.dispatch import failure, points, policy, selection
from kimi_hal.dispatch.contract import API_VERSION, Backend, Capability, Implementation, OneOf, Probe, Range
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

FP8 = "latent.fp8.e4m3fn.tensor"
SPEC = SparseMLASpec(num_heads=12, latent=FP8)
LIMITS = Limits(max_rows=256, max_reqs=64)
HERE = Probe(present=True, arch="acme2", devices=("Acme A2",), facts={"acme-driver": "5.1"})
GONE = Probe(present=False, why="/dev/acme0 is missing")


def capability(arch=("acme2",), spec=None, **fields):
    covered = {"num_heads": Range(1, 128), "latent": OneOf((FP8,))} | (spec or {})
    return Capability(arch, covered, **fields)


def implementation(name="fast", operator="sparse_mla", capabilities=None, **fields):
    return Implementation(operator, name, "fake_kernels:build", capabilities or (capability(),), **fields)


class Plugins:
    """The installed plugins, as far as this test's process knows."""

    def __init__(self, monkeypatch):
        self.points = []
        self.monkeypatch = monkeypatch
        everything = importlib.metadata.entry_points

        def entry_points(**wanted):
            if wanted.get("group") != points.GROUP:
                return everything(**wanted)
            return EntryPoints(self.points).select(**wanted)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        monkeypatch.setattr(failure, "_WARNED", set())
        monkeypatch.setattr(selection, "_WARNED", set())
        policy.thaw()

    def module(self, name, **attributes):
        """Make a module importable and install it as the plugin ``name``."""
        module = types.ModuleType(f"fake_{name}")
        vars(module).update(attributes)
        self.monkeypatch.setitem(sys.modules, module.__name__, module)
        self.points.append(EntryPoint(name=name, value=module.__name__, group=points.GROUP))
        return module

    def add(self, plugin, /, *implementations, probe=HERE, **fields):
        """Install a plugin that is well-formed but for what ``fields`` say."""
        backend = self.backend(plugin, **fields)

        @hookimpl
        def kimi_hal_backend():
            return backend

        return self.module(
            plugin,
            kimi_hal_backend=kimi_hal_backend,
            probe=probe if callable(probe) else lambda: probe,
            IMPLEMENTATIONS=implementations or (implementation(),),
        )

    def backend(self, plugin, /, **fields):
        """Return the Backend of a well-formed plugin, some fields changed."""
        where = f"fake_{plugin}"
        defaults = {
            "name": plugin,
            "version": "1.0",
            "api_version": API_VERSION,
            "probe": f"{where}:probe",
            "implementations": f"{where}:IMPLEMENTATIONS",
            "device": f"{where}:Device",
            "torch_device": "cuda",
        }
        return Backend(**(defaults | fields))
