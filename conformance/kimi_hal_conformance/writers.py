"""How quantised results are judged where more than one code is right.

A cache writer that declares another tie rule, and a query that is turned before it is quantised: the turn is a
sum of 128 terms, whose last bits are free, and a value at a border may fall to either side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import minifloat, scales
from kimi_hal.formats.minifloat import MiniFloat
from kimi_hal.reference.indexer import hadamard
from kimi_hal_conformance.budget import ACCUMULATION_MAX, compare, compare_exact, rounding, unit, wrong
from kimi_hal_conformance.mutants.clone import OPERATOR_PARTS, Clone
from kimi_hal_conformance.trial import Trial
from kimi_hal_conformance.verdict import Measure

WRITERS = ("store_latent", "store_index_keys")

# --- the tie rule of a cache writer ---------------------------------------------------------------------


def by_tie(trial: Trial) -> Iterator[Measure]:
    """Compare a cache with what the reference writes if it breaks ties as the writer declares.

    What is no tie has one code, whatever is declared, and so has every scale. The bfloat16 parts of a format
    may break theirs to even as well: a writer's conversion to bfloat16 is often another instruction.
    """
    operands, got = trial.question.operands, trial.got.mutated["cache"]
    allowed = [_written(trial, operands, tie) for tie in _rules(trial.declared.writer_tie)]
    halves = [t.contiguous().view(torch.int16) for t in (got, *allowed)]
    right = (halves[1] == halves[0]) | (halves[2] == halves[0])
    yield compare_exact("cache", halves[0].where(right, halves[0]), halves[1].where(~right, halves[0]))


def _rules(tie: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the rules of small elements and of bfloat16 that are right together."""
    return (tie, tie), (tie, "even")


def _written(trial: Trial, operands: Mapping[str, Any], ties: tuple[str, str]) -> Tensor:
    op = trial.question.op
    given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in operands.items()}
    modules = tied(*ties)
    getattr(modules(f"reference.{op.family}"), op.name)(trial.spec, **given)
    cache_: Tensor = given["cache"]
    return cache_


@cache
def tied(elements: str, halves: str) -> Callable[[str], ModuleType]:
    """Return the modules of a private copy of the core whose writers break ties by these rules."""
    clone = Clone(f"kimi_hal_ties_{elements}_{halves}", OPERATOR_PARTS)
    right = minifloat.encode

    def encode(x: Tensor, kind: MiniFloat) -> Tensor:
        return settled(x, right(x, kind), kind, elements)

    def bf16_bytes(x: Tensor) -> Tensor:
        bits = halved(x, halves).view(torch.int16)
        return torch.where(torch.isnan(x), 0x7FC0, bits).to(torch.int16).view(torch.uint8)

    vars(clone.module("formats.minifloat"))["encode"] = encode
    vars(clone.module("formats.latent_bytes"))["bf16_bytes"] = bf16_bytes
    return clone.module


def settled(x: Tensor, codes: Tensor, kind: MiniFloat, tie: str) -> Tensor:
    """Return codes whose ties to even are broken by another rule: ``away`` from zero, ``down`` towards it."""
    if tie == "even":
        return codes
    magnitude = codes & ((1 << (kind.width - 1)) - 1)
    sign = codes - magnitude
    values = minifloat.decode(magnitude, kind, torch.float64)
    exact = x.double().abs().clamp(max=kind.largest)
    step = torch.where(exact > values, 1, -1)
    other = (magnitude.int() + step).clamp(0, (1 << (kind.width - 1)) - 1)
    beside = minifloat.decode(other.to(torch.uint8), kind, torch.float64)
    tie_here = (exact - values).abs() == (beside - exact).abs()
    better = (step > 0) if tie == "away" else (step < 0)
    change = tie_here & better & (exact != values)
    found = torch.where(change, other.to(torch.uint8), magnitude) + sign
    negative = torch.signbit(x) & change & (magnitude == 0)  # a type without −0 had no sign to keep
    return torch.where(negative, found | (1 << (kind.width - 1)), found).to(torch.uint8)


def halved(x: Tensor, tie: str) -> Tensor:
    """Return bfloat16 numbers, ties broken to even, away from zero, or towards it."""
    bits = x.float().view(torch.int32)
    tie_here = (bits & 0xFFFF) == 0x8000
    even = x.to(torch.bfloat16)
    if tie == "even":
        return even
    cut = (bits >> 16).to(torch.int16) + (1 if tie == "away" else 0)
    return torch.where(tie_here & torch.isfinite(x), cut.to(torch.int16), even.view(torch.int16)).view(
        torch.bfloat16
    )


# --- a query that is turned first -----------------------------------------------------------------------


