"""The experts' kernel in the TPU simulator, with its race detector on: weights, tiles, sums; faults must show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kimi_hal import formats
from kimi_hal.errors import ContractError
from kimi_hal.ops.moe import MoESpec
from kimi_hal.reference import moe as reference
from kimi_hal_tpu import expert_grid, scales
from kimi_hal_tpu.pallas import expert_blocks, expert_tiles, experts, moe, mxfp4
from kimi_hal_tpu.pallas.bridge import races_found, to_jax
from kimi_hal_tpu.pallas.mode import Mode

SIMULATED = Mode(simulated=True)
NAN, INF = float("nan"), float("inf")
#: Three blocks of 128 columns, of which the last is cut; three experts of eight.
SPEC = MoESpec(
    num_experts=8,
    num_local=3,
    expert_offset=2,
    topk=2,
    hidden=64,
    intermediate=288,
    out_dtype="float32",
)
ROWS = 21


@pytest.fixture(scope="module")
def call() -> dict[str, Any]:
    """Return a call: 19 rows at one expert (two tiles), two at another, none at the third, ids that name nothing."""
    draw = torch.Generator().manual_seed(3)
    fmt = formats.experts(SPEC.weights)
    shapes = {"w13": (2 * SPEC.intermediate, SPEC.hidden), "w2": (SPEC.hidden, SPEC.intermediate)}
    given: dict[str, Any] = {}
    for name, (out, columns) in shapes.items():
        weights = torch.randn(SPEC.num_local, out, columns, generator=draw) * columns**-0.5
        weights *= 2.0 ** (torch.arange(columns) // 32)
        given[name], given[f"{name}_scale"] = fmt.encode(weights)
    ids = torch.tensor([2, 7]).repeat(ROWS, 1).int()
    ids[0], ids[1], ids[2], ids[3] = (torch.tensor(pair).int() for pair in ([4, 2], [4, 4], [-1, 99], [1, 5]))
    weights = torch.rand(ROWS, 2, generator=draw)
    weights[2] = NAN
    x = torch.randn(ROWS, SPEC.hidden, generator=draw).bfloat16()
    x[2], x[5, 3], x[6, 4] = NAN, INF, NAN
    return given | {"x": x, "topk_weights": weights, "topk_ids": ids}


def run(given: Mapping[str, Any], mode: Mode = SIMULATED) -> np.ndarray[Any, Any]:
    checkpoint = {name: given[name] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    blocks = [to_jax(tensor) for tensor in expert_blocks.blocked(SPEC, **checkpoint)]
    rest = {name: to_jax(given[name]) for name in ("x", "topk_weights", "topk_ids")}
    program = jax.jit(lambda arrays: moe.moe_experts(SPEC, arrays, mode))
    return np.asarray(program(rest | {"weights": blocks})[0])


def expected(given: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    weights = [given[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
    rest = {name: given[name] for name in ("x", "topk_weights", "topk_ids")}
    return reference.moe_experts(SPEC, **rest, weights=weights, dtype=torch.float64).numpy()


def near(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> bool:
    """Tell whether a result is the exact one but for a rounding of the activation to bfloat16."""
    return np.allclose(found, exact, rtol=0.01, atol=0.004 * np.nanmax(np.abs(exact)), equal_nan=True)


@pytest.fixture(scope="module")
def found(call: dict[str, Any]) -> np.ndarray[Any, Any]:
    result = run(call)
    assert not races_found()
    return result


def test_experts_are_the_references(call: dict[str, Any], found: np.ndarray[Any, Any]) -> None:
    exact = expected(call)
    assert near(found, exact)
    assert (found[2:4] == 0).all()  # no expert here, whatever their x and weights hold
    assert np.isnan(found[6]).all()
    assert np.isfinite(found[7:]).all()


def test_larger_tiles_and_float4_give_the_same_bits(
    call: dict[str, Any], found: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_grid, "SMALLEST", expert_grid.LARGEST)
    again = run(call, Mode(simulated=True, float4=True))
    assert np.array_equal(again.view(np.int32), found.view(np.int32))


@pytest.mark.parametrize("float4", [False, True])
def test_every_code_under_every_scale_is_decoded(float4: bool) -> None:
    number = np.arange(16 * 256)
    data = (np.arange(16)[:, None] + 16 * (number // 256)).astype(np.uint8)
    codes = (number % 256)[None].astype(np.uint8)

    def kernel(data: Any, codes: Any, large: Any, small: Any) -> None:
        large[...] = mxfp4.decode(data[...], mxfp4.scales(codes[...]), float4)
        small[...] = mxfp4.decode(data[...], mxfp4.small_scales(codes[...]), float4)

    shape = jax.ShapeDtypeStruct((32, number.size), jnp.bfloat16)
    made = pl.pallas_call(kernel, out_shape=(shape, shape), interpret=SIMULATED.interpret)(data, codes)
    large, small = (np.asarray(x).astype(np.float64) for x in made)
    fmt = formats.experts(SPEC.weights)
    exact = fmt.decode(torch.tensor(data.T.copy()), torch.tensor(codes.T.copy()), torch.float64).T
    exact[exact.abs() > 2.0**127 * 1.99] = INF * exact[exact.abs() > 2.0**127 * 1.99].sign()
    np.testing.assert_array_equal(large + small * scales.BACK**2, exact.numpy())
    assert not ((large != 0) & (small != 0)).any()


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """Return a call with small scales beside others in one column, in single blocks of gate and up and of down.

    The other groups' inputs are 0 in some rows; in the others they hide what the small ones add.
    """
    draw = torch.Generator().manual_seed(5)
    given: dict[str, Any] = {}
    for name, (out, columns) in {"w13": (576, 64), "w2": (64, 288)}.items():
        given[name] = torch.randint(0, 256, (3, out, columns // 2), generator=draw, dtype=torch.uint8)
        given[f"{name}_scale"] = torch.full((3, out, columns // 32), 124, dtype=torch.uint8)
    given["w13_scale"][0, 300:310, 1], given["w13_scale"][2, :, 1] = 0, 1
    given["w2_scale"][0, :, 0], given["w2_scale"][1] = 63, 0
    x = torch.randn(ROWS, 64, generator=draw)
    x[::2] *= torch.cat([torch.zeros(32), torch.full((32,), 2.0**122)])
    ids = (torch.arange(ROWS) % 3 + 2).int()[:, None].repeat(1, 2)
    ids[::5, 1] = 2
    weights = torch.rand(ROWS, 2, generator=draw) * torch.where(ids == 3, 2.0**60, 1.0)
    return given | {"x": x.bfloat16(), "topk_weights": weights, "topk_ids": ids}


def test_no_scale_is_too_small_to_count(small: dict[str, Any]) -> None:
    found, exact = run(small), expected(small)
    for row, right in zip(found, exact, strict=True):
        assert near(row, right)
    assert np.abs(exact[1]).max() < 2.0**-40
    assert not races_found()


def test_experts_without_rows_are_in_no_tile() -> None:
    spec = MoESpec(num_experts=300, num_local=200, expert_offset=50, topk=4, hidden=32, intermediate=32)
    ids = torch.randint(0, 300, (90, 4), generator=torch.Generator().manual_seed(0)).int()
    ids[:40, 0] = 77
    ids[50:, :] = 55
    tiles = expert_tiles.cut(spec, to_jax(ids), jnp.ones((90, 4)), None, 16)
    wanted = [
        set(row) - {-1} for row in reference.local_experts(spec, ids, None).tolist()
    ]  # twice is once, doubled
    counts = torch.bincount(torch.tensor([e for row in wanted for e in row]), minlength=200)
    used = int(tiles.used[0])
    assert used == int(((counts + 15) // 16).sum())
    assert used <= tiles.expert.shape[0] == expert_grid.most(spec, 360, 16) == 23 + 200
    assert set(tiles.expert.tolist()) == set(counts.nonzero().flatten().tolist())
    assert (tiles.expert[used:] == tiles.expert[used - 1]).all()
    assert int(tiles.count[:used].sum()) == int(counts.sum())


def test_a_rank_without_rows_uses_no_tile() -> None:
    tiles = expert_tiles.cut(SPEC, jnp.full((5, 2), -1, jnp.int32), jnp.ones((5, 2)), None, 16)
    assert int(tiles.used[0]) == 0
    assert (tiles.count == 0).all()


def test_prepared_weights_share_no_memory_even_where_nothing_moves() -> None:
    spec = MoESpec(num_experts=1, num_local=1, topk=1, hidden=256, intermediate=256)
    given = [torch.zeros(shape, dtype=torch.uint8) for shape in reference.expert_shapes(spec)]
    made = expert_blocks.blocked(spec, *given)
    assert not {t.data_ptr() for t in made} & {t.data_ptr() for t in given}
    assert [tuple(t.shape) for t in made] == expert_blocks.Blocks.of(spec).shapes(1)


def test_weights_of_another_implementation_are_refused() -> None:
    plain = [np.zeros(shape, np.uint8) for shape in reference.expert_shapes(SPEC)]
    with pytest.raises(ContractError) as error:
        expert_blocks.require(SPEC, plain)
    assert str(error.value) == (
        "moe_experts: weights must be the list that prepare_moe_weights of this implementation returned for this Spec "
        "(tpu.mxfp4.blocks: uint8 [3, 3, 128, 256], uint8 [3, 3, 8, 256], uint8 [3, 3, 64, 256], "
        "uint8 [3, 3, 4, 256]), got uint8 [3, 576, 32], uint8 [3, 576, 2], uint8 [3, 64, 144], uint8 [3, 64, 9]"
    )


# A kernel with one realistic fault must be found wrong, or the checks above prove nothing.


def test_swapped_nibbles_would_be_seen(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = mxfp4.elements
    monkeypatch.setattr(mxfp4, "elements", lambda data: right((data << 4) | (data >> 4)))
    assert not near(run(call), expected(call))


def test_a_missing_last_tile_of_an_expert_would_be_seen(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expert_tiles.cut

    def whole_ones(*operands: Any) -> expert_tiles.Tiles:
        tiles = right(*operands)
        return tiles._replace(count=jnp.where(tiles.count < operands[-1], 0, tiles.count))

    monkeypatch.setattr(expert_tiles, "cut", whole_ones)
    assert not near(run(call), expected(call))


def test_scales_of_the_neighbouring_group_would_be_seen(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mxfp4.scales
    monkeypatch.setattr(mxfp4, "scales", lambda codes: right(jnp.roll(codes, 1, axis=0)))
    assert not near(run(call), expected(call))


def test_scales_that_a_tpu_takes_for_zero_would_be_seen(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4, "any_small", lambda codes: False)
    assert not all(near(*rows) for rows in zip(run(small), expected(small), strict=True))


def test_one_buffer_for_two_tiles_is_a_race_that_the_detector_finds(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "BUFFERS", 1)
    run(call)
    assert races_found()
