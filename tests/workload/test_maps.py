from __future__ import annotations

import pytest
import torch

from kimi_hal.workload import maps


@pytest.mark.parametrize("wide", [384, 512, 576, 3584, 7168, 12288])
def test_columns_are_orthonormal(wide: int) -> None:
    dense = maps.isometry(31, "hidden", 384, wide).matrix()
    torch.testing.assert_close(dense.T @ dense, torch.eye(384, dtype=torch.float64), rtol=0, atol=1e-14)


def test_a_map_that_narrows_has_orthonormal_rows() -> None:
    dense = maps.isometry(31, "hidden", 384, 64).matrix()
    torch.testing.assert_close(dense @ dense.T, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-15)


def test_dot_products_are_kept() -> None:
    x = torch.randn(5, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = maps.isometry(31, "hidden", 384, 7168).expand(x, 1.0, torch.float64)
    torch.testing.assert_close(wide @ wide.T, x @ x.T, rtol=1e-13, atol=1e-13)


def test_the_gain_keeps_the_root_mean_square() -> None:
    x = torch.randn(5, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = maps.isometry(31, "hidden", 384, 3584)
    rms = wide.expand(x, wide.gain, torch.float64).square().mean(-1)
    torch.testing.assert_close(rms, x.square().mean(-1), rtol=1e-13, atol=0)


def test_a_channel_that_stands_out_stands_out_in_every_block() -> None:
    x = torch.ones(1, 384, dtype=torch.float64)
    x[0, 100] = 50
    wide = maps.isometry(31, "hidden", 384, 7168)
    large = wide.expand(x, wide.gain, torch.float64).abs() > 25
    assert int(large.sum()) in (18, 19)
    assert large[0].equal(wide.index == 100)


def test_pieces_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 2, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = maps.isometry(31, "hidden", 384, 576)
    whole = wide.expand(x, 1.0, torch.bfloat16)
    monkeypatch.setattr(maps, "CHUNK", 576 * 4)
    assert wide.expand(x, 1.0, torch.bfloat16).equal(whole)
    assert whole.shape == (9, 2, 576)
    assert wide.expand(x[:0], 1.0, torch.bfloat16).shape == (0, 2, 576)


def test_some_columns_are_those_of_the_whole() -> None:
    x = torch.randn(3, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide, some = maps.isometry(31, "g", 384, 12288), torch.tensor([5, 12287, 640])
    assert wide.columns(some).expand(x, 2.0, torch.float32).equal(wide.expand(x, 2.0, torch.float32)[:, some])


def test_a_map_is_decided_by_seed_name_and_widths() -> None:
    first = maps.isometry(31, "hidden", 384, 7168)
    again = maps.isometry(31, "hidden", 384, 7168)
    assert first.index.equal(again.index)
    assert first.factor.equal(again.factor)
    assert not first.index.equal(maps.isometry(32, "hidden", 384, 7168).index)
    assert not first.index.equal(maps.isometry(31, "latent", 384, 7168).index)
    assert not first.index[:3584].equal(maps.isometry(31, "hidden", 384, 3584).index)
