"""What ``minimal_engine.py`` prints: everything that an engine does, beside another way to the same result.

Its arguments are the lengths of the prompts; a kernel that is interpreted wants short ones.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from minimal_engine import BLOCK, BLOCKS, DEVICE, DRAFTS, Engine, Request
from tiny_model import MODEL
from torch import Tensor

from kimi_hal.parallel import Group, LoopbackGroup, TorchGroup
from kimi_hal.parallel.exchange import gather_heads

PROMPTS = (270, 41)
#: Tokens of a prompt, at most: two of them, computed twice, fit the engine's blocks.
LONGEST = 1024
STEPS = 8


@dataclass(frozen=True)
class Seen:
    """What layers were given, what the sparse ones selected, and what they attended to ``[rows, H, 512]``."""

    inputs: list[Tensor]
    picked: list[Tensor]
    attended: Tensor


class Watched(Engine):
    """Notes what each layer is given and what the sparse ones select and attend to.

    Args:
        group: the ranks.
        inputs: what layers are given instead, in the order of calls: a run of another group is compared layer
            by layer, since a rounding in one would change what the next selects.
    """

    def __init__(self, group: Group | None = None, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__(group)
        self.given: list[Tensor] = [*inputs]
        self.inputs: list[Tensor] = []
        self.picked: list[Tensor] = []
        self.attended: list[Tensor] = []
        name, which = ("topk_merge", 2) if self.group else ("indexer_topk", 0)
        select = self.run[name]

        def noted(*operands: Any, **keywords: Any) -> Any:
            result = select(*operands, **keywords)
            self.picked.append(result[which])
            return result

        self.run[name] = noted

    def dsa(self, layer: int, x: Tensor, m: Any) -> Tensor:
        """Attend, and note it."""
        self.attended.append(super().dsa(layer, self._input(x), m))
        return self.attended[-1]

    def kda(self, layer: int, x: Tensor, m: Any) -> Any:
        """Advance the states."""
        return super().kda(layer, self._input(x), m)

    def seen(self) -> Seen:
        """Return all of it so far: the same on all ranks, with all heads."""
        attended = torch.cat(self.attended)
        if self.group:
            attended = gather_heads(self.group, attended)
        return Seen([*self.inputs], [*self.picked], attended)

    def _input(self, x: Tensor) -> Tensor:
        self.inputs.append(self.given.pop(0) if self.given else x)
        return self.inputs[-1]


class Story:
    """Two requests, prefilled in chunks and decoded together.

    Attributes:
        engine: that did it.
        requests: with their new tokens.
        first: the logits after each prompt.
        later: the logits of each step, ``[STEPS, R, vocabulary]``.
    """

    def __init__(
        self, engine: Engine, chunk: int, prompts: Sequence[int] = PROMPTS, steps: int = STEPS
    ) -> None:
        self.engine = engine
        self.requests = [engine.add(prompt(length, seed)) for seed, length in enumerate(prompts)]
        self.first = torch.stack([engine.prefill(request, chunk) for request in self.requests])
        self.later = torch.stack([engine.decode(self.requests) for _ in range(steps)])


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    random = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, MODEL.vocabulary, (length,), generator=random).tolist()
    return tokens


def speculate(engine: Engine, requests: Sequence[Request], wanted: Sequence[Request]) -> list[list[int]]:
    """Generate what another run generated; a wrong guess stands at another place in each call, or nowhere.

    Returns:
        How many guesses each call kept, by request.
    """
    kept: list[list[int]] = []
    pairs = [*zip(requests, wanted, strict=True)]
    while left := [(r, w) for r, w in pairs if r.done < w.done]:
        drafts = [w.tokens[len(r.tokens) :][: min(DRAFTS, w.done - r.done - 1)] for r, w in left]
        for i, draft in enumerate(drafts):
            wrong = slice((len(kept) + i + 1) % (DRAFTS + 1), None)
            draft[wrong] = [(token + 1) % MODEL.vocabulary for token in draft[wrong]]
        kept.append(engine.verify([r for r, _ in left], drafts))
    return kept


def same_states(engine: Engine, one: Request, other: Request) -> bool:
    """Tell whether two requests have the same bits as their KDA states."""
    pairs = [(one.live[engine.group_of[n]], other.live[engine.group_of[n]], n) for n in MODEL.kda_layers]
    pools = (engine.views["conv"], engine.views["recurrent"])
    return all(pool[n][a].equal(pool[n][b]) for a, b, n in pairs for pool in pools)


def distance(a: Tensor, b: Tensor) -> float:
    """Return |a − b| / |b|."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def over(group: Group, seen: Seen, chunk: int, prompts: Sequence[int]) -> tuple[bool, float]:
    """Run the story over a group; returns whether all selections are one rank's, and how far attention is."""
    engine = Watched(group, seen.inputs)
    Story(engine, chunk, prompts)
    mine = engine.seen()
    same = all(a.equal(b) for a, b in zip(mine.picked, seen.picked, strict=True))
    return same, distance(mine.attended, seen.attended)


