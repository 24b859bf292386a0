"""Plugins that exist for one property alone: a registry that no entry point is needed for."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from kimi_hal_conformance.properties.property import Modules

LATENT = "latent.fp8.e4m3fn.tensor"


class Plugins:
    """Backends of one core, or of one copy of it.

    Args:
        modules: imports the core's modules.
    """

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.contract = modules("dispatch.contract")
        self.domain = modules("domain")
        self.loader = modules("dispatch.loader")
        self.backends: dict[str, Any] = {}
        self._add_reference()

    def spec(self, **fields: Any) -> Any:
        """Return a Spec of ``sparse_mla``."""
        return self.modules("ops.sparse_mla").SparseMLASpec(**{"num_heads": 12, "latent": LATENT} | fields)

    def capability(self, arch: tuple[str, ...] = ("a2",), **fields: Any) -> Any:
        """Return a capability that covers the Spec."""
        covered = {"num_heads": self.domain.Range(1, 128), "latent": self.domain.OneOf((LATENT,))}
        return self.contract.Capability(arch, covered, **fields)

    def implementation(self, name: str = "fast", *capabilities: Any, rank: int = 0, **fields: Any) -> Any:
        """Return an implementation of ``sparse_mla``."""
        return self.contract.Implementation(
            "sparse_mla",
            name,
            "nowhere:build",
            capabilities or (self.capability(),),
            (self.contract.Preference(rank=rank),),
            **fields,
        )

    def add(
        self, name: str, *implementations: Any, device: str = "", arch: str = "a2", **fields: Any
    ) -> None:
        """Install a backend whose device, if it has one, is here."""
        backend = self.contract.Backend(
            name=name,
            version="1.0",
            api_version=self.contract.API_VERSION,
            probe="nowhere:probe",
            implementations="nowhere:IMPLEMENTATIONS",
            device="nowhere:Device",
            torch_device="cuda",
            **fields,
        )
        probe = (
            self.contract.Probe(present=True, arch=arch, devices=(device,))
            if device
            else self.contract.Probe(present=False, why=f"/dev/{name}0 is missing")
        )
        own = implementations or (self.implementation(),)
        self.backends[name] = self.loader.Loaded(backend, own, "", probe)

    def registry(self, settings: Any) -> Any:
        """Return the registry of these backends."""
        points = {name: EntryPoint(name=name, value="nowhere", group="kimi_hal") for name in self.backends}
        return self.loader.Registry(settings, points, True, dict(self.backends))

    def choose(
        self,
        spec: Any = None,
        device: str = "cuda",
        implementation: str | None = None,
        limits: Any = None,
        **settings: Any,
    ) -> Any:
        """Choose an implementation of ``sparse_mla``."""
        op = self.modules("ops").get("sparse_mla")
        wanted = self.modules("settings").Settings(**settings)
        request = self.modules("dispatch.wish").Request(
            op, spec or self.spec(), limits, device, implementation, wanted
        )
        return self.modules("dispatch.selection").decide(request, self.registry(wanted))

    def _add_reference(self) -> None:
        backend = self.modules("reference.plugin").kimi_hal_backend()
        capability = self.contract.Capability(
            ("*",),
            {
                "num_heads": self.domain.Range(1, 128),
                "latent": self.domain.OneOf((LATENT,)),
                "page": self.domain.Range(1, 1 << 20),
            },
        )
        own = (self.implementation("torch", capability),)
        probe = self.contract.Probe(present=True, arch="torch")
        self.backends["reference"] = self.loader.Loaded(backend, own, "", probe)
