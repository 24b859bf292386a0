"""What changed between two reports of one backend: what a release made worse, better, or merely other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kimi_hal_conformance.schema import CONFORMS, Report, Tested
from kimi_hal_conformance.verdict import AGAINST, PASSED, WAIVED, Verdict

WORSE, BETTER, OTHER = "worse", "better", "other"
#: Shares of a budget below this are not compared: the last bits of a sum move them by any factor.
NEGLIGIBLE = 0.05
#: By which factor a share of a budget must grow or shrink to be told.
FACTOR = 1.5
ABSENT = "absent"

#: Operator, implementation, and case.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """One difference.

    Args:
        effect: ``WORSE``, ``BETTER`` or ``OTHER``.
        kind: what sort of difference, in words: ``newly failing``.
        subject: of what: an implementation and a case, a library.
        before: in the old report.
        after: in the new one.
    """

    effect: str
    kind: str
    subject: str
    before: str
    after: str


class ComparisonError(ValueError):
    """Two reports between which nothing can be compared."""


def changes(old: Report, new: Report, factor: float = FACTOR) -> Iterator[Change]:
    """Yield what changed from one report to another.

    A case got worse if it passed and does not any more, for whatever reason; if it is newly failing, crashed or
    hung; or if it needs a larger share of its budget by more than ``factor``. An implementation got worse if its
    level sank or it is gone; the whole if it conformed and does not. What a limited run was not asked for is not gone
    for the worse, nor is a level that such a run did not try.

    Args:
        old: the earlier report.
        new: the later one, of the same backend.
        factor: larger than 1.

    Raises:
        ComparisonError: the reports are of two backends.
    """
    if old.backend != new.backend:
        raise ComparisonError(
            f"the reports are of two backends, {old.backend} and {new.backend}: nothing can be compared"
        )
    if old.verdict != new.verdict:
        effect = WORSE if old.verdict == CONFORMS else BETTER if new.verdict == CONFORMS else OTHER
        yield Change(effect, "verdict", new.backend, old.verdict, new.verdict)
    yield from _conditions(old, new)
    yield from _implementations(old, new)
    yield from _cases(old, new)
    if old.environment.seed == new.environment.seed:
        yield from _budgets(old, new, factor)


def _conditions(old: Report, new: Report) -> Iterator[Change]:
    """Yield what was run otherwise, and with what other libraries."""
    if old.suite_version != new.suite_version:
        yield Change(OTHER, "suite", "kimi-hal-conformance", old.suite_version, new.suite_version)
    for name in ("execution", "profile", "limited_to", "seed", "repeats", "python", "platform", "devices"):
        before, after = (_said(getattr(report.environment, name)) for report in (old, new))
        if before != after:
            yield Change(OTHER, "conditions", name, before, after)
    versions = old.environment.versions, new.environment.versions
    for name in dict.fromkeys((*versions[0], *versions[1])):
        before, after = (found.get(name, ABSENT) for found in versions)
        if before != after:
            yield Change(OTHER, "version", name, before, after)


def _said(value: object) -> str:
    return "; ".join(value) if isinstance(value, tuple) else str(value)


def _implementations(old: Report, new: Report) -> Iterator[Change]:
    before, after = ({(i.operator, i.name): i for i in report.implementations} for report in (old, new))
    for key in dict.fromkeys((*before, *after)):
        yield from _implementation(" ".join(key), before.get(key), after.get(key), _gone(new))


def _gone(new: Report) -> str:
    """Return what it is that something is no more in a report: it is worse, unless the run was asked for less."""
    return OTHER if new.environment.limited_to else WORSE


def _implementation(name: str, old: Tested | None, new: Tested | None, gone: str) -> Iterator[Change]:
    if old is None and new is not None:
        yield Change(OTHER, "appeared", name, ABSENT, f"level {new.level}")
    elif old is not None and new is None:
        yield Change(gone, "vanished", name, f"level {old.level}", ABSENT)
    elif old is not None and new is not None:
        if old.level != new.level:
            sank = new.level < old.level
            effect = (WORSE if new.failed else gone) if sank else BETTER
            after = f"{new.level}, next {new.stops}" if sank else f"{new.level}"
            yield Change(effect, "level", name, f"{old.level}", after)
        if old.version != new.version:
            yield Change(OTHER, "version", name, old.version or "unknown", new.version or "unknown")
        if old.source_hash != new.source_hash:
            hashes = (found.source_hash[:12] or "not hashed" for found in (old, new))
            yield Change(OTHER, "sources", name, *hashes)


def _verdicts(report: Report) -> dict[Key, Verdict]:
    return {(v.operator, v.implementation, v.case): v for v in report.verdicts}


def _cases(old: Report, new: Report) -> Iterator[Change]:
    """Yield the cases whose status is another, and those that one report lacks."""
    before, after = _verdicts(old), _verdicts(new)
    lasting = _names(old) & _names(new)
    for key in dict.fromkeys((*before, *after)):
        was, now = before.get(key), after.get(key)
        if key[:2] in lasting or (now is not None and now.status in AGAINST):
            gone = _gone(new) if old.suite_version == new.suite_version else OTHER
            yield from _case(f"{key[1]} {key[2]}", was, now, gone)


def _names(report: Report) -> set[tuple[str, str]]:
    return {(i.operator, i.name) for i in report.implementations}


def _case(subject: str, old: Verdict | None, new: Verdict | None, gone: str) -> Iterator[Change]:
    before, after = (found.status if found else ABSENT for found in (old, new))
    if before == after:
        return
    if new is not None and new.problems:
        after = f"{after}: {new.problems[0]}"
    if new is not None and new.status in AGAINST:
        if before not in AGAINST:
            yield Change(WORSE, "newly failing", subject, before, after)
        else:
            yield Change(OTHER, "fails otherwise", subject, before, after)
    elif new is not None and new.status == PASSED and before in (*AGAINST, WAIVED):
        yield Change(BETTER, "newly passing", subject, before, after)
    elif new is None:
        effect = gone if before == PASSED else OTHER
        yield Change(effect, "vanished", subject, before, after)
    elif before == PASSED:
        yield Change(WORSE, "passes no more", subject, before, after)
    else:
        yield Change(OTHER, "appeared" if old is None else "status", subject, before, after)


def _budgets(old: Report, new: Report, factor: float) -> Iterator[Change]:
    """Yield the cases that passed and pass, and use another share of their budget."""
    before, after = _shares(old), _shares(new)
    for key in before.keys() & after.keys():
        was, now = before[key], after[key]
        low, high = sorted((was, now))
        if high > NEGLIGIBLE and high > factor * low:
            effect = WORSE if now > was else BETTER
            yield Change(effect, "share of the budget", f"{key[1]} {key[2]}", f"{was:.2g}", f"{now:.2g}")


def _shares(report: Report) -> Mapping[Key, float]:
    """Return the largest share of a budget that each passed case used, in the cases' order."""
    found: dict[Key, float] = {}
    for key, verdict in _verdicts(report).items():
        shares = [s for m in verdict.measures if not m.exact for s in (m.norm, m.maximum) if s is not None]
        if verdict.status == PASSED and shares:
            found[key] = max(shares)
    return found
