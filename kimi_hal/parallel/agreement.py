"""Whether all ranks decided alike: one small message where they did, and a sentence that says where not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_hal.dispatch import keys
from kimi_hal.errors import GroupError, PlanError
from kimi_hal.parallel.meeting import ranks_text

if TYPE_CHECKING:
    from kimi_hal.dispatch.planned import Plan
    from kimi_hal.ops.spec import DCP
    from kimi_hal.parallel.groups import Group

#: Characters of a text that a sentence shows whole; of a longer one its beginning, and where it differs.
SHOWN = 480
BEGINNING, BEFORE, AFTER = 160, 60, 240


def agree(group: Group, text: str) -> None:
    """Compare a text on all ranks, for instance a plan's key: one collective, a second where they differ.

    Raises:
        GroupError: on all ranks, if any differs; names the ranks of each text.
    """
    texts = _others(group, text)
    if texts is None:
        return
    first = _difference(texts)
    shown = (f"{ranks_text(ranks)} {_shown(one, first)!r}" for one, ranks in _ranks(texts).items())
    raise GroupError("ranks do not agree: " + "; ".join(shown))


def agree_on(group: Group, facts: Mapping[str, str | int | float | bool | None]) -> None:
    """Compare named facts on all ranks, for instance the interleave of a cache.

    Raises:
        GroupError: on all ranks, if any differs; names each fact that does, and the ranks of each value.
    """
    texts = _others(group, json.dumps(dict(facts), sort_keys=True))
    if texts is None:
        return
    told = [json.loads(text) for text in texts]
    sentences = []
    for name in sorted({name for each in told for name in each}):
        values = _ranks([json.dumps(each[name]) if name in each else "nothing" for each in told])
        if len(values) > 1:
            shown = (f"{ranks_text(ranks)} {_has(ranks)} {value}" for value, ranks in values.items())
            sentences.append(f"{name}: {', '.join(shown)}")
    raise GroupError("ranks do not agree on " + "; ".join(sentences))


def agree_plans(group: Group, who: str, problem: str, *plans: Plan) -> None:
    """Compare plans over the ranks; a rank that must refuse its own tells the others, so that none waits.

    Args:
        group: the ranks.
        who: what the plans are for, the beginning of the sentence.
        problem: why this rank cannot use its plans, or an empty text.
        plans: in one order on every rank.

    Raises:
        PlanError: ``problem``, where all ranks have the same.
        GroupError: on all ranks, if problems or plans differ.
    """
    shared = (keys.shared(p.operator.name, p.spec, p.limits, p.name, p.source_hash) for p in plans)
    agree(group, f"{who}: {problem}" if problem else "; ".join(shared))
    if problem:
        raise PlanError(f"{who}: {problem}")


def agree_dcp(group: Group, dcp: DCP) -> None:
    """Compare over the ranks how positions are spread.

    Raises:
        GroupError: on all ranks, if world, interleave or what is sharded differs.
    """
    facts = {name: value for name, value in dcp.to_dict().items() if name != "rank"}
    agree_on(group, {f"dcp.{name}": value for name, value in facts.items()})


def _others(group: Group, text: str) -> list[str] | None:
    """Return every rank's text, or ``None`` where all are the same."""
    data = text.encode()
    digest = bytearray(hashlib.sha256(data).digest() + len(data).to_bytes(8, "little"))
    seen = [bytes(row) for row in group.all_gather(_bytes(digest).to(group.device)).cpu().tolist()]
    if len(set(seen)) == 1:
        return None
    lengths = [int.from_bytes(each[32:], "little") for each in seen]
    message = _bytes(bytearray(data.ljust(max(lengths), b"\0"))).to(group.device)
    rows = group.all_gather(message).cpu().tolist()
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def _bytes(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _ranks(texts: list[str]) -> dict[str, list[int]]:
    """Return the ranks of each different text, in rank order."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return found


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _difference(texts: list[str]) -> int:
    """Return the first place at which not all texts are alike."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)


def _shown(text: str, first: int) -> str:
    """Return a text, or of a long one its beginning and what stands around place ``first``."""
    if len(text) <= SHOWN:
        return text
    start = max(0, first - BEFORE)
    if start <= BEGINNING:
        return text[: first + AFTER] + "…"
    end = "…" if first + AFTER < len(text) else ""
    return f"{text[:BEGINNING]}… {text[start : first + AFTER]}{end}"
