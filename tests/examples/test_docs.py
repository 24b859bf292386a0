"""The pages for vendors and integrators are run: their commands, their code, and what both print."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import FENCE, assert_printed, blocks, run_console, run_python

from kimi_hal.errors import ToolMissingError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OFFLINE = "--quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"
#: Program -> what it is here, where nothing comes from the network and nothing is installed for others.
COMMANDS = {
    "kimi-hal": '-m kimi_hal.cli.main "$@"',
    "pip": f'-m pip install {OFFLINE} --target "$SITE" .',
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which ``kimi-hal`` and ``pip install -e .`` work in a folder of the test's own."""
    programs, site = tmp_path / "bin", tmp_path / "site"
    programs.mkdir()
    for name, arguments in COMMANDS.items():
        program = programs / name
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        program.chmod(0o755)
    env = {n: v for n, v in os.environ.items() if not n.startswith(("KIMI_HAL_", "PYTEST_"))}
    path = os.pathsep.join(map(str, (site, ROOT, ROOT / "conformance")))
    return env | {
        "PATH": f"{programs}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": path,
        "SITE": str(site),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def test_the_vendors_page(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("pip", reason="installs a package")
    work = tmp_path / "work"
    work.mkdir()
    run_console(DOCS / "vendor.md", work, environment)


def test_the_vendors_compile_example() -> None:
    names: dict[str, Any] = {"__name__": "vendor"}
    run_python(DOCS / "vendor.md", names)
    (kernel,) = names["merge_attn_states"](names["Target"]("acme_2", arch="acme_2"))
    with pytest.raises(ToolMissingError, match=r"^acme-as is missing"):
        kernel.compile()


@pytest.mark.parametrize("name", ["vendor.md", "integrator.md"])
def test_a_page_points_at_what_exists(name: str) -> None:
    page = DOCS / name
    text = FENCE.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text):
        pointed = page.parent / target
        assert pointed.exists(), target
        assert not anchor or anchor in anchors(pointed), f"{target}#{anchor}"
    for target in re.findall(r"`((?:kimi_hal|tests/examples|examples|docs)/[\w/.]+)`", text):
        assert (ROOT / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_a_page_shows_is_compared() -> None:
    assert_printed("a …\nz\n", "a 1\nb\nz\n", "here")
    with pytest.raises(AssertionError, match="here shows"):
        assert_printed("a …\nz\n", "a 1\nb\n", "here")


def test_a_block_knows_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert [(b.language, b.line) for b in blocks(page)] == [("python", 4), ("text", 8)]
    with pytest.raises(AssertionError, match=r"page\.md:8 shows"):
        run_python(page, {})


@pytest.mark.usefixtures("plugins")
def test_the_integrators_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_python(DOCS / "integrator.md", {"__name__": "integrator"})
