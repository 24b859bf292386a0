import json
import re
import sys

import pytest
import torch

from kimi_hal import formats
from kimi_hal.checkpoint import ExpertWeights, read_experts
from kimi_hal.errors import ContractError, FormatError, KimiHalError
from kimi_hal.ops.moe import MoESpec
from kimi_hal.reference import moe

save_file = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors files").save_file

HIDDEN, INTER, EXPERTS = 64, 128, 6
PREFIX = "language_model.model.layers.5.block_sparse_moe.experts"


def spec(**fields):
    defaults = {
        "num_experts": EXPERTS,
        "num_local": EXPERTS,
        "topk": 2,
        "hidden": HIDDEN,
        "intermediate": INTER,
    }
    return MoESpec(**defaults | fields)


def expert(seed):
    """Float weights w1, w2, w3 of one expert."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"w1": (INTER, HIDDEN), "w2": (HIDDEN, INTER), "w3": (INTER, HIDDEN)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def stored(experts=range(EXPERTS), prefix=PREFIX):
    """The layer as the checkpoint stores it, packed by the format's own encoder."""
    tensors = {}
    for e in experts:
        for matrix, weight in expert(e).items():
            packed, scale = formats.experts("experts.mxfp4-pack").encode(weight)
            tensors[f"{prefix}.{e}.{matrix}.weight_packed"] = packed
            tensors[f"{prefix}.{e}.{matrix}.weight_scale"] = scale
    return tensors


def shard(folder, tensors, name="model-00001.safetensors"):
    path = folder / name
    save_file(tensors, path)
    return path


def refusal(source, layer=5, error=FormatError, **options):
    asked = options.pop("spec", None) or spec()
    with pytest.raises(error) as caught:
        read_experts(source, layer, asked, **options)
    return str(caught.value)


# ---- what is read


def test_a_whole_layer_is_read_byte_for_byte(tmp_path):
    tensors = stored()
    weights = read_experts(shard(tmp_path, tensors), 5, spec())
    assert isinstance(weights, ExpertWeights)
    for e in range(EXPERTS):
        for kind, w13, w2 in (
            ("packed", weights.w13, weights.w2),
            ("scale", weights.w13_scale, weights.w2_scale),
        ):
            gate_up = [tensors[f"{PREFIX}.{e}.{m}.weight_{kind}"] for m in ("w1", "w3")]
            assert torch.equal(w13[e], torch.cat(gate_up))
            assert torch.equal(w2[e], tensors[f"{PREFIX}.{e}.w2.weight_{kind}"])


def test_the_experts_of_one_rank(tmp_path):
    path = shard(tmp_path, stored())
    whole = read_experts(path, 5, spec())
    part = read_experts(path, 5, spec(num_local=2, expert_offset=3))
    assert all(torch.equal(p, w[3:5]) for p, w in zip(part, whole, strict=True))


