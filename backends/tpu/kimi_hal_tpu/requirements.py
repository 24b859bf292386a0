"""The library versions that belong together, and the sentence where they don't. Imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kimi_hal.errors import ToolMissingError

#: jax -> the libtpu that its own ``tpu`` extra names. A newer one fails on every asynchronous operation.
LIBTPU = {"0.10": "0.0.42", "0.7": "0.0.20"}
#: torch-xla -> the torch that it was built with.
TORCH = {"2.9": "2.9"}


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
        raise ImportError(
            "jax is not installed; the Pallas kernels need it: pip install -r requirements/tpu_jax.txt"
        )
    if _series(jax, 2) != "0.10":
        raise ToolMissingError(
            f"the Pallas kernels are written for jax 0.10, this is jax {jax}: pip install -r requirements/tpu_jax.txt"
        )
    wanted = LIBTPU[_series(jax, 2)]
    if libtpu and _series(libtpu, 3) != wanted:
        raise ToolMissingError(
            f"jax {jax} goes with libtpu {wanted}.*, this is libtpu {libtpu}, whose compiler fails on asynchronous "
            f"operations of another jax: pip install 'libtpu=={wanted}.*'"
        )


def check_torch_xla(torch_xla: str | None = None, torch: str | None = None) -> None:
    """Refuse a torch-xla that was built for another torch.

    Raises:
        ImportError: torch-xla is not installed.
        ToolMissingError: they do not belong together; says what to install.
    """
    torch_xla = installed("torch_xla") if torch_xla is None else torch_xla
    torch = installed("torch") if torch is None else torch
    if not torch_xla:
        raise ImportError("torch_xla is not installed: pip install -r requirements/tpu_xla.txt")
    wanted = TORCH.get(_series(torch_xla, 2))
    if wanted is None or _series(torch, 2) != wanted:
        serves = wanted or _series(torch_xla, 2)
        raise ToolMissingError(
            f"torch-xla {torch_xla} serves torch {serves}, this is torch {torch}: "
            f"pip install -r requirements/tpu_xla.txt"
        )
