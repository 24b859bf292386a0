"""What the model says, as rows: against what is published, by ranks, and where each protocol stops paying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.scale import merges
from benchmarks.scale.capacity import capacity
from benchmarks.scale.figures import Device, Transport, device, figures, measured, transport
from benchmarks.scale.layer import Step, alone, attention, index, shared
from benchmarks.scale.merges import PROTOCOLS, generic_select, merge, select

WORLDS = (2, 4, 8, 16, 32, 64)
ROWS = (1, 64, 320)
CONTEXTS = (8192, 32768, 131072, 524288, 1048576)
REQUESTS = (1, 8, 64)
PLACES = (("gb300", "collective"), ("gb300", "mailbox"), ("h200", "collective"), ("mi355x", "collective"))
#: Group sizes that both 96 heads and a group of whole devices allow.
HELD = (1, 2, 4, 8, 16, 32, 48)
#: The context of the published module time is not published.
MODULE_CONTEXT = 131072

Row = dict[str, Any]


def fit() -> Iterator[Row]:
    """Yield each measured point of a kernel beside the model's, in µs, and how far it is off."""
    on = device("h200")
    models: dict[str, Callable[..., float]] = {
        "index": lambda requests, context: index(on, Step(requests, context), 1),
        "select": lambda rows, length: select(on, rows, length),
        "generic_select": generic_select,
        "attention": lambda rows: attention(on, rows, 64, merges.K),
    }
    for name, model in models.items():
        for *sizes, time in measured(name):
            got = model(*map(int, sizes))
            yield {
                "kernel": name,
                "sizes": sizes,
                "measured": time,
                "model": _short(got),
                "off": round(got / time - 1, 2),
            }


def published() -> Iterator[Row]:
    """Yield what the model says beside what was published: merge, module, tokens a step, tokens held."""
    said, on, how = figures()["announced"], device("gb300"), transport("collective")
    rows = said["requests"] * said["rows_a_request"]
    low, high = said["compact_over_generic"]

    def time(protocol: str, count: int) -> float:
        return merge(on, how, protocol, 8, count).time

    yield _beside("generic merge, 320 rows, µs", time("generic", rows), said["generic_merge"])
    share = said["generic_merge"] / said["attention_module"]
    yield _beside(
        "its share of the attention module", time("generic", rows) / said["attention_module"], share
    )
    for count in (1, rows):
        ratio = time("generic", count) / time("compact", count)
        yield _beside(f"generic / compact, merges of {count} row(s)", ratio, f"{low} to {high}")
    for requests in (8, 32, 64):
        yield _beside(
            f"generic / compact, modules, {requests} × 5 rows", module(requests), f"{low} to {high}"
        )
    for context in (32768, 131072):
        one = Step(1, context)
        more = sum(shared(on, how, one, 8, "generic").values()) - sum(alone(on, one).values())
        was, now = (said[f"tpot_{name}"][str(context)] for name in ("tp8", "dcp8"))
        yield _beside(f"DCP8 adds to a layer, 1 request of {context // 1024}K, µs", more, (now - was) / 24e-3)
    base = capacity(1)["tokens"]
    for name, world, latent in (("dcp8", 8, "fp8"), ("nvfp4_tp8", 1, "nvfp4"), ("nvfp4_dcp8", 8, "nvfp4")):
        ratio = said[f"tokens_{name}"] / said["tokens_tp8"]
        yield _beside(f"tokens held of TP8 in FP8: {name}", capacity(world, latent)["tokens"] / base, ratio)


def module(requests: int, protocol: str = "compact", context: int = MODULE_CONTEXT) -> float:
    """Return how much faster an attention module is with ``protocol`` than with the generic merge.

    What the model has no part for (projections, copies) is what it lacks of the published 671 µs.
    """
    said, on, how = figures()["announced"], device("gb300"), transport("collective")

    def time(count: int, name: str) -> float:
        step = Step(count, context, said["rows_a_request"])
        return sum(shared(on, how, step, 8, name).values())

    rest = float(said["attention_module"]) - time(said["requests"], "generic")
    return (time(requests, "generic") + rest) / (time(requests, protocol) + rest)


def _beside(what: str, model: float, said: float | str) -> Row:
    return {
        "what": what,
        "model": _short(model),
        "published": said if isinstance(said, str) else _short(said),
    }


def messages() -> Iterator[Row]:
    """Yield by ranks what a rank sends for a row and how often ``compact`` sends a row again."""
    for world in WORLDS:
        row = merges.resent(world)
        yield {
            "world": world,
            **{name: merges.sent(name, world) for name in ("full", "compact", "scores_only")},
            "compact_of_full": round(merges.sent("compact", world) / merges.sent("full", world), 4),
            "row_again": _short(row),
            "step_of_64_again": _short(merge(*_gb300(), "compact", world, 64).again),
            "step_of_320_again": _short(merge(*_gb300(), "compact", world, 320).again),
            "quota_for_320": round(merges.needed_quota(world, 320) * world / merges.K, 2),
        }


def times() -> Iterator[Row]:
    """Yield the µs of one merge by place, ranks and rows, and which protocol is first."""
    for place in PLACES:
        on, how = device(place[0]), transport(place[1])
        for world in WORLDS:
            for rows in ROWS:
                found = {name: merge(on, how, name, world, rows).time for name in PROTOCOLS}
                quota = merges.needed_quota(world, rows)
                wider = max(quota, -(-3 * merges.K // (2 * world)))
                found["compact_wide"] = merge(on, how, "compact", world, rows, quota=wider).time
                exact = {name: found[name] for name in ("full", "scores_only")}
                float32 = exact | {
                    "scores_only": merge(on, how, "scores_only", world, rows, score="float32").time
                }
                yield {
                    "device": on.name,
                    "transport": how.name,
                    "world": world,
                    "rows": rows,
                    **{name: round(time, 1) for name, time in found.items()},
                    "first": min((name for name in found if name != "generic"), key=found.__getitem__),
                    "first_of_float32": min(float32, key=float32.__getitem__),
                }


def layers() -> Iterator[Row]:
    """Yield the µs of a layer by requests and context: one rank's whole cache, or W that share it."""
    for name in ("collective", "mailbox"):
        on, how = device("gb300"), transport(name)
        for requests in REQUESTS:
            for context in CONTEXTS:
                step = Step(requests, context)
                found = {1: sum(alone(on, step).values())}
                found |= {w: sum(shared(on, how, step, w, "compact").values()) for w in WORLDS}
                yield {
                    "device": on.name,
                    "transport": name,
                    "requests": requests,
                    "context": context,
                    **{f"w{world}": round(time, 1) for world, time in found.items()},
                    "first": min(found, key=found.__getitem__),
                    "held_from": next(
                        w for w in HELD if capacity(w, context=context)["contexts"] >= requests
                    ),
                }


def capacities() -> Iterator[Row]:
    """Yield the tokens that W ranks hold, and what each rank more than one adds."""
    base = capacity(1)["tokens"]
    for world in HELD:
        row = capacity(world)
        yield row | {
            "times": round(row["tokens"] / base, 2),
            "times_a_rank": round(row["tokens"] / base / world, 3),
        }


def _gb300() -> tuple[Device, Transport]:
    return device("gb300"), transport("collective")


def _short(value: float) -> float:
    """Return three digits."""
    return float(f"{value:.3g}")
