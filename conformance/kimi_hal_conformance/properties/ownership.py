"""Who owns a position under decode context parallelism, and where it stands there."""

from __future__ import annotations

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain

WORLDS = ((1, 1), (2, 1), (3, 4), (4, 4), (8, 64))


@holds(
    "ownership/positions-come-back",
    "all positions below 300 of 1, 2, 3, 4 and 8 ranks, interleaves 1, 4 and 64",
)
def positions_come_back(modules: Modules) -> None:
    """A position's place on its owner is that position again."""
    ownership, dcp_of = modules("parallel.ownership"), modules("ops.spec").DCP
    for world, interleave in WORLDS:
        position = torch.arange(300)
        owner = ownership.owner(position, dcp_of(world=world, interleave=interleave))
        runs = [int(p) // interleave % world for p in position]
        expect(f"owners, W={world}, I={interleave}", owner.tolist(), runs)
        for rank in range(world):
            dcp = dcp_of(world=world, rank=rank, interleave=interleave)
            mine = position[owner == rank]
            place = ownership.local(mine, dcp)
            expect(
                f"places on rank {rank} of {world}, I={interleave}", place.tolist(), list(range(len(mine)))
            )
            back = ownership.position(place, dcp)
            expect(f"positions of rank {rank} of {world}, I={interleave}", back.tolist(), mine.tolist())


@holds("ownership/lengths", "lengths −2 to 299 of 1, 2, 3, 4 and 8 ranks, as numbers and as a tensor")
def lengths(modules: Modules) -> None:
    """A rank's length is how many of the first positions it owns, whichever form is asked."""
    ownership, dcp_of = modules("parallel.ownership"), modules("ops.spec").DCP
    for world, interleave in WORLDS:
        for rank in range(world):
            dcp = dcp_of(world=world, rank=rank, interleave=interleave)
            owned = [p // interleave % world == rank for p in range(300)]
            wanted = [sum(owned[: max(0, n)]) for n in range(-2, 300)]
            name = f"rank {rank} of {world}, I={interleave}"
            expect(
                f"lengths of {name}, as numbers",
                [ownership.local_length(n, dcp) for n in range(-2, 300)],
                wanted,
            )
            got = ownership.local_length(torch.arange(-2, 300), dcp).tolist()
            expect(f"lengths of {name}, as a tensor", got, wanted)


@holds("ownership/replicated-keys", "keys that each of 4 ranks holds whole")
def replicated_keys(modules: Modules) -> None:
    """Index keys that every rank holds are spread over nobody."""
    ownership, dcp_of = modules("parallel.ownership"), modules("ops.spec").DCP
    keys = ownership.of_keys(dcp_of(world=4, rank=2, interleave=4, index="replicated"))
    expect("length on rank 2 of 4", ownership.local_length(65, keys), 65)
    sharded = ownership.of_keys(dcp_of(world=4, rank=2, interleave=4))
    expect("length on rank 2 of 4, sharded", ownership.local_length(65, sharded), 16)


@plain("ownership")
def one_rank_and_interleave_1(modules: Modules) -> object:
    """Return lengths and places of ranks that take turns position by position."""
    ownership, dcp_of = modules("parallel.ownership"), modules("ops.spec").DCP
    dcp = dcp_of(world=4, rank=2)
    return [
        (ownership.owner(p, dcp), ownership.local(p, dcp), ownership.local_length(p, dcp)) for p in range(64)
    ]
