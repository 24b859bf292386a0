"""Where another library's operators and functions are, and whether they take the arguments that an adapter gives.

Nothing is imported that is an engine: vLLM's extensions are loaded from its folder. What is missing raises ImportError,
which planning turns into the reason why another implementation was taken, or into an error that names the library.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def folder(package: str) -> Path:
    """Return the folder of an installed top-level package, without importing it.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def installed(distribution: str) -> str | None:
    """Return a distribution's version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def load(package: str, pattern: str) -> None:
    """Load the compiled operators of a package's file; a second time does nothing.

    Args:
        package: an installed package.
        pattern: of the file, in its folder.

    Raises:
        ImportError: no such file, or it does not load with this torch.
    """
    found = sorted(folder(package).glob(pattern))
    if not found:
        raise ImportError(f"{package} is installed, but has no {pattern}: a build without CUDA kernels")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise ImportError(f"{found[0].name} of {package} does not load: {error}") from error


def operator(namespace: str, name: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Return a registered operator whose first arguments are these and whose others all have defaults.

    Raises:
        ImportError: it is not registered, or takes other arguments: the library is of another version.
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise ImportError(f"torch.ops.{namespace} has no {name}: another version of the library")
    overload = packet.default
    taken = overload._schema.arguments
    names = [a.name for a in taken]
    free = [a.name for a in taken[len(arguments) :] if not a.has_default_value()]
    if names[: len(arguments)] != list(arguments) or free:
        raise ImportError(
            f"torch.ops.{namespace}.{name} takes ({', '.join(names)}), this adapter gives "
            f"({', '.join(arguments)}): another version of the library"
        )
    return overload  # type: ignore[no-any-return]


def function(module: str, name: str, given: Sequence[str]) -> Callable[..., Any]:
    """Return a function of a Python module that takes these arguments by name and needs no other.

    Raises:
        ImportError: the module or the function is missing, or it takes other arguments.
    """
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}: another version of the library")
    taken = inspect.signature(found).parameters
    needed = {n for n, p in taken.items() if p.default is inspect.Parameter.empty}
    if not (needed <= set(given) <= set(taken)):
        raise ImportError(
            f"{module}.{name} takes ({', '.join(taken)}), this adapter gives ({', '.join(given)}): "
            "another version of the library"
        )
    return found  # type: ignore[no-any-return]


def deepgemm() -> ModuleType:
    """Return DeepGEMM: the package of that name, or the one inside vLLM.

    Raises:
        ImportError: there is neither, or it does not load.
    """
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        if name in sys.modules:
            return sys.modules[name]
    if importlib.util.find_spec("deep_gemm") is not None:
        return importlib.import_module("deep_gemm")
    inside = folder("vllm") / "third_party" / "deep_gemm"
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", inside / "__init__.py", submodule_search_locations=[str(inside)]
    )
    if spec is None or spec.loader is None or not inside.is_dir():
        raise ImportError("neither deep_gemm nor vllm's copy of it is installed")
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_gemm"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["deep_gemm"]
        raise
    return module