def test_experts_in_the_order_of_a_map(tmp_path):
    path = shard(tmp_path, stored())
    whole = read_experts(path, 5, spec())
    part = read_experts(path, 5, spec(num_local=3, has_expert_map=True), experts=[4, 0, 2])
    assert all(torch.equal(p, w[[4, 0, 2]]) for p, w in zip(part, whole, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_tensor_parallel_rank_gets_its_rows_and_columns(tmp_path, tp):
    path = shard(tmp_path, stored())
    whole, share = read_experts(path, 5, spec()), INTER // tp
    for rank in range(tp):
        part = read_experts(path, 5, spec(intermediate=share), tp=tp, tp_rank=rank)
        gates = slice(rank * share, (rank + 1) * share)
        ups = slice(INTER + rank * share, INTER + (rank + 1) * share)
        for found, source in ((part.w13, whole.w13), (part.w13_scale, whole.w13_scale)):
            assert torch.equal(found, torch.cat([source[:, gates], source[:, ups]], dim=1))
        for found, source in ((part.w2, whole.w2), (part.w2_scale, whole.w2_scale)):
            width = source.shape[-1] // tp
            assert torch.equal(found, source[..., rank * width : (rank + 1) * width])


@pytest.mark.parametrize(("ep", "tp"), [(1, 4), (3, 1), (2, 2)])
def test_the_ranks_outputs_add_up_to_the_layer(tmp_path, ep, tp):
    path, g = shard(tmp_path, stored()), torch.Generator().manual_seed(0)
    x = torch.randn(5, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(5)]).int()
    w, total, count = torch.rand(5, 2, generator=g), 0, EXPERTS // ep
    whole = moe.moe_experts(spec(), x, w, ids, list(read_experts(path, 5, spec())), dtype=torch.float64)
    for group in range(ep):
        asked = spec(num_local=count, expert_offset=group * count, intermediate=INTER // tp)
        for rank in range(tp):
            weights = read_experts(path, 5, asked, tp=tp, tp_rank=rank)
            total = total + moe.moe_experts(asked, x, w, ids, list(weights), dtype=torch.float64)
    assert torch.allclose(total, whole, rtol=1e-12, atol=1e-10)


def test_a_layer_over_several_shards(tmp_path):
    tensors = stored()
    names = sorted(tensors)
    first = shard(tmp_path, {n: tensors[n] for n in names[::2]}, "a.safetensors")
    second = shard(tmp_path, {n: tensors[n] for n in names[1::2]}, "b.safetensors")
    whole = read_experts(shard(tmp_path, tensors, "all.safetensors"), 5, spec())
    parts = read_experts([second, str(first), first], 5, spec())
    assert all(torch.equal(p, w) for p, w in zip(parts, whole, strict=True))


def test_a_folder_without_an_index_is_all_its_shards(tmp_path):
    shard(tmp_path, stored(range(3)), "a.safetensors")
    shard(tmp_path, stored(range(3, 6)), "b.safetensors")
    assert list(read_experts(tmp_path, 5, spec()).w2.shape) == [6, 64, 64]


def test_an_index_says_which_shards_are_opened(tmp_path):
    tensors = stored()
    shard(tmp_path, tensors, "b.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"never opened: it holds another layer")
    weight_map = dict.fromkeys(tensors, "b.safetensors")
    weight_map["language_model.model.layers.4.block_sparse_moe.experts.0.w1.weight_packed"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert list(read_experts(tmp_path, 5, spec()).w13.shape) == [6, 256, 32]


def test_what_stands_beside_the_layers_experts_is_not_looked_at(tmp_path):
    tensors = stored()
    for name in (
        f"{PREFIX.replace('.5.', '.55.')}.0.w1.weight_packed",
        f"{PREFIX.replace('experts', 'shared_experts')}.0.w1.weight_packed",
        f"{PREFIX}.0.w1.weight_shape",
        "language_model.model.layers.5.block_sparse_moe.gate.weight",
        f"{PREFIX}.6.w1.weight_packed",  # an expert beyond the rank's own
    ):
        tensors[name] = torch.zeros(1)
    assert list(read_experts(shard(tmp_path, tensors), 5, spec()).w13.shape) == [6, 256, 32]


def test_bare_names_without_a_model_prefix(tmp_path):
    path = shard(tmp_path, stored(prefix="layers.5.experts"))
    assert list(read_experts(path, 5, spec()).w2_scale.shape) == [6, 64, 4]


def test_only_the_ranks_slices_are_read(tmp_path, monkeypatch):
    import safetensors

    path, read = shard(tmp_path, stored()), []
    original = safetensors.safe_open

    class Slice:
        def __init__(self, inner):
            self.inner = inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, key):
            value = self.inner[key]
            read.append(value.numel())
            return value

    class File:
        def __init__(self, *args, **kwargs):
            self.inner = original(*args, **kwargs)
            self.keys = self.inner.keys

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def get_slice(self, name):
            return Slice(self.inner.get_slice(name))

    monkeypatch.setattr(safetensors, "safe_open", File)
    weights = read_experts(path, 5, spec(num_local=2, intermediate=32), tp=4, tp_rank=1)
    assert sum(read) == sum(t.numel() for t in weights)
    assert len(read) == 2 * 6


# ---- what is refused


def test_a_shard_that_was_cut_short(tmp_path):
    path = shard(tmp_path, stored())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert refusal(path) == (
        f"{path} is cut short or no safetensors file ({len(whole) - 1} bytes); copy or download it again"
    )


def test_an_empty_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    assert refusal(path) == f"{path} is cut short or no safetensors file (0 bytes); copy or download it again"


def test_a_shard_that_is_not_there(tmp_path):
    path = tmp_path / "model.safetensors"
    assert refusal([path]) == f"{path} does not exist; the checkpoint is incomplete or the path is another"


def test_a_folder_without_shards(tmp_path):
    wanted = f"{tmp_path} holds neither model.safetensors.index.json nor any .safetensors file"
    assert refusal(tmp_path) == wanted


def test_an_index_without_names(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert refusal(tmp_path) == f"{index} is not a safetensors index: it has no weight_map of names"


def test_no_source_at_all():
    assert refusal([]) == "layer 5: no routed experts here; layers that have some: none"


def test_an_index_that_lacks_the_layer(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    assert refusal(tmp_path) == f"layer 5: no routed experts in {index}; layers that have some: none"


def test_another_layer(tmp_path):
    path = shard(tmp_path, stored() | stored(range(1), "model.layers.12.experts"))
    assert refusal(path, layer=0) == "layer 0: no routed experts here; layers that have some: 5, 12"


def test_a_missing_scale(tmp_path):
    tensors = stored()
    del tensors[f"{PREFIX}.3.w2.weight_scale"]
    assert refusal(shard(tmp_path, tensors)) == f"layer 5: {PREFIX}.3.w2.weight_scale is missing"


def test_missing_experts(tmp_path):
    path = shard(tmp_path, stored([0, 2, 3]))
    assert refusal(path) == "layer 5: 3 of 6 experts are missing: 1, 4, 5"


def test_many_missing_experts_are_counted(tmp_path):
    path = shard(tmp_path, stored([0]))
    asked = spec(num_experts=896, num_local=896)
    assert refusal(path, spec=asked) == ("layer 5: 895 of 896 experts are missing: 1, 2, 3, 4, 5, 6, 7, 8, …")


def test_another_dtype(tmp_path):
    tensors = stored()
    name = f"{PREFIX}.0.w1.weight_scale"
    tensors[name] = tensors[name].bfloat16()
    assert refusal(shard(tmp_path, tensors)) == f"layer 5: {name} must be U8, is BF16"


def test_another_shape(tmp_path):
    tensors = stored()
    name = f"{PREFIX}.1.w3.weight_packed"
    tensors[name] = tensors[name][:96].clone()
    assert refusal(shard(tmp_path, tensors)) == f"layer 5: {name} must be [128, 32], is [96, 32]"


def test_another_group_size(tmp_path):
    tensors = stored()
    name = f"{PREFIX}.2.w2.weight_scale"
    tensors[name] = torch.zeros(64, 8, dtype=torch.uint8)
    assert refusal(shard(tmp_path, tensors)) == (
        f"layer 5: {name} has 8 scales for 128 columns, groups of 16; "
        "experts.mxfp4-pack has groups of 32, 4 scales"
    )


def test_a_tensor_parallel_size_that_is_not_the_checkpoints(tmp_path):
    path = shard(tmp_path, stored(range(1)))
    asked = spec(num_experts=2, num_local=1, intermediate=32)
    assert refusal(path, spec=asked, tp=2).startswith(
        f"layer 5: {PREFIX}.0.w1.weight_packed must be [64, 32], is [128, 32]; "
    )


def test_a_name_in_two_shards(tmp_path):
    tensors = stored()
    name = f"{PREFIX}.4.w1.weight_packed"
    first = shard(tmp_path, tensors, "a.safetensors")
    second = shard(tmp_path, {name: tensors[name]}, "b.safetensors")
    assert refusal(tmp_path) == f"layer 5: {name} is in both {first} and {second}"


def test_two_sets_of_experts(tmp_path):
    path = shard(tmp_path, stored() | stored(prefix="draft.layers.5.mlp.experts"))
    assert refusal(path) == f"layer 5: two sets of experts, draft.layers.5.mlp.experts and {PREFIX}"


def test_all_reasons_come_together_and_many_are_counted(tmp_path):
    tensors = {n: t for n, t in stored().items() if not n.endswith("scale")}
    found = refusal(shard(tmp_path, tensors))
    assert found.count("is missing") == 8
    assert found.endswith("; and 10 more")


def test_nothing_is_allocated_before_the_headers_are_right(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    path = tmp_path / "model.safetensors"
    save_file(stored([0]), path)
    assert refusal(path).startswith("layer 5: 5 of 6 experts are missing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2, "tp_rank": 2}, "read_experts: tp_rank=2 is outside tp=2"),
        ({"tp_rank": -1}, "read_experts: tp_rank=-1 is outside tp=1"),
        ({"experts": [0, 1]}, "read_experts: experts names 2 experts, num_local=6"),
        ({"experts": [0, 1, 2, 3, 4, 6]}, "read_experts: experts names 6, outside num_experts=6"),
        (
            {"tp": 0, "experts": [-1]},
            "read_experts: tp_rank=0 is outside tp=0; experts names 1 experts, num_local=6; "
            "experts names -1, outside num_experts=6",
        ),
    ],
)
def test_ranks_and_experts_that_cannot_be(options, message):
    assert refusal("never-opened", error=ContractError, **options) == message


def test_a_map_needs_its_experts_named():
    found = refusal("never-opened", error=ContractError, spec=spec(has_expert_map=True))
    assert found == (
        "read_experts: experts is required by a Spec with has_expert_map=True: the ids in local order"
    )


def test_without_safetensors_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = "reading a checkpoint needs safetensors, which is not installed: pip install safetensors"
    with pytest.raises(KimiHalError, match=re.escape(message)):
        read_experts("never-opened", 5, spec())
