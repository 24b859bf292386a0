"""Files from hostile hands: an index that names no shard, a workload whose header lies, absurd settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kimi_hal.errors import ContractError, FormatError, SettingsError
from kimi_hal.settings import Settings
from kimi_hal.specs import MoESpec

safetensors = pytest.importorskip(
    "safetensors.torch", reason="checkpoints and workloads are safetensors files"
)

from kimi_hal.checkpoint import INDEX, read_experts  # noqa: E402
from kimi_hal.workload import file, load  # noqa: E402

SPEC = MoESpec(num_experts=2, num_local=2, topk=1, hidden=32, intermediate=32)
NAME = "model.layers.1.mlp.experts.{}.{}.weight_{}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {}
    for expert in range(2):
        for matrix in ("w1", "w2", "w3"):
            tensors[NAME.format(expert, matrix, "packed")] = torch.zeros(32, 16, dtype=torch.uint8)
            tensors[NAME.format(expert, matrix, "scale")] = torch.zeros(32, 1, dtype=torch.uint8)
    safetensors.save_file(tensors, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    return tmp_path


def refused(folder: Path, layer: int = 1, **options: object) -> str:
    with pytest.raises(FormatError) as error:
        read_experts(folder, layer, SPEC, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_a_layer_without_experts_names_the_layers_of_the_index(folder):
    known = f"no routed experts in {folder / INDEX}; layers that have some: 1"
    assert refused(folder, layer=99) == f"layer 99: {known}"


@pytest.mark.parametrize(
    "text",
    ["", "5", "[]", '{"weight_map": null}', '{"weight_map": ["ab"]}', '{"weight_map": "xy"}', "[" * 100_000],
)
def test_an_index_without_a_map_is_a_sentence(folder, text):
    (folder / INDEX).write_text(text)
    assert refused(folder) == f"{folder / INDEX} is not a safetensors index: it has no weight_map of names"


@pytest.mark.parametrize("shard", [5, None, "", ["a.safetensors"]])
def test_an_index_that_names_no_file_is_a_sentence(folder, shard):
    name = NAME.format(0, "w1", "packed")
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: shard}}))
    said = f"{folder / INDEX} is not a safetensors index: {name} is in {shard!r}, which is no file"
    assert refused(folder) == said


def test_an_index_that_is_a_folder_is_a_sentence(folder):
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    assert refused(folder) == f"{folder / INDEX} cannot be read: Is a directory"


def test_a_shard_that_links_to_itself_does_not_exist(folder):
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("a.safetensors")
    missing = (
        f"{folder / 'a.safetensors'} does not exist; the checkpoint is incomplete or the path is another"
    )
    assert refused(folder) == missing


def test_experts_may_be_a_tensor_of_ids(folder):
    assert read_experts(folder, 1, SPEC, experts=torch.tensor([1, 0])).w13.shape == (2, 64, 16)


@pytest.mark.parametrize("experts", [["a", "b"], [0, None], [0.0, 1.0], 5])
def test_experts_that_are_no_ids_are_a_sentence(folder, experts):
    with pytest.raises(ContractError) as error:
        read_experts(folder, 1, SPEC, experts=experts)
    assert error.value.reasons == (f"experts must be ids of experts, got {experts!r}",)


BUILD = "build it again with: python -m kimi_hal_conformance.workload build"


def workload(path: Path, change=lambda header: None) -> Path:
    """Write a workload file whose header is changed after its data was hashed."""
    data = file.encode({"hidden.codes": torch.zeros(3, 4, dtype=torch.uint8)}, {"seed": "1"})
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return path


def said(path: Path) -> str:
    with pytest.raises(FormatError) as error:
        load(path)
    return str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(seed=5),
        lambda h: h.pop("hidden.codes"),
        lambda h: h["hidden.codes"].update(shape=[99]),
        lambda h: h["hidden.codes"].update(dtype="Q9"),
        lambda h: h["hidden.codes"].update(data_offsets=[0, 10**9]),
    ],
)
def test_a_workload_whose_header_does_not_fit_its_data_is_damaged(tmp_path, change):
    path = workload(tmp_path / "w.safetensors", change)
    assert said(path) == f"{path} is damaged: its header does not describe its data; {BUILD}"


def test_a_workload_without_what_its_accessors_read_is_refused_at_once(tmp_path):
    path = workload(tmp_path / "w.safetensors", lambda h: h["__metadata__"].pop("seed"))
    assert said(path) == (
        f"{path} is no whole workload file, it lacks hidden.scale, text.zlib, token.start, token.length, "
        "token.ids, query.weight, query.bias, key.weight, key.bias, value.weight, value.bias, kda.A_log, "
        f"kda.dt_bias, router.codes, router.gain, router.bias, seed, files, heads; {BUILD}"
    )


def test_a_header_nested_without_end_is_no_workload(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    assert said(path) == f"{path} is not a workload file; {BUILD}"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("9" * 5000, "shadow: a number of 5000 digits; at most 18: shadow:100"),
        ("\u0663", "shadow:\u0663 needs a whole number of calls, 1 or more: shadow:100"),
        ("000", "shadow:000 needs a whole number of calls, 1 or more: shadow:100"),
    ],
)
def test_a_number_of_calls_that_nobody_means_is_a_sentence(value, sentence):
    with pytest.raises(SettingsError) as error:
        Settings.from_env({"KIMI_HAL_CHECK": f"shadow:{value}"}, [])
    assert str(error.value) == f"KIMI_HAL_CHECK: {sentence}"
