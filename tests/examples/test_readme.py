"""The README's example is run as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import FENCE, run_python

from kimi_hal.dispatch.loader import load
from kimi_hal.ops import OPERATORS
from kimi_hal.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_s_example_runs() -> None:
    names: dict[str, object] = {}
    run_python(ROOT / "README.md", names)
    assert list(names["out"].shape) == [8, 12, 512]  # type: ignore[attr-defined]
    assert list(names["lse"].shape) == [8, 12]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", FENCE.sub("", page.read_text()))
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


def test_the_support_matrix_is_that_of_the_capability_tables() -> None:
    """A cell names what a backend's implementations of an operator are made with, all of it and nothing else."""
    lines = (ROOT / "README.md").read_text().split("## Support matrix")[1].splitlines()
    header, _, *rows = (
        [c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")
    )
    told = {
        (operator, backend): set() if cell == "–" else set(cell.lower().split(", "))
        for names, *cells in rows
        for operator in re.findall(r"`(\w+)`", names)
        for backend, cell in zip(header[1:], cells, strict=True)
    }
    single = [name for name, operator in OPERATORS.items() if not operator.parts]
    registry = load(Settings(), strict=False)
    assert sorted({operator for operator, _ in told}) == sorted(single)
    for (operator, backend), cell in told.items():
        found = {i.name.partition("_")[0] for i in registry.backends[backend].of(operator)}
        assert cell == found, f"README's cell of {operator}, {backend} is {cell}, the table has {found}"


def test_the_page_names_every_target_that_a_backend_gives() -> None:
    section = (ROOT / "docs" / "conformance.md").read_text().split("## Compile-only")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (`.*?`) \|", section, re.MULTILINE)
    told = {backend: re.findall(r"`(.*?)`", cell) for backend, cell in rows}
    registry = load(Settings(), strict=False)
    found = {name: [t.name for t in b.backend.targets] for name, b in registry.backends.items()}
    assert told == {name: targets for name, targets in found.items() if targets}


def test_every_figure_file_that_the_readme_names_is_kept() -> None:
    for name in re.findall(r"`(\w+\.json)`", (ROOT / "README.md").read_text()):
        assert (ROOT / "benchmarks" / "results" / name).is_file(), name
