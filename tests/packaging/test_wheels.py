"""The suite from wheels, as a vendor installs it: no checkout, and as many processes as there are cores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SELECTED = "kda_gate/odd or kda_gate/tp32"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels of the core and of the suite into a folder of their own."""
    pytest.importorskip("pip", reason="installs a package")
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    built = [sources / "core", sources / "conformance"]
    for name in ("kimi_hal", "pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, built[0] / name)
    copy(ROOT / "conformance", built[1])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(target), *map(str, built)]
    subprocess.run([*command, *options], check=True)
    return target


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder without what was built or run in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python of these packages in an empty folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KIMI_HAL_"))}
    environment = inherited | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_the_wheels_have_all_that_the_suite_reads(site: Path, tmp_path: Path) -> None:
    code = (
        "import kimi_hal, kimi_hal_conformance as suite; print(kimi_hal.__file__); print(suite.__file__); "
        "from kimi_hal_conformance.page import environment; environment().get_template('report.html.j2')"
    )
    done = run(site, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(site)) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.full
@pytest.mark.timeout(400)
def test_pytest_runs_the_installed_suite_in_several_processes(site: Path, tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--pyargs", "kimi_hal_conformance", "--kimi-backend", "reference"]
    done = run(site, tmp_path, "-m", "pytest", *options, "-k", SELECTED, "-n", "auto", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kimi-hal: backend reference, native, profile quick" in done.stdout
    assert re.search(r"\[gw\d\] .*PASSED .*test_case\[reference\.torch:kda_gate/odd/rows9\]", done.stdout)
    assert re.search(r"=+ 6 passed", done.stdout), done.stdout


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_backend_that_does_not_exist_is_said_from_any_process(site: Path, tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--pyargs", "kimi_hal_conformance", "--kimi-backend", "refrence"]
    done = run(site, tmp_path, "-m", "pytest", *options, "-n", "2")
    assert done.returncode != 0
    assert "unknown backend 'refrence'; did you mean 'reference'?" in done.stdout + done.stderr
