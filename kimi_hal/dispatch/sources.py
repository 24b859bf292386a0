"""The source hash of an implementation: what must change before a compiled graph may be used no more.

It covers the files that ``Implementation.source`` names (globs from the folder that holds the plugin's
package; ``()`` = the build module's own file) and the version of the library behind them. A file is read
once and again only when its size or time changes. Nothing is imported.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kimi_hal.dispatch.contract import Backend, Implementation
from kimi_hal.errors import PluginError


def source_hash(backend: Backend, implementation: Implementation) -> str:
    """Return 64 hexadecimal digits over files and version.

    Raises:
        PluginError: a glob that matches no file, or a build module without one.
    """
    version = implementation.version or backend.version
    digest = hashlib.sha256(f"{backend.name} {implementation.name} {version}\n".encode())
    for label, path in sorted(_files(backend, implementation)):
        stat = path.stat()
        digest.update(f"{label} {_content(path, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def _files(backend: Backend, implementation: Implementation) -> Iterator[tuple[str, Path]]:
    module = implementation.build.partition(":")[0]
    if not implementation.source:
        yield module, _module_file(backend.name, module)
        return
    root = _parent(backend.name, module.partition(".")[0])
    for pattern in implementation.source:
        found = [path for path in root.glob(pattern) if path.is_file()]
        if not found:
            raise PluginError(
                backend.name, f"{implementation.name}: source {pattern!r} matches no file in {root}."
            )
        for path in found:
            yield path.relative_to(root).as_posix(), path


def package_files(backend: Backend, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of a backend's package that globs name, in order; a glob may match none.

    Raises:
        PluginError: the package has no folder.
    """
    if not patterns:
        return []
    root = _parent(backend.name, backend.implementations.partition(":")[0].partition(".")[0])
    return sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file())


def _parent(plugin: str, package: str) -> Path:
    """Return the folder that holds a top-level package or module."""
    spec = _spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    if spec is not None and spec.origin and Path(spec.origin).is_file():
        return Path(spec.origin).resolve().parent
    raise PluginError(
        plugin, f"module {package} has no file whose source could be hashed; see Implementation.source."
    )


def _module_file(plugin: str, module: str) -> Path:
    """Return a module's file from its package's folder, without importing either."""
    head, *rest = module.split(".")
    path = _parent(plugin, head).joinpath(head, *rest)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    spec = _spec(module) if module in sys.modules else None
    if spec is not None and spec.origin and Path(spec.origin).is_file():
        return Path(spec.origin)
    raise PluginError(plugin, f"module {module} has no source file; name its files in Implementation.source.")


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded.__spec__ or _by_file(module, getattr(loaded, "__file__", None))
    return importlib.util.find_spec(module)


def _by_file(module: str, file: str | None) -> importlib.machinery.ModuleSpec | None:
    return importlib.util.spec_from_file_location(module, file) if file else None


@cache
def _content(path: Path, size: int, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
