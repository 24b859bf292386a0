from __future__ import annotations

import threading
from pathlib import Path

from kimi_hal_conformance.workload import cache


def test_a_key_is_decided_by_its_parameters() -> None:
    first = cache.key({"seed": 31, "tokens": 5})
    assert first == cache.key({"tokens": 5, "seed": 31})
    assert first != cache.key({"seed": 32, "tokens": 5})
    assert len(first) == 16


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    cache.write(tmp_path / "a", b"data")
    cache.write(tmp_path / "a", b"other")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"other"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_the_link_follows_the_last_build(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        cache.publish(tmp_path / name, link)
        assert link.read_text() == name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "one", "two"]


def test_a_second_builder_waits(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with cache.locked(tmp_path):
            order.append("second")

    with cache.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        waiting.wait()
        thread.join(0.2)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]
