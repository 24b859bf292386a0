"""The prefill side of a NIXL transfer: a process of its own, with one endpoint a tensor-parallel rank."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from cache_cases import Caches, Step, pool_of, small
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache.transfer import Endpoint

BLOCK, TP, BLOCKS = 64, 2, 16

#: Where the prefill holds the two requests of ``Step``: 200 and 65 tokens.
TOKEN_BLOCKS = ((3, 1, 9, 0), (4, 5))


def layout(block_size: int, tp: int) -> cache.Layout:
    """Return the layout of an instance; conv states lie channel-major."""
    described = small(conv_layout="channel_width")
    return cache.plan(described, block_size=block_size, tp=tp, num_blocks=BLOCKS)


def share(whole: Tensor, part: cache.StatePart, rank: int) -> Tensor:
    """Return a rank's heads of a state of all heads, ``[slots, …]``."""
    axis = part.axis + 1
    runs = whole.unflatten(axis, (len(part.segments), TP, -1)).select(axis + 1, rank)
    return runs.flatten(axis, axis + 1)


def prefill(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run a step over plain caches of all heads, then lay it out as two ranks hold it.

    Returns:
        The step's outputs, and the pool of each rank. Request r's states of group g stand in block
        ``state_block(g, r)``.
    """
    whole = layout(BLOCK, 1)
    table = tuple((*ids, *[-1] * (4 - len(ids))) for ids in TOKEN_BLOCKS)
    plain = Caches.plain(whole)
    step = Step(plain, blocks=table, state_blocks=((0, 1),) * 5, seed=seed)
    outputs = step.run()
    ranks = layout(BLOCK, TP)
    pools = []
    for rank in range(TP):
        pool = pool_of(ranks)
        views = ranks.views(pool)
        for kind in ("latent", "index"):
            pages, stride = ranks.pages(kind), ranks.page_step(kind)
            for layer, view in views[kind].items():
                for block in (b for ids in TOKEN_BLOCKS for b in ids):
                    view[block * stride : block * stride + pages] = plain.views[kind][layer][block * pages :][
                        :pages
                    ]
        for part in ranks.state("kda").parts:
            for group, place in ranks.places("kda"):
                held = share(plain.views[part.name][place.layer], part, rank)
                for r in (0, 1):
                    views[part.name][place.layer][state_block(ranks, group.name, r)] = held[r]
        pools.append(pool)
    return outputs, pools


def state_block(ranks: cache.Layout, group: str, r: int) -> int:
    """Return the block in which the prefill holds a request's states of a group."""
    names = [g.name for g in ranks.groups if g.name != "tokens"]
    return 10 + 2 * names.index(group) + r


def serve(pipe: Connection, seed: int, device: str = "cpu") -> None:
    """Send cards and outputs, answer what the parent asks, end when it says so.

    A tensor that is sent moves to shared memory, so a registered pool is never sent itself.
    """
    outputs, pools = prefill(seed)
    pools = [pool.to(device) for pool in pools]
    ranks = layout(BLOCK, TP)
    ends = [Endpoint(f"prefill-{rank}", pool, ranks, rank=rank) for rank, pool in enumerate(pools)]
    pipe.send([end.card() for end in ends])
    pipe.send(dict(outputs.items()))
    answers: dict[str, Any] = {
        "pool": lambda rank: pools[rank].cpu().clone(),
        "notes": lambda rank: noted(ends[rank]),
    }
    while (asked := pipe.recv()) is not None:
        what, rank = asked
        pipe.send(answers[what](rank))
    for end in ends:
        end.close()


def noted(end: Endpoint) -> dict[str, list[bytes]]:
    """Return the notes of finished transfers; they arrive a little after the last byte."""
    for _ in range(200):
        found = end.notes()
        if found:
            return found
        time.sleep(0.01)
    return {}


class Prefill:
    """The other process, seen from the test's."""

    def __init__(self, seed: int = 3, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, seed, device), daemon=True)
        self.process.start()
        theirs.close()
        self.cards: list[bytes] = self.receive()
        self.outputs: dict[str, Tensor] = self.receive()

    def receive(self) -> Any:
        assert self.pipe.poll(120), "the other process says nothing"
        return self.pipe.recv()

    def ask(self, what: str, rank: int) -> Any:
        self.pipe.send((what, rank))
        return self.receive()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
