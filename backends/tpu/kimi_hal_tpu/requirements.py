"""The library versions that belong together, and the sentence where they don't. Imports none of them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from kimi_hal.dispatch import versions
from kimi_hal.errors import PlanError, ToolMissingError

#: jax -> the libtpu that its own ``tpu`` extra names. A newer one fails on every asynchronous operation.
LIBTPU = {"0.10": "0.0.42", "0.7": "0.0.20"}
#: torch-xla -> the torch that it was built with.
TORCH = {"2.9": "2.9"}
#: torch-xla -> the jax of its ``pallas`` extra, and the libtpu of its ``tpu`` extra, which compiles what jax traces.
TRACED_BY = {"2.9": ("0.7", "0.0.21")}
#: Variables by which torch-xla 2.9 computes in other types than a program says, and what becomes of it.
OTHER_TYPES = {
    "XLA_USE_BF16": "float32 would be computed as bfloat16",
    "XLA_DOWNCAST_BF16": "float32 would be computed as bfloat16",
    "XLA_USE_32BIT_LONG": "int64 would have 32 bits",
}
#: torch_tpu -> the jax whose programs its ``jax_op`` was tried with, and the oldest libtpu that it takes.
EXPORTED_BY = {"0.2": ("0.10", "0.0.50")}
#: Where the kernels' jax and libtpu are: one that torch-xla is in holds others, and would break.
ENVIRONMENT = "in an environment of its own: python -m nox -s tpu_jax --install-only (docs/tpu.md)"


def installed(name: str) -> str:
    """Return the version of a distribution, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _series(number: str, parts: int) -> str:
    return ".".join(number.partition("+")[0].split(".")[:parts])


def check_jax(jax: str | None = None, libtpu: str | None = None) -> None:
    """Refuse a jax that these kernels were not written for, and a libtpu that is not its own.

    Args:
        jax: its version; ``None``: the installed one's.
        libtpu: its version; empty: none is installed, which interpreting needs not.

    Raises:
        ToolMissingError: one is missing or they do not belong together; says what to install.
    """
    jax = installed("jax") if jax is None else jax
    libtpu = installed("libtpu") if libtpu is None else libtpu
    if not jax:
        raise ImportError(f"jax is not installed; the Pallas kernels need it, {ENVIRONMENT}")
    if _series(jax, 2) != "0.10":
        raise ToolMissingError(
            f"the Pallas kernels are written for jax 0.10, this is jax {jax}; they have theirs {ENVIRONMENT}"
        )
    wanted = LIBTPU[_series(jax, 2)]
    if libtpu and _series(libtpu, 3) != wanted:
        raise ToolMissingError(
            f"jax {jax} goes with libtpu {wanted}.*, this is libtpu {libtpu}, whose compiler fails on asynchronous "
            f"operations of another jax: pip install 'libtpu=={wanted}.*'"
        )


def check_compiler() -> None:
    """Refuse an environment in which the Pallas kernels cannot be compiled for a TPU.

    Raises:
        ToolMissingError: jax or libtpu is missing, or not the one; says which environment has both.
    """
    jax, libtpu = installed("jax"), installed("libtpu")
    if _series(jax, 2) != "0.10" or not libtpu:
        here = ", ".join(
            f"{name} {number}" if number else f"no {name}"
            for name, number in (("jax", jax), ("libtpu", libtpu))
        )
        raise ToolMissingError(
            f"tpu.pallas is compiled by jax 0.10 with its libtpu, here is {here}; they are {ENVIRONMENT}"
        )
    check_jax(jax, libtpu)


def check_torch_xla(torch_xla: str | None = None, torch: str | None = None) -> None:
    """Refuse a torch-xla that these programs were not written for, and one that was built for another torch.

    Raises:
        ImportError: torch-xla is not installed.
        ToolMissingError: it is another, or they do not belong together; says what to install.
        PlanError: a variable makes torch-xla compute in other types.
    """
    _check_types()
    torch_xla = installed("torch_xla") if torch_xla is None else torch_xla
    torch = installed("torch") if torch is None else torch
    _check_installed(torch_xla)
    wanted = TORCH[_series(torch_xla, 2)]
    if _series(torch, 2) != wanted:
        raise ToolMissingError(
            f"torch-xla {torch_xla} serves torch {wanted}, this is torch {torch}: "
            f"pip install -r requirements/tpu_xla.txt"
        )


def _check_types() -> None:
    """Refuse variables by which torch-xla computes in other types than a program says."""
    for name, becomes in OTHER_TYPES.items():
        if os.environ.get(name, "").strip() not in ("", "0"):
            raise PlanError(f"{name}={os.environ[name]}: {becomes} by torch-xla, in silence: unset {name}")


def _check_installed(torch_xla: str) -> None:
    """Refuse that there is no torch-xla, and one that these programs were not written for."""
    if not torch_xla:
        raise ImportError("torch_xla is not installed: pip install -r requirements/tpu_xla.txt")
    if _series(torch_xla, 2) not in TORCH:
        raise ToolMissingError(
            f"tpu.xla's programs are written for torch-xla {', '.join(TORCH)}, this is torch-xla {torch_xla}: "
            f"pip install -r requirements/tpu_xla.txt"
        )


