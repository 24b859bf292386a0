"""The environments that cannot share the development one: each is made once, under ``.nox``.

``python -m nox -s tpu_jax tpu_xla`` makes both and runs their tests; ``make test`` does so as its part "tpu".
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
DISTRIBUTIONS = (".", "conformance", "backends/tpu")


def prepare(session: nox.Session, requirements: str) -> None:
    """Install a requirements file and the distributions, unless the environment has them already."""
    files = [ROOT / "requirements" / name for name in ("tpu_common.txt", requirements)]
    files += [ROOT / path / "pyproject.toml" for path in DISTRIBUTIONS]
    wanted = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    stamp = Path(session.virtualenv.location) / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    session.install("--disable-pip-version-check", "-r", f"requirements/{requirements}")
    editable = [word for path in DISTRIBUTIONS for word in ("-e", path)]
    session.install("--disable-pip-version-check", "--no-build-isolation", "--no-deps", *editable)
    stamp.write_text(wanted)


def test(session: nox.Session, folder: str) -> None:
    """Run pytest on a folder, or with the arguments behind ``--``."""
    session.run("python", "-m", "pytest", *(session.posargs or [folder]))


@nox.session
def tpu_jax(session: nox.Session) -> None:
    """Pallas kernels: interpreted, simulated with race detection, compiled for TPU topologies."""
    prepare(session, "tpu_jax.txt")
    test(session, "tests/tpu_jax")


@nox.session
def tpu_xla(session: nox.Session) -> None:
    """The torch-xla path on torch-xla's CPU device."""
    prepare(session, "tpu_xla.txt")
    test(session, "tests/tpu_xla")
