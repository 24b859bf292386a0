"""Ranks that a backend's table of measurements gives to what fits a request."""

from __future__ import annotations

from dataclasses import replace

from kimi_hal.dispatch.candidate import Assessment
from kimi_hal.dispatch.contract import Preference
from kimi_hal.dispatch.loader import Registry
from kimi_hal.dispatch.tuned_tables import Decision
from kimi_hal.dispatch.wish import Request, Wish

#: Rank of the fastest candidate of a table's line.
TABLE = 1 << 30


def decision(request: Request, wish: Wish, registry: Registry) -> Decision | None:
    """Return the line of the asked backend's table that is about a request, where it runs natively."""
    if (
        wish.backend is None
        or request.settings.execution != "native"
        or not registry.probe(wish.backend).present
    ):
        return None
    return registry.tables(wish.backend).decide(request.op.name, request.spec, request.limits)


def ranked(found: Assessment, decided: Decision, wish: Wish) -> Assessment:
    """Put what a table has measured before everything else, the fastest first."""
    ranking = [e.implementation for e in decided.line.ranking]
    if found.loaded.name != wish.backend or found.implementation.name not in ranking:
        return found
    place = ranking.index(found.implementation.name)
    entry = decided.line.ranking[place]
    preference = Preference(rank=TABLE - place, measured=f"{decided.place}: {entry.us:g} µs")
    return replace(found, preference=preference, entry=entry)
