"""What is kept of a full run: each part's last result, with the commit that it was of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import parts
import pytest
from rich.console import Console


def test_a_part_that_was_not_run_keeps_its_last_result(tmp_path: Path) -> None:
    path = tmp_path / "test-full.json"
    both = {"nvidia": parts.Outcome(60.4, passed=3), "amd": parts.Outcome(passed=2, failed=1)}
    parts.keep(both, path, "first")
    parts.keep({"amd": parts.Outcome(passed=3, broken=["nox ended"])}, path, "second")
    kept = json.loads(path.read_text())
    assert list(kept) == ["nvidia", "amd"]
    assert (kept["nvidia"]["commit"], kept["nvidia"]["seconds"], kept["nvidia"]["passed"]) == ("first", 60, 3)
    assert (kept["amd"]["commit"], kept["amd"]["failed"], kept["amd"]["broken"]) == (
        "second",
        0,
        ["nox ended"],
    )


def test_each_part_is_kept_as_it_ends_with_the_commit_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, heads = tmp_path / "test-full.json", iter(("first", "first", "first", "second+changes", "second"))

    def run(part: parts.Part, full: bool, console: Any) -> parts.Outcome:
        if part.name == "ppu":
            raise KeyboardInterrupt
        return parts.Outcome(passed=1)

    monkeypatch.setattr(parts, "commit", lambda: next(heads))
    monkeypatch.setattr(parts, "run_part", run)
    chosen = [part for part in parts.PARTS if part.name in ("nvidia", "amd", "ppu")]
    with pytest.raises(KeyboardInterrupt):
        parts.run_all(chosen, True, Console(), path)
    kept = json.loads(path.read_text())
    assert {name: row["commit"] for name, row in kept.items()} == {"nvidia": "first", "amd": "first+changes"}


def test_what_is_not_a_full_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "run_part", lambda *_: parts.Outcome(passed=1))
    assert parts.run_all(parts.PARTS[:1], False, Console(), tmp_path / "kept.json")["lint"].passed == 1
    assert not list(tmp_path.iterdir())


def test_a_commit_is_marked_only_by_other_changes_than_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "FULL", tmp_path / "kept.json")
    git = ["git", "-c", "user.name=any", "-c", "user.email=any@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    parts.FULL.touch()
    clean = parts.commit()
    assert len(clean) == 40
    (tmp_path / "other").touch()
    assert parts.commit() == f"{clean}+changes"