def check_custom_call(
    torch_xla: str | None = None, jax: str | None = None, libtpu: str | None = None
) -> None:
    """Refuse a jax whose kernels torch-xla's libtpu cannot compile.

    Args:
        torch_xla: its version; ``None``: the installed one's. Likewise the others.
        jax: its version.
        libtpu: its version; empty: it is none of Python's distributions.

    Raises:
        ImportError: torch-xla or jax is not installed.
        ToolMissingError: the three do not belong together; says what to install.
    """
    torch_xla = installed("torch_xla") if torch_xla is None else torch_xla
    jax = installed("jax") if jax is None else jax
    libtpu = installed("libtpu") if libtpu is None else libtpu
    _check_installed(torch_xla)
    wanted, compiler = TRACED_BY[_series(torch_xla, 2)]
    if not jax:
        raise ImportError(
            f"jax is not installed; Pallas kernels reach torch-xla {torch_xla} through jax {wanted}: "
            "pip install -r requirements/tpu_xla.txt"
        )
    if _series(jax, 2) != wanted:
        raise ToolMissingError(
            f"torch-xla {torch_xla} brings libtpu {compiler}, which cannot serve jax {jax}: its kernels must be traced "
            f"by jax {wanted}: pip install -r requirements/tpu_xla.txt"
        )
    if libtpu and _series(libtpu, 3) != compiler:
        raise ToolMissingError(
            f"torch-xla {torch_xla} goes with libtpu {compiler}, this is libtpu {libtpu}: "
            f"pip install 'libtpu=={compiler}'"
        )


def check_jax_op(torch_tpu: str | None = None, jax: str | None = None, libtpu: str | None = None) -> None:
    """Refuse a torch_tpu that the bridge was not written for, and a jax that was not tried with it.

    Arguments as ``check_custom_call``.

    Raises:
        ImportError: torch_tpu or jax is not installed.
        ToolMissingError: they do not belong together; says what to install.
    """
    torch_tpu = installed("torch_tpu") if torch_tpu is None else torch_tpu
    jax = installed("jax") if jax is None else jax
    libtpu = installed("libtpu") if libtpu is None else libtpu
    if not torch_tpu:
        raise ImportError("torch_tpu is not installed: pip install 'torch_tpu==0.2.*', from Python 3.12 on")
    if _series(torch_tpu, 2) not in EXPORTED_BY:
        known = ", ".join(EXPORTED_BY)
        raise ToolMissingError(
            f"the bridge to torch_tpu is written for {known}, this is torch_tpu {torch_tpu}, whose jax_op may differ: "
            f"pip install 'torch_tpu=={known}.*'"
        )
    wanted, least = EXPORTED_BY[_series(torch_tpu, 2)]
    if not jax:
        raise ImportError(
            f"jax is not installed; Pallas kernels reach torch_tpu {torch_tpu} through jax {wanted}: "
            f"pip install 'jax=={wanted}.*'"
        )
    if _series(jax, 2) != wanted:
        raise ToolMissingError(
            f"the kernels were exported to torch_tpu {torch_tpu} with jax {wanted}, this is jax {jax}: "
            f"pip install 'jax=={wanted}.*'"
        )
    if libtpu and _older(libtpu, least):
        raise ToolMissingError(
            f"torch_tpu {torch_tpu} needs libtpu {least} or newer, this is libtpu {libtpu}: "
            f"pip install 'libtpu>={least}'"
        )


def without_sparse_core(what: str) -> ToolMissingError:
    """Return the error of a kernel for SparseCore where jax cannot program one."""
    jax = installed("jax")
    brought = (
        f"; torch-xla {installed('torch_xla')} brings jax {jax}"
        if installed("torch_xla")
        else f", this is jax {jax}"
    )
    return ToolMissingError(
        f"{what} runs on SparseCore, which needs jax ≥ 0.10 (jax.experimental.pallas.tpu_sc){brought}. Take tpu.xla, "
        "which selects and gathers on TensorCore"
    )


def without_part_tiles(operator: str) -> ToolMissingError:
    """Return the error of a kernel that copies parts of tiles, which torch-xla's libtpu does not compile."""
    torch_xla = installed("torch_xla")
    _, compiler = TRACED_BY[_series(torch_xla, 2)]
    return ToolMissingError(
        f"{operator}: tpu.pallas copies parts of tiles, which needs jax ≥ 0.10 and its libtpu; torch-xla {torch_xla} "
        f"brings libtpu {compiler}. KIMI_HAL_OPS={operator}=tpu.xla takes the program that torch-xla traces"
    )


def _older(number: str, least: str) -> bool:
    """Tell whether a version comes before another; what is no version, or has an epoch, does."""
    try:
        return versions.key(number) < versions.key(least)
    except ValueError:
        return True
