"""A slice's layout: its layers on eight devices of the CPU give what one gives, and exchange what it says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_hal.errors import SelectionError, SpecError
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops.composites import MoELayerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.reference import composites
from kimi_hal_tpu import collectives, layers
from kimi_hal_tpu.layout import Layout
from kimi_hal_tpu.pallas import aot

SMALL = dataclasses.replace(
    K3_1_PRO,
    hidden=64,
    mla_heads=16,
    kv_rank=32,
    pe_dim=16,
    value_dim=16,
    index_heads=4,
    index_dim=32,
    topk=12,
    kda_heads=16,
    kda_dim=16,
    experts=16,
    experts_per_token=4,
    moe_hidden=64,
    moe_intermediate=32,
)
EIGHT = Layout(groups=2, dcp=4, interleave=2, rows=4, context=64, page=4, model=SMALL, shared=32)
ONE = dataclasses.replace(EIGHT, groups=1, dcp=1)
CACHES = ("latents", "index", "index_scale")


def mesh_of(layout: Layout) -> Mesh:
    devices = np.array(jax.devices()[: layout.tp]).reshape(tuple(layout.sizes.values()))
    return Mesh(devices, tuple(layout.sizes))


def values(layer: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return every operand but the caches, which stand in order of tokens, ``[T, context, …]``."""
    random, found = np.random.default_rng(7), {}
    for name, operand in ONE.operands(layer).items():
        shape = operand.shape
        if name in CACHES:
            shape = (ONE.rows, ONE.context, *shape[1:])
        if operand.dtype == jnp.uint8:
            low, high = (120, 126) if name.endswith("_scale") else (0, 256)
            found[name] = random.integers(low, high, shape, dtype=np.uint8)
        else:
            found[name] = (random.standard_normal(shape) * 0.3).astype(np.float32)
    found |= {"index_scale": abs(found["index_scale"])} if layer == "dsa" else {}
    if layer == "kda":
        found["state_ids"] = np.array([2, 0, 3, 1])
    if layer == "dsa":
        found["row_len"] = np.array([64, 9, 1, 37])  # all of a request, few, one key, and some
    return found


