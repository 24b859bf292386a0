"""The README's example is run as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import FENCE, run_python

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


def test_every_figure_file_that_the_readme_names_is_kept() -> None:
    for name in re.findall(r"`(\w+\.json)`", (ROOT / "README.md").read_text()):
        assert (ROOT / "benchmarks" / "results" / name).is_file(), name
