from __future__ import annotations

import pytest
import torch

from kimi_hal.workload import codes
from kimi_hal_conformance.workload import integers


def decoded(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return codes.unpack(stored["hidden.codes"]).double() * stored["hidden.scale"] * 2.0**-16


def test_each_channel_is_within_half_a_step() -> None:
    states = torch.randn(200, 384, generator=torch.Generator().manual_seed(0))
    states[:, 9] *= 20  # its own resolution; the others keep theirs
    stored = integers.hidden(states)
    step = stored["hidden.scale"].double() * 2.0**-16
    assert ((decoded(stored) - states.double()).abs() <= step / 2 + 1e-12).all()
    assert step[9] > 10 * step[8]


def test_the_largest_magnitude_of_a_channel_fits() -> None:
    states = torch.zeros(2, 384)
    states[0, 0], states[1, 0] = 5.0, -5.0
    stored = integers.hidden(states)
    assert codes.unpack(stored["hidden.codes"])[:, 0].tolist() == [31, -31]


def test_a_channel_of_zeros_stays_zero() -> None:
    stored = integers.hidden(torch.zeros(1, 384))
    assert stored["hidden.scale"].min() == 1
    assert decoded(stored).abs().max() == 0


class FakeEncoder:
    def __init__(self, value: float) -> None:
        self.value = value

    def weight(self, layer: int, name: str) -> torch.Tensor:
        return torch.full((384,) if name.endswith("bias") else (384, 384), self.value)


def test_weights_are_rounded_to_their_units() -> None:
    stored = integers.projections(FakeEncoder(0.1), 2)  # type: ignore[arg-type]
    assert set(stored) == {f"{n}.{p}" for n in ("query", "key", "value") for p in ("weight", "bias")}
    assert set(stored["key.weight"].flatten().tolist()) == {round(0.1 * 2**13)}
    assert set(stored["key.bias"].tolist()) == {round(0.1 * 2**12)}


def test_a_weight_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OverflowError, match=r"^layer 2's query weight exceeds ±3\.99988$"):
        integers.projections(FakeEncoder(4.5), 2)  # type: ignore[arg-type]
