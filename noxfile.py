"""The environments that cannot share the development one: each is made once, under ``.nox``.

``python -m nox -s tpu_jax tpu_xla`` makes both and runs their tests; ``make test`` does so as its part "tpu".
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
DISTRIBUTIONS = (".", "conformance", "backends/tpu")
#: What an environment takes on disk while it is made, its packages' downloads included, in GB.
ROOM = {"tpu_jax": 4, "tpu_xla": 13}
#: Seconds before an installation that failed is tried again: gigabytes come over networks that break off.
PAUSES = (10, 60)


def prepare(session: nox.Session, requirements: str) -> None:
    """Install a requirements file and the distributions, unless the environment has them already."""
    files = [ROOT / "requirements" / name for name in ("tpu_common.txt", requirements)]
    files += [ROOT / path / "pyproject.toml" for path in DISTRIBUTIONS]
    wanted = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    stamp = Path(session.virtualenv.location) / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < ROOM[session.name]:
        session.error(
            f"{session.name} takes {ROOM[session.name]} GB on disk while it is made, and {free:.1f} GB are free; "
            "SKIP_PARTS=tpu make test leaves it out"
        )
    install(session, "-r", f"requirements/{requirements}")
    editable = [word for path in DISTRIBUTIONS for word in ("-e", path)]
    install(session, "--no-build-isolation", "--no-deps", *editable)
    stamp.write_text(wanted)


def install(session: nox.Session, *what: str) -> None:
    """Install with pip, again where it fails; what was downloaded whole is in pip's cache."""
    for pause in (*PAUSES, None):
        try:
            session.install("--disable-pip-version-check", *what)
            return
        except CommandFailed:
            if pause is None:
                raise
            session.log(f"pip failed; again in {pause} s")
            time.sleep(pause)


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
