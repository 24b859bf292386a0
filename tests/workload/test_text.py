from __future__ import annotations

from pathlib import Path

import pytest

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance.workload import text


def test_one_interpreter_gives_one_text() -> None:
    first = text.read()
    assert first == text.read()
    assert first.sha256 == text.read().sha256
    assert len(first.files) == len({name for name, _ in first.files}) > 12


def test_files_stand_where_the_table_says() -> None:
    corpus = text.read()
    ends = [start for _, start in corpus.files[1:]] + [len(corpus.content)]
    for (name, start), end in zip(corpus.files, ends, strict=True):
        assert corpus.content[start:end] == (text.library() / name).read_text(encoding="utf-8") + "\n"


def test_missing_modules_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "copy.py").write_text("import types\n")
    (tmp_path / "heapq.py").write_text("pass")
    assert text.read(tmp_path) == text.Corpus("pass\nimport types\n\n", (("heapq.py", 0), ("copy.py", 5)))


def test_a_shorter_text_keeps_the_files_that_begin_in_it(tmp_path: Path) -> None:
    corpus = text.Corpus("0123456789", (("a.py", 0), ("b.py", 5)))
    assert corpus.until(5) == text.Corpus("01234", (("a.py", 0),))
    assert corpus.until(6).files == corpus.files


def test_an_interpreter_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KimiHalError) as caught:
        text.read(tmp_path)
    assert str(caught.value) == (
        f"no sources of the standard library under {tmp_path}: this interpreter came without them; build the "
        "workload with one that has them, such as python.org's or the distribution's python3"
    )