def main(arguments: Sequence[str]) -> None:
    """Print the story; under torchrun its last part is over the processes."""
    if len(arguments) > 2 or not all(text.isdecimal() and 0 < int(text) <= LONGEST for text in arguments):
        raise SystemExit(f"give up to 2 lengths of prompts, each 1 to {LONGEST} tokens; got {[*arguments]}")
    group, prompts = started(), [*map(int, arguments)] or PROMPTS
    say = print if group is None or group.rank() == 0 else _nothing
    engine = Watched()
    for name, operators in chosen(engine).items():
        say(f"plans    on {DEVICE}, {name}: {', '.join(operators)}")
    row, layers = engine.layout.block_bytes, len(engine.groups[0])
    say(f"cache    {BLOCKS} blocks of {row:,} bytes: {BLOCK} tokens, or the states of {layers} KDA layer(s)")
    story, shot = Story(engine, 128, prompts), Story(Engine(), 512, prompts)
    same = story.first.equal(shot.first) and engine.pool.equal(shot.engine.pool)
    say(f"prefill  {prompts[0]} tokens, 128 rows a step; in one shot the same bits: {yes(same)}")
    say(f"decode   {STEPS} steps of {len(prompts)} requests: {story.requests[0].tokens[prompts[0] :]}")
    seen = engine.seen()

    again = [engine.add(prompt(length, seed)) for seed, length in enumerate(prompts)]
    found = again[0].done
    first = torch.stack([engine.prefill(request, 128) for request in again])
    say(f"prefix   {found} of {prompts[0]} tokens found; the same bits: {yes(first.equal(story.first))}")
    kept = speculate(engine, again, story.requests)
    same = [r.tokens for r in again] == [r.tokens for r in story.requests]
    bits = all(same_states(engine, a, b) for a, b in zip(again, story.requests, strict=True))
    say(
        f"verify   {len(kept)} steps kept {kept}; tokens as decoded: {yes(same)}, states bit for bit: {yes(bits)}"
    )

    if group:
        runs = [over(group, seen, 128, prompts)]
    else:
        runs = LoopbackGroup.run(2, lambda ranks: over(ranks, seen, 128, prompts))
    world, (same, far) = group.size() if group else len(runs), runs[0]
    say(
        f"DCP {world}    {len(seen.picked)} selections, the same bits: {yes(same)}; attention differs by {far:.2%}"
    )
    if group:
        dist.destroy_process_group()


def started() -> TorchGroup | None:
    """Return the group of torchrun's processes, if there are any."""
    if "WORLD_SIZE" not in os.environ:
        return None
    if DEVICE != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return TorchGroup()


def chosen(engine: Engine) -> dict[str, list[str]]:
    """Return operators by who computes them."""
    found = defaultdict(list)
    for name, plan in {**engine.plans, "kda_commit": engine.commits[0]}.items():
        found[plan.name].append(name)
    return found


def yes(same: bool) -> str:
    """Return a word."""
    return "yes" if same else "no"


def _nothing(*_: object) -> None:
    """Print nothing: another rank does."""
