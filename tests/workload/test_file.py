from __future__ import annotations

from pathlib import Path

import pytest
import torch
import workload_cases as cases

from kimi_hal import workload
from kimi_hal.errors import FormatError, KimiHalError
from kimi_hal.workload import file

pytest.importorskip("safetensors", reason="safetensors is not installed: the file's own format")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "activations.safetensors"
    path.write_bytes(file.encode(cases.tensors(), cases.METADATA))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    found = workload.load(path)
    assert found.context == len(cases.tensors()["token.start"])
    assert found.index_keys().equal(workload.Workload(cases.tensors(), cases.METADATA).index_keys())
    assert len(found.sha256) == 64
    assert found.provenance["sha256"] == found.sha256


def test_the_same_tensors_give_the_same_bytes() -> None:
    first = file.encode(cases.tensors(), cases.METADATA)
    assert file.encode(dict(reversed(cases.tensors().items())), cases.METADATA) == first


def test_the_hash_is_of_the_data_alone(path: Path) -> None:
    other = file.encode(cases.tensors(), cases.METADATA | {"torch": "9.9"})
    path.write_bytes(other)
    again = workload.load(path).sha256
    path.write_bytes(file.encode(cases.tensors(), cases.METADATA))
    assert workload.load(path).sha256 == again


def test_the_file_says_what_it_is_not(path: Path) -> None:
    assert "This is not the output of Kimi K3.1" in workload.load(path).provenance["disclaimer"]


def test_a_missing_file_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(KimiHalError) as caught:
        workload.load(tmp_path / "none")
    assert str(caught.value) == (
        f"no workload file at {tmp_path / 'none'}; build it with: python -m kimi_hal_conformance.workload build"
    )


def test_the_default_path_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert workload.activations_path() == tmp_path / "kimi-hal/workload/activations.safetensors"
    assert workload.experts_path() == tmp_path / "kimi-hal/workload/experts.safetensors"
    with pytest.raises(KimiHalError, match=r"^no workload file at "):
        workload.load()


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_an_invalid_cache_variable_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert workload.activations_path() == tmp_path / ".cache/kimi-hal/workload/activations.safetensors"


def test_one_changed_byte_is_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        workload.load(path)
    assert str(caught.value) == (
        f"{path} is damaged: its data does not have the hash it was written with; "
        "build it again with: python -m kimi_hal_conformance.workload build"
    )


def test_a_file_cut_short_is_found(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match=" is damaged: "):
        workload.load(path)


@pytest.mark.parametrize("data", [b"", b"short", b"\x02\0\0\0\0\0\0\0{}", b"x" * 100])
def test_another_kind_of_file_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        workload.load(path)
    assert str(caught.value).startswith(f"{path} is not a workload file; build it again with: ")


def test_a_safetensors_file_of_something_else_is_refused(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(FormatError, match="is not a workload file"):
        workload.load(path)


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "FORMAT", "kimi-hal.workload.9")
    with pytest.raises(FormatError) as caught:
        workload.load(path)
    assert str(caught.value) == (
        f"{path} has the format 'kimi-hal.workload.1', this version reads 'kimi-hal.workload.9'; "
        "build it again with: python -m kimi_hal_conformance.workload build"
    )
