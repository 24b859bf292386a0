"""Cases of ties hold ties: whoever breaks them another way writes other bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.formats import minifloat
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.cases.ties import halves, points
from kimi_hal_conformance.writers import tied

load()
TIES = [name for name in cases.CASES if "/edges/ties/" in name]
#: Formats of which a part is in bfloat16.
PARTLY_BFLOAT16 = ("latent.bf16", "latent.flashmla.656")


def written(name: str, elements: str = "even", in_bfloat16: str = "even") -> list[Tensor]:
    """Return the codes that the reference makes of a case, ties broken by these rules."""
    case = cases.get(name)
    op = ops.get(case.operator)
    operands: dict[str, Any] = dict(case.make(cases.generator(case, 0)))
    found = getattr(tied(elements, in_bfloat16)(f"reference.{op.family}"), op.name)(case.spec, **operands)
    return [found[0].view(torch.uint8)] if op.outs else [operands["cache"].clone()]


def differing(one: list[Tensor], other: list[Tensor]) -> int:
    """Return how many bytes differ."""
    return sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))


def test_every_writer_has_a_case_in_every_format() -> None:
    found = {name.partition("/")[0] for name in TIES}
    assert found == {"quantize_index_query", "store_index_keys", "store_latent"}
    assert len(TIES) == 2 * 7 + 5


@pytest.mark.parametrize("name", [n for n in TIES if not n.endswith("latent.bf16")])
def test_other_rules_for_ties_of_small_elements_give_other_codes(name: str) -> None:
    even, away, down = (written(name, rule) for rule in ("even", "away", "down"))
    assert differing(even, away) >= 20
    assert differing(even, down) >= 20
    assert differing(away, down) >= 40


@pytest.mark.parametrize("name", [f"store_latent/edges/ties/{n}" for n in PARTLY_BFLOAT16])
def test_other_rules_for_ties_of_bfloat16_give_other_bytes(name: str) -> None:
    even, away, down = (written(name, "even", rule) for rule in ("even", "away", "down"))
    assert differing(even, away) >= 20
    assert differing(even, down) >= 20


@pytest.mark.parametrize(
    "name",
    [
        "store_index_keys/edges/values/index.fp8.e4m3fn.pow2.page64",
        "store_latent/edges/latent.fp8.e4m3fn.tensor",
        "store_latent/edges/latent.flashmla.656",
    ],
)
def test_cases_of_hard_values_have_some_too(name: str) -> None:
    assert differing(written(name), written(name, "away")) > 0


@pytest.mark.parametrize("kind", [minifloat.E2M1, minifloat.E4M3FN, minifloat.E4M3FNUZ])
def test_points_are_half_way_between_neighbours(kind: minifloat.MiniFloat) -> None:
    found = points(kind, kind.largest).abs().unique()
    codes = minifloat.encode(found, kind)
    values = minifloat.decode(codes, kind)
    step = torch.where(values > found, -1, 1)
    other = minifloat.decode((codes.int() + step).to(torch.uint8), kind)
    assert torch.equal((values + other) / 2, found)
    assert bool((codes % 2 == 0).all())  # to even
    assert {-1, 1} == set(step.tolist())


def test_halves_are_half_way_between_two_bfloat16_numbers() -> None:
    assert bool(((halves().view(torch.int32) & 0xFFFF) == 0x8000).all())