@dataclass(frozen=True)
class Turned:
    """The query after its turn, ``[T, H, 128]`` float64, and how wrong float32 may have it."""

    values: Tensor
    slack: float

    @classmethod
    def of(cls, q: Tensor) -> Turned:
        """Turn a query in float64, and in float32 to see what that costs."""
        exact, narrow = hadamard(q.double()), hadamard(q.float())
        finite = torch.isfinite(exact) & torch.isfinite(narrow)
        cost = unit(narrow, exact, finite).no_less_than(rounding(exact, torch.float32, finite))
        return cls(exact, ACCUMULATION_MAX * cost.maximum)


def by_query(trial: Trial) -> Iterator[Measure]:
    """Judge a quantised query; where it was turned, by the codes and scales that its slack lets it have."""
    if not trial.spec.hadamard:
        yield from plain(trial)
        return
    fmt, got = formats.index(trial.spec.index), trial.got.outputs
    turned = Turned.of(trial.question.operands["q"])
    judge = _mx if fmt.element == "e2m1" else _fp8
    yield from judge(trial, fmt, turned, got)


def plain(trial: Trial) -> Iterator[Measure]:
    """Compare codes and scales exactly, weights by their budget."""
    for name, got in trial.got.outputs.items():
        exact, reference = trial.exact.outputs[name], trial.reference.outputs[name]
        if got.element_size() == 1:
            yield compare_exact(name, got.view(torch.uint8), exact.view(torch.uint8))
        else:
            yield compare(name, got, exact, reference)


def _fp8(trial: Trial, fmt: Any, turned: Turned, got: Mapping[str, Tensor]) -> Iterator[Measure]:
    """Hold codes to one power of two a row and head, that the weights must have been given too."""
    low, high = (_fp8_scale(turned, fmt.element, way) for way in (-1, 1))
    weights = trial.question.operands["weights"].double() * trial.spec.folded_scale
    mine = got["weights_out"].double()
    scale = torch.where((mine - weights * low).abs() <= (mine - weights * high).abs(), low, high)
    yield from _codes("q_out", got["q_out"].view(torch.uint8), turned, scale[..., None], fmt.element)
    yield compare_exact("q_scale_out", got["q_scale_out"], trial.exact.outputs["q_scale_out"])
    exact = weights * scale
    yield compare("weights_out", got["weights_out"], exact, exact.float())


def _fp8_scale(turned: Turned, element: str, way: int) -> Tensor:
    largest = (scales.amax(turned.values.float()).double() + way * turned.slack).clamp(min=0).float()
    return scales.exp2(scales.fp8_exponent(largest, element)).double()


def _mx(trial: Trial, fmt: Any, turned: Turned, got: Mapping[str, Tensor]) -> Iterator[Measure]:
    """Hold each block's exponent to what its largest value may be, and its codes to that exponent."""
    blocks = scales.groups(turned.values, scales.MX_GROUP)
    largest = scales.amax(blocks.float()).double()
    low, high = (
        scales.ceil_log2(scales.divide((largest + way * turned.slack).clamp(min=0).float(), 6.0)) + 127
        for way in (-1, 1)
    )
    mine = got["q_scale_out"].int()
    expected = torch.where((mine >= low) & (mine <= high), mine, high)
    yield compare_exact("q_scale_out", mine, expected)
    codes = got["q_out"].view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    scale = torch.ldexp(torch.ones_like(largest), expected - 127).repeat_interleave(scales.MX_GROUP, dim=-1)
    yield from _codes("q_out", nibbles, turned, scale, "e2m1")
    names = (trial.exact, trial.reference)
    exact, reference = (a.outputs["weights_out"] for a in names)
    yield compare("weights_out", got["weights_out"], exact, reference)


def _codes(name: str, codes: Tensor, turned: Turned, scale: Tensor, element: str) -> Iterator[Measure]:
    """Say whether each code is the nearest of some value within the slack."""
    kind = minifloat.ELEMENTS[element]
    mine = minifloat.decode(codes, kind, torch.float64)
    low, high = (
        minifloat.decode(
            minifloat.encode(((turned.values + way * turned.slack) / scale).float(), kind),
            kind,
            torch.float64,
        )
        for way in (-1, 1)
    )
    right = ((mine >= low) & (mine <= high)) | (mine.isnan() & low.isnan())
    if bool(right.all()):
        yield Measure(tensor=name, exact=True)
        return
    where = (~right).nonzero()[0].tolist()
    at = tuple(where)
    yield wrong(
        name,
        f"{int((~right).sum())} of {right.numel()} codes are not the nearest; first at {where}: "
        f"{mine[at].item():g} for {float((turned.values / scale)[at]):.6g}",
        exact=True,
    )
