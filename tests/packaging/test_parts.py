"""What is kept of a full run: each part's last result, with the commit that it was of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import parts
import pytest


def test_a_part_that_was_not_run_keeps_its_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test-full.json"
    monkeypatch.setattr(parts, "commit", lambda: "first")
    parts.keep({"nvidia": parts.Outcome(60.4, passed=3), "amd": parts.Outcome(passed=2, failed=1)}, path)
    monkeypatch.setattr(parts, "commit", lambda: "second")
    parts.keep({"amd": parts.Outcome(passed=3, broken=["nox ended"])}, path)
    kept = json.loads(path.read_text())
    assert list(kept) == ["nvidia", "amd"]
    assert (kept["nvidia"]["commit"], kept["nvidia"]["seconds"], kept["nvidia"]["passed"]) == ("first", 60, 3)
    assert (kept["amd"]["commit"], kept["amd"]["failed"], kept["amd"]["broken"]) == (
        "second",
        0,
        ["nox ended"],
    )


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
