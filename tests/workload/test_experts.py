"""Experts from feed-forward weights: what they compute, and that the library's bytes are what readers expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_hal import workload
from kimi_hal.errors import KimiHalError
from kimi_hal.model import K3_1_PRO
from kimi_hal_conformance.workload import experts
from kimi_hal_conformance.workload.encoder import Encoder
from kimi_hal_conformance.workload.experts import Experts, Quantiser

pytestmark = pytest.mark.usefixtures("encoder_package")


@pytest.fixture(scope="module")
def source(encoder_package: None) -> Experts:
    return Experts(Encoder(), 31)


@pytest.fixture(scope="module")
def shard(source: Experts, folder: Path) -> Path:
    compressed_tensors()
    return experts.build(2, folder=folder)


def compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors", reason="requirements/workload.txt is not installed")


def test_a_gate_row_computes_the_trained_neuron(source: Experts, short: Path) -> None:
    real = workload.load(short)
    wide = real.hidden(range(32), 3584, dtype=torch.float64)
    narrow = real.hidden(range(32), 384, dtype=torch.float64)
    # Width 384 is a map of its own: undo it.
    narrow = narrow @ real._map("hidden", 384).matrix()
    trained = narrow @ source.encoder.weight(1, "intermediate.dense.weight").double().T
    found = wide @ source.matrix(1, "w1").double().T
    torch.testing.assert_close(found, torch.cat([trained, -trained], -1), rtol=0, atol=0.05)
    assert float(trained.std()) > 0.5


def test_up_rows_are_the_same_neurons_rolled(source: Experts) -> None:
    gate, up = source.matrix(14, "w1"), source.matrix(14, "w3")
    assert up[:1536].equal(gate[:1536].roll(1 + 10 * 2, 0))
    assert up[1536:].equal(up[:1536])


def test_down_columns_change_sign_with_every_turn(source: Experts) -> None:
    even, odd = source.matrix(3, "w2"), source.matrix(9, "w2")
    assert even[:, 1536:].equal(even[:, :1536])
    assert odd[:, 1536:].equal(-odd[:, :1536])
    assert odd[:, :1536].equal(even[:, :1536])


def test_down_gives_back_a_widened_state(source: Experts) -> None:
    inner = torch.randn(4, 1536, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trained = inner @ source.encoder.weight(2, "output.dense.weight").double().T
    expected = source.map.expand(trained, source.map.gain, torch.float64)
    found = inner @ source.matrix(2, "w2")[:, :1536].double().T
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


def test_no_two_of_896_experts_are_alike() -> None:
    kinds = {(e % 6, (1 + experts.ROLL * (e // 6)) % 1536) for e in range(K3_1_PRO.experts)}
    assert len(kinds) == K3_1_PRO.experts
    assert all(roll for _, roll in kinds)


def test_matrices_have_k3s_shapes(source: Experts) -> None:
    shapes = [tuple(source.matrix(0, name).shape) for name in ("w1", "w2", "w3")]
    assert shapes == [(3072, 3584), (3584, 3072), (3072, 3584)]
    assert source.matrix(0, "w2").is_contiguous()


def test_names_are_k3s(shard: Path) -> None:
    from safetensors import safe_open

    with safe_open(shard, "pt") as file:
        names = set(file.keys())
        prefix = "model.layers.1.block_sparse_moe.experts"
        assert names == {
            f"{prefix}.{e}.{m}.weight_{kind}"
            for e in (0, 1)
            for m in ("w1", "w2", "w3")
            for kind in ("packed", "scale")
        }
        packed, scale = (file.get_slice(f"{prefix}.1.w2.weight_{kind}") for kind in ("packed", "scale"))
        assert (packed.get_dtype(), packed.get_shape()) == ("U8", [3584, 1536])
        assert (scale.get_dtype(), scale.get_shape()) == ("U8", [3584, 96])
        notes = file.metadata()
    assert notes["quantization"] == "mxfp4-pack-quantized"
    assert notes["quantiser"].startswith("compressed-tensors 0.20")
    assert "not the output of Kimi K3.1" in notes["disclaimer"]


def test_the_checkpoint_reader_reads_it(shard: Path, source: Experts) -> None:
    from kimi_hal import formats
    from kimi_hal.checkpoint import read_experts
    from kimi_hal.specs import MoESpec

    read = read_experts(shard, 1, MoESpec(num_local=2))
    decode = formats.experts("experts.mxfp4-pack").decode
    for expert in (0, 1):
        gate, up = decode(read.w13[expert], read.w13_scale[expert], torch.float32).chunk(2)
        down = decode(read.w2[expert], read.w2_scale[expert], torch.float32)
        for name, found in (("w1", gate), ("w3", up), ("w2", down)):
            weight = source.matrix(expert, name).float()
            assert float((found - weight).norm() / weight.norm()) < 0.13  # four bits


def test_the_library_decodes_what_it_packed(source: Experts) -> None:
    compressed_tensors()
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor

    from kimi_hal import formats

    quantise = Quantiser()
    packed, scale = quantise(source.matrix(4, "w1")[:64].contiguous())
    theirs = MXFP4PackedCompressor.decompress(
        {"weight_packed": packed, "weight_scale": scale}, quantise.scheme
    )
    ours = formats.experts("experts.mxfp4-pack").decode(packed, scale, torch.float32)
    assert theirs["weight"].float().equal(ours)


def test_a_second_build_reads_the_cache(shard: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_write", None)
    assert experts.build(2, folder=folder) == shard
    assert (folder / "experts.safetensors").resolve() == shard


@pytest.mark.parametrize("count", [0, 897, -1])
def test_a_count_beyond_the_model_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(KimiHalError) as caught:
        experts.build(count, folder=tmp_path)
    assert str(caught.value) == f"{count} experts; possible: 1 to 896, --experts 28 by default"


@pytest.mark.full
def test_one_rank_of_32_takes_half_a_gigabyte(tmp_path: Path) -> None:
    compressed_tensors()
    path = experts.build(folder=tmp_path)
    assert 0.48e9 < path.stat().st_size < 0.50e9
