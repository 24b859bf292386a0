from __future__ import annotations

from typing import Any

import pytest
import torch

from kimi_hal.errors import SpecError
from kimi_hal.ops import all_gather
from kimi_hal.ops.all_gather import DTYPES, GatherSpec
from kimi_hal.ops.check import problems
from kimi_hal.ops.operator import output_shapes
from kimi_hal.ops.spec import DCP


def spec(layout: str = "token_order", **fields: Any) -> GatherSpec:
    return GatherSpec(**{"layout": layout, "dtype": "bfloat16", "ndim": 3, "dcp": DCP(world=4), **fields})


X = torch.zeros(5, 2, 3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"layout": "rank-major"},
            "layout='rank-major' is not 'rank_major' | 'token_order' | 'last_dim'; did you mean 'rank_major'?",
        ),
        ({"ndim": 0}, "ndim=0 is not 1 to 8"),
    ],
)
def test_a_field_outside_its_domain_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**fields)
    assert str(caught.value) == f"GatherSpec: {reason}"


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"did you mean 'float8_e4m3fn'\?$"):
        spec(dtype="float8_e4m3")


def test_every_dtype_is_torchs() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)


@pytest.mark.parametrize(
    ("layout", "total", "shape"),
    [
        ("rank_major", None, (4, 5, 2, 3)),
        ("last_dim", None, (5, 2, 12)),
        ("token_order", None, (20, 2, 3)),
        ("token_order", 17, (17, 2, 3)),
        ("token_order", 0, (0, 2, 3)),
    ],
)
def test_the_shape_follows_the_layout(layout: str, total: int | None, shape: tuple[int, ...]) -> None:
    (out,) = output_shapes(all_gather, spec(layout), None, {"x": X, "total": total})
    assert (out.shape, out.dtype) == (shape, "bfloat16")


def test_a_buffer_of_another_shape_is_refused() -> None:
    given = {"x": X, "total": 17, "out": torch.zeros(17, 2, 3, dtype=torch.bfloat16)}
    assert problems(all_gather, spec(), given) == []
    given["out"] = torch.zeros(20, 2, 3, dtype=torch.bfloat16)
    assert len(problems(all_gather, spec(), given)) == 1


def test_another_dtype_or_number_of_dimensions_is_refused() -> None:
    assert problems(all_gather, spec(), {"x": X.float()}) == ["x must be bfloat16, got float32"]
    assert problems(all_gather, spec(), {"x": X[0]}) == ["x must have 3 dimensions, got shape [2, 3]"]


def test_a_total_that_does_not_fit_is_a_wrong_value() -> None:
    assert all_gather.values is not None
    wrong = list(all_gather.values(spec(dcp=DCP(world=4, interleave=8)), None, {"x": X, "total": 20}))
    assert wrong == ["total=20 puts 8 rows on rank 0 at interleave 8, x has 5"]


def test_an_output_over_the_input_is_a_wrong_value() -> None:
    assert all_gather.values is not None
    given = {"x": X, "total": None, "out": X}
    assert list(all_gather.values(spec(), None, given)) == ["out overlaps x"]


def test_total_is_a_host_number() -> None:
    assert all_gather.scalars == ("total",)
