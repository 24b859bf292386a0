from __future__ import annotations

from pathlib import Path

import pytest
import torch
import workload_cases as cases

from kimi_hal_conformance.workload.shard import Layout, Writer

pytest.importorskip("safetensors", reason="safetensors is not installed: the file's own format")

LAYOUT = Layout([{f"e{i}.w": (3, 5), f"e{i}.s": (7,)} for i in range(4)], {"note": "a test"})


def group(i: int) -> list[torch.Tensor]:
    numbers = cases.integers(f"group/{i}", 0, 256, 22).to(torch.uint8)
    return [numbers[:15].view(3, 5), numbers[15:]]


def write(path: Path, until: int = 4) -> int:
    """Write groups up to ``until`` and return how many were there already."""
    with Writer(path, LAYOUT) as writer:
        found = writer.done
        for i in range(found, until):
            writer.add(group(i))
    return found


def write_one_and_fail(path: Path) -> None:
    with Writer(path, LAYOUT) as writer:
        writer.add(group(0))
        raise RuntimeError("no space")


def test_the_library_reads_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "a.safetensors"
    assert write(path) == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"note": "a test"}
        for i in range(4):
            assert file.get_tensor(f"e{i}.w").equal(group(i)[0])
            assert file.get_tensor(f"e{i}.s").equal(group(i)[1])


def test_data_is_aligned_to_eight_bytes() -> None:
    assert len(LAYOUT.header()) % 8 == 0


def test_an_unfinished_file_is_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, until=3)
    assert not path.exists()
    assert path.with_suffix(".partial").exists()


def test_an_interrupted_build_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.safetensors", tmp_path / "a.safetensors"
    write(whole)
    write(path, until=2)
    with path.with_suffix(".partial").open("ab") as partial:
        partial.write(b"half of another group")
    assert write(path) == 2
    assert path.read_bytes() == whole.read_bytes()
    assert not path.with_suffix(".partial").exists()


def test_an_error_inside_keeps_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(RuntimeError, match="no space"):
        write_one_and_fail(path)
    assert not path.exists()
    assert write(path) == 1


def test_a_rest_of_another_recipe_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, until=3)
    other = Layout(LAYOUT.groups, {"note": "another"})
    with Writer(path, other) as writer:
        assert writer.done == 0


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    sentence = r"^e0\.w must be uint8 \(3, 5\), is torch\.int32 \(3, 5\)$"
    with Writer(tmp_path / "a.safetensors", LAYOUT) as writer, pytest.raises(ValueError, match=sentence):
        writer.add([t.int() for t in group(0)])