def slots(layout: Layout) -> np.ndarray[Any, Any]:
    """Return where each token stands in the caches of a group, ``[T, context]``."""
    position, own = np.arange(layout.context), DCP(world=layout.dcp, interleave=layout.interleave)
    rank, local = ownership.owner(position, own), ownership.local(position, own)
    page = table(layout)[:, local // layout.page]
    return rank * (layout.slots // layout.dcp) + page * layout.page + local % layout.page


def table(layout: Layout) -> np.ndarray[Any, Any]:
    pages = np.random.default_rng(3).permutation(layout.rows * layout.columns)
    return pages.reshape(layout.rows, layout.columns).astype(np.int32)


def placed(layout: Layout, layer: str) -> dict[str, jax.Array]:
    """Return the operands laid out over the devices."""
    given, mesh, found = values(layer), mesh_of(layout), {}
    for name, operand in layout.operands(layer).items():
        whole = given.get(name)
        if name == "block_table":
            whole = table(layout)
        if name in CACHES:
            whole = np.zeros(operand.shape, np.float32)
            whole[slots(layout)] = given[name]
        found[name] = jax.device_put(
            jnp.asarray(whole).astype(operand.dtype), NamedSharding(mesh, operand.spec)
        )
    return found


@functools.cache
def step(layout: Layout, layer: str) -> dict[str, np.ndarray[Any, Any]]:
    """Run a layer; caches come back in order of tokens."""
    program = jax.jit(layers.program(layer, layout, mesh_of(layout)))
    results = {name: np.asarray(x.astype(jnp.float32)) for name, x in program(placed(layout, layer)).items()}
    return {name: x[slots(layout)] if name in CACHES else x for name, x in results.items()}


@pytest.mark.parametrize("layer", ["kda", "dsa", "moe"])
def test_eight_devices_give_what_one_gives(layer: str) -> None:
    many, one = step(EIGHT, layer), step(ONE, layer)
    assert many.keys() == one.keys()
    assert np.abs(one["y"]).max() > 0.1
    for name, expected in one.items():
        size = np.abs(expected).max()
        np.testing.assert_allclose(many[name], expected, rtol=0.02, atol=0.02 * size, err_msg=name)


# --- one device gives what the reference gives ------------------------------------------------------------------


def whole(layer: str) -> dict[str, torch.Tensor]:
    """Return one device's operands as they are rounded there, caches in order of tokens."""
    found = {}
    for name, array in placed(ONE, layer).items():
        wide = array.astype(jnp.float32) if array.dtype in (jnp.bfloat16, jnp.float8_e4m3fn) else array
        line = torch.from_numpy(np.array(wide))
        found[name] = line[torch.from_numpy(slots(ONE)).long()] if name in CACHES else line
    return found


def close(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    size = float(expected.abs().max())
    np.testing.assert_allclose(found, expected.float().numpy(), rtol=0.02, atol=0.02 * size)


def test_the_experts_layer_is_the_references() -> None:
    a, experts = whole("moe"), MoESpec(num_experts=16, num_local=16, topk=4, hidden=64, intermediate=32)
    route = RouteSpec(num_experts=16, topk=4)
    spec = MoELayerSpec(route=route, experts=experts, model_dim=64, shared_intermediate=32)
    shared = torch.cat((a["shared_w1"].T, a["shared_w3"].T))
    weights = [a["gate"].T, a["bias"], a["down"].T, a["up"].T, a["norm"], shared, a["shared_w2"].T]
    weights += [a[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
    close(step(ONE, "moe")["y"], composites.moe_layer(spec, a["x"], weights))


def test_the_kda_layer_is_the_references() -> None:
    a, spec = whole("kda"), KDASpec(num_heads=16, head_dim=16, scale=0.25)
    rows = torch.einsum("tm,mhcd->tchd", a["x"], a["qkv"])
    weight = a["conv"].permute(2, 1, 3, 0).reshape(-1, 4)
    conv_state = a["conv_state"].permute(0, 2, 3, 1, 4).reshape(4, 3, -1).contiguous()
    weights = [weight, a["A_log"], a["dt_bias"].flatten(), a["norm"]]
    beta, state = a["x"] @ a["beta"], a["state"].clone()
    o = composites.kda_layer_decode(
        spec, rows[:, :3].flatten(1), rows[:, 3], beta, rows[:, 4], weights, conv_state, state, a["state_ids"]
    )
    found = step(ONE, "kda")
    close(found["y"], torch.einsum("thd,hdm->tm", o, a["out"]))
    close(found["state"], state)
    close(found["conv_state"], conv_state.view(4, 3, 3, 16, 16).permute(0, 3, 1, 2, 4))


def test_the_attention_layer_attends_to_the_best_keys_of_the_whole_context() -> None:
    """Densely: every key is scored and every other one is masked."""
    a, found = whole("dsa"), step(ONE, "dsa")
    keys, scale, latents = (torch.from_numpy(found[name]) for name in ("index", "index_scale", "latents"))
    row = torch.arange(4)
    close(found["latents"][row, a["row_len"] - 1], a["x"] @ a["kv"])
    close((keys * scale[..., None])[row, a["row_len"] - 1].numpy(), a["x"] @ a["index_k"])
    q = torch.einsum("tm,mhd->thd", a["x"], a["index_q"]).bfloat16().to(torch.float8_e4m3fn).float()
    dots = torch.einsum("thd,tld->thl", q, keys).relu()
    scores = torch.einsum("thl,th->tl", dots, (a["x"] @ a["index_w"]).bfloat16().float()) * scale
    scores = scores.masked_fill(torch.arange(ONE.context) >= a["row_len"][:, None], -torch.inf)
    best = scores.topk(SMALL.topk).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True) & scores.isfinite()
    logits = torch.einsum("tm,mhd,tld->thl", a["x"], a["q"], latents) * SMALL.softmax_scale
    weights = logits.masked_fill(~kept[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("thl,tlc->thc", weights, latents[..., : SMALL.kv_rank])
    y = torch.einsum("thc,hcv,hvm->tm", out, a["value"], a["out"])
    close(found["y"], y)


def selected(layout: Layout) -> list[list[int]]:
    """Return the global positions that all devices of the first group select in each row."""
    mesh, operands = mesh_of(layout), layout.operands("dsa")
    specs = {name: operand.spec for name, operand in operands.items()}
    body = jax.shard_map(
        lambda a: layers.winners(layout, a)[None],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P("dcp"),
        check_vma=False,
    )
    local = np.asarray(jax.jit(body)(placed(layout, "dsa")))
    rows: list[list[int]] = [[] for _ in range(layout.rows)]
    for rank, mine in enumerate(local):
        own = DCP(world=layout.dcp, rank=rank, interleave=layout.interleave)
        for row, line in enumerate(mine):
            rows[row] += [ownership.position(int(j), own) for j in line if j >= 0]
    return [sorted(row) for row in rows]


def test_eight_devices_select_what_one_selects() -> None:
    found = selected(EIGHT)
    assert [len(row) for row in found] == [12, 9, 1, 12]
    assert found == selected(ONE)


@pytest.mark.parametrize("layer", ["kda", "dsa", "moe"])
def test_a_compiled_program_exchanges_what_the_layout_says(layer: str) -> None:
    """Compiled for the CPU, whose XLA sums bfloat16 in float32."""
    program = layers.program(layer, EIGHT, mesh_of(EIGHT))
    compiled = jax.jit(program).lower(placed(EIGHT, layer)).compile()
    found = [(c.op, c.ranks) for c in collectives.found(compiled.as_text())]
    assert sorted(found) == sorted((e.how.op, e.how.ranks) for e in EIGHT.exchanges(layer))


@pytest.mark.full  # a whole layer of K3.1 for 32 devices takes the compiler a minute or two
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layer", ["kda", "dsa", "moe"])
def test_a_program_for_a_slice_exchanges_the_bytes_that_the_layout_says(layer: str) -> None:
    layout = Layout()
    mesh = aot.mesh("tpu7x:2x2x4", **layout.sizes)
    code = layers.compiled(layer, layout, mesh, layers.kernels(ring=False))
    found = [(c.op, c.ranks, c.operand) for c in collectives.found(code.text)]
    assert sorted(found) == sorted((e.how.op, e.how.ranks, e.how.operand) for e in layout.exchanges(layer))
    assert code.kernels == (layer == "dsa")  # the selection; what else is on SparseCore libtpu put there


def test_collectives_are_read_with_their_groups_and_bytes() -> None:
    text = """
      %a = bf16[64,24,576]{2,0,1:T(8,128)(2,1)} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}
      %b = f32[112,64]{1,0} reduce-scatter(%p), replica_groups=[1,32]<=[32], dimensions={0}
      %c = (s32[8], s32[32]) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
      %d = s32[32] all-gather-done(%c)
      %e = (f32[4], bf16[6]) all-reduce(%p, %q), replica_groups={{0,1}}, to_apply=%sum
    """
    assert [(c.op, c.ranks, c.operand, c.sent) for c in collectives.found(text)] == [
        ("all-gather", 4, 442368, 1327104),
        ("reduce-scatter", 32, 917504, 888832),
        ("all-gather", 4, 32, 96),
        ("all-reduce", 2, 28, 28),
    ]


def test_each_device_of_the_slice_holds_its_share() -> None:
    layout = Layout()
    own = {
        n: o.own(layout.sizes) for layer in ("kda", "dsa", "moe") for n, o in layout.operands(layer).items()
    }
    assert own["q"] == (7168, 3, 576)
    assert own["state"] == (64, 3, 128, 128)
    assert own["w13"] == (28, 6144, 1792)
    assert own["latents"] == (64 * 65536 // 8, 576)
    assert own["block_table"] == (64, 128)


def test_a_slice_that_does_not_divide_evenly_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        Layout(groups=5, dcp=8)
    assert str(error.value) == (
        "a slice of 5 groups of 8 devices does not divide evenly: mla_heads 96 into 40, kda_heads 96 into 40, "
        "experts 896 into 40, moe_hidden 3584 into 40, the shared experts' width 6144 into 40, rows 64 into 5"
    )
    with pytest.raises(SelectionError) as refused:
        aot.mesh("tpu7x:2x2x1", group=4, dcp=8)
    assert str(refused.value) == "tpu7x:2x2x1 has 8 devices, the mesh asks for 32: group 4 × dcp 8"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"groups": 0, "page": -1}, "groups=0, page=-1"),
        ({"groups": -1, "dcp": -1}, "groups=-1, dcp=-1"),
        ({"groups": 1.0, "interleave": 0}, "groups=1.0, interleave=0"),
        ({"rows": 0, "context": True, "shared": 0}, "rows=0, context=True, shared=0"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        Layout(**sizes)
    assert str(error.value) == f"sizes of a slice are whole numbers of 1 or more, got {said}"


@pytest.mark.parametrize(
    ("axes", "said"), [({"a": -2, "b": -2}, "a=-2, b=-2"), ({"a": 4, "b": 1.0}, "b=1.0"), ({}, "no axis")]
)
def test_a_mesh_without_devices_along_an_axis_is_refused(axes: dict[str, Any], said: str) -> None:
    with pytest.raises(SelectionError) as error:
        aot.mesh("v6e:2x2", **axes)
    assert str(error.value) == f"a mesh has axes of 1 device or more, got {said}: mesh('v6e:2x2', dcp=…)"
