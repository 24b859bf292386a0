"""What a run says of claims: which cases they make, and the verdicts in words that name what is claimed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import Implementation, Probe
from kimi_hal.dispatch.matching import Target
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.claims.made import MARK, Made, case, is_made
from kimi_hal_conformance.claims.outside import outside
from kimi_hal_conformance.claims.walk import ROOM, Walk, walk
from kimi_hal_conformance.verdict import AGAINST, FAILED, NOT_RUN, REFUSED, CouldBe, Verdict

#: The last part of the id of what is said of everything that a walk left out.
LEFT_OUT = "left-out"
#: The first of its sentences; the others name what and why.
NOT_TRIED = "claimed, but not tried in this profile; the report names each value and the reason"


def target(probe: Probe, execution: str, anywhere: bool) -> Target:
    """Return where an implementation runs, as the selection sees it; ``anywhere`` code runs natively always."""
    foreign = not probe.present or (execution != "native" and not anywhere)
    return Target(arch="" if foreign else probe.arch, facts=probe.facts, foreign=foreign)


def claimed(
    implementation: Implementation, where: Target, profile: str, only: Sequence[str] = (), pairs: bool = False
) -> Walk:
    """Return what is tried of an implementation's claims, and make the cases known to this process.

    Args:
        implementation: whose claims are tried. A composition claims nothing by itself: its parts do.
        where: it runs.
        profile: of the run.
        only: ids of cases; not empty: what stands for these alone is tried, whatever profile has it.
        pairs: in the quick profile, try each pair of values and not each value once.
    """
    if implementation.name == composed.NAME:
        return Walk()
    if not only:
        return _known(walk(implementation, where, profile, pairs))
    wanted = {i for i in only if is_made(i) and i.startswith(f"{implementation.operator}/")}
    for name, each in itertools.product(ROOM, (False, True)) if wanted else ():
        made = tuple(m for m in walk(implementation, where, name, each).made if m.id in wanted)
        if made:
            return _known(Walk(made))
    return Walk()


def _known(found: Walk) -> Walk:
    cases.MADE.update({made.id: case(made) for made in found.made})
    return found


def undeclared(implementation: Implementation, where: Target, profile: str) -> tuple[Made, ...]:
    """Return combinations one step outside of what is declared, and make the cases known to this process."""
    if implementation.name == composed.NAME:
        return ()
    return _known(Walk(tuple(outside(implementation, where, profile)))).made


def verdict(found: Verdict, made: Sequence[Made]) -> Verdict:
    """Return a verdict on a case that a claim made, in words that name the claim; another as it is.

    What is claimed and refused has failed.
    """
    claim = next((m for m in made if m.id == found.case), None)
    if claim is None or found.status not in (*AGAINST, REFUSED):
        return found
    status = FAILED if found.status == REFUSED else found.status
    but = "refused: " if found.status == REFUSED else ""
    what = f"claimed ({claim.differs or 'every default'}), but {but}"
    problems = (what + found.problems[0], *found.problems[1:])
    return msgspec.structs.replace(found, status=status, problems=problems)


def beside(found: Walk, operator: str, implementation: str) -> Iterator[Verdict]:
    """Yield one verdict on all that a walk left out, and one on each capability that claims nothing."""
    for label, why in found.failed:
        yield Verdict(
            case=f"{operator}/{MARK}/*",
            operator=operator,
            implementation=implementation,
            status=FAILED,
            problems=(f"{label}{why}",),
        )
    if found.left_out:
        yield Verdict(
            case=f"{operator}/{MARK}/{LEFT_OUT}",
            operator=operator,
            implementation=implementation,
            status=NOT_RUN,
            problems=(NOT_TRIED, *(f"{label}: {why}" for label, why in found.left_out)),
        )


def lines(found: Sequence[CouldBe]) -> Iterator[str]:
    """Yield a line for each case that passes and is not claimed."""
    for could in found:
        why = "; ".join(could.refusals) or could.spec
        yield f"could be claimed by {could.implementation}: {could.case} ({why})"
