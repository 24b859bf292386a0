"""Random merges of rows full of ties, against the selection of one rank: calls of 1 to 512 rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from merge_cases import PROTOCOLS, merge, tied_rows
from torch import Tensor

from kimi_hal.ops.spec import Limits
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.reference import selection

WORLDS = (2, 3, 4, 8, 32)
INTERLEAVES = (1, 4, 64)
KINDS = [(p, w, i) for p in PROTOCOLS for w in WORLDS for i in INTERLEAVES]
#: Rows of each of the 45 kinds, so that there are 100,000 in all.
ROWS = -(-100_000 // len(KINDS))


def calls(rows: int, seed: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rows, k and width of calls that have ``rows`` rows together, and a seed for their scores."""
    draw = random.Random(seed)
    while rows:
        count = min(rows, draw.choice((1, draw.randint(2, 16), draw.randint(17, 512))))
        k = draw.choice((1, 7, 32, 64))
        yield count, k, draw.choice((k, 3 * k + 1, 300)), draw.randrange(1 << 30)
        rows -= count


def check(protocol: str, world: int, interleave: int, rows: int) -> int:
    """Merge ``rows`` rows, eagerly and as captured; return how many there were."""
    done = 0
    for count, k, width, seed in calls(rows, f"{protocol} {world} {interleave}"):
        scores, lengths = tied_rows(count, width, seed)
        expected = selection.select_positions(scores, lengths, k)
        merged = merge(scores, lengths, k, world, interleave, protocol=protocol)
        assert torch.equal(merged.union(k), expected), (count, k, width, seed)
        if protocol != "scores_only":
            assert all(torch.equal(e.long(), expected) for e in merged.everyones), (count, k, width, seed)
        captured(protocol, world, interleave, k, (scores, lengths), expected)
        done += count
    return done


def captured(
    protocol: str, world: int, interleave: int, k: int, rows: tuple[Tensor, Tensor], expected: Tensor
) -> None:
    """Merge as captured with little room: every row is right, or has nothing and is counted in the flag."""
    limits, made = Limits(max_rows=512, max_reqs=1), []

    def make(spec, group):
        made.append(CapturedMerge(spec, group, limits, device="cpu", capacity=Capacity(16, max(1, k // 2))))
        return made[-1].run

    found = merge(*rows, k, world, interleave, protocol=protocol, make=make).union(k)
    wrong = (found != expected).any(dim=1)
    assert (found[wrong] == -1).all()
    assert [int(each.flag) for each in made] == [int(wrong.sum())] * world


@pytest.mark.parametrize(("protocol", "world", "interleave"), KINDS)
def test_a_few_random_rows_of_every_kind(protocol: str, world: int, interleave: int) -> None:
    rows = 40 if world == 32 else 120
    assert check(protocol, world, interleave, rows) == rows


@pytest.mark.full
@pytest.mark.parametrize(("protocol", "world", "interleave"), KINDS)
def test_a_hundred_thousand_random_rows(protocol: str, world: int, interleave: int) -> None:
    assert check(protocol, world, interleave, ROWS) == ROWS


def test_the_kinds_make_a_hundred_thousand_rows() -> None:
    assert ROWS * len(KINDS) >= 100_000


def test_compact_sends_at_most_a_tenth_of_full_at_the_models_sizes() -> None:
    k, width = 2048, 6000
    scores = torch.where(torch.arange(width) % 2 == 0, 1.0, 0.0).bfloat16().expand(2, -1).clone()
    scores[:, 2 * k :] = -1.0
    lengths = torch.tensor([width, width], dtype=torch.int32)
    # Interleave 2 gives every rank the same number of the 2,048 winners.
    sent = {p: merge(scores, lengths, k, 8, 2, protocol=p) for p in ("full", "compact")}
    assert torch.equal(sent["compact"].union(k), torch.arange(0, 2 * k, 2).expand(2, -1))
    assert sent["full"].sent == [2 * 16384] * 8
    assert sent["compact"].sent == [2 * 1548] * 8
