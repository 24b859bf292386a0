"""Waivers: failures that are known and admitted for a while. One that is not needed is itself a failure.

A file of TOML, one table a waiver::

    [[waiver]]
    case = "kda_gate/odd/rows1"      # an id, or "kda_gate/*" for what is said of all cases of an operator
    implementation = "acme.fast"     # without it: every implementation of the operator, and all must fail
    reason = "flushes subnormal results to zero"
    link = "https://example.com/issues/7"
    expires = 2027-03-31             # its last day
    suite = "0.1.0"                  # the suite in which the failure was looked at
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec

from kimi_hal import ops
from kimi_hal.errors import KimiHalError, nearest
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.claims.made import is_made
from kimi_hal_conformance.verdict import AGAINST, NOT_RUN, PASSED, WAIVED, Verdict, Waiver

TABLE = "waiver"
KEYS = ("case", "implementation", "reason", "link", "expires", "suite")
OPTIONAL = ("implementation",)


class WaiverError(KimiHalError):
    """A file of waivers that cannot be read as one."""


def read(path: Path) -> tuple[Waiver, ...]:
    """Read a file of waivers; the cases must be loaded.

    Raises:
        WaiverError: it is none, has an unknown or missing key, or a value of another kind.
        UnknownNameError: the suite has no such case.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WaiverError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WaiverError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise WaiverError(f"{path} is no TOML: it is nested without end") from None
    _known(data, (TABLE,), str(path), "table")
    tables = data.get(TABLE, [])
    if not isinstance(tables, list):
        raise WaiverError(f"{path}: write [[{TABLE}]], with two brackets, above each waiver")
    return tuple(_waiver(table, f"{path}: waiver {n}") for n, table in enumerate(tables, 1))


def _known(table: Mapping[str, Any], known: Sequence[str], where: str, kind: str) -> None:
    for key in table:
        if key not in known:
            hint = nearest(key, known) or "."
            raise WaiverError(f"{where} has an unknown {kind} {key!r}{hint} Known: {', '.join(known)}")


def _waiver(table: Any, where: str) -> Waiver:
    if not isinstance(table, dict):
        raise WaiverError(f"{where} is no table: write [[{TABLE}]] above each waiver")
    _known(table, KEYS, where, "key")
    missing = [key for key in KEYS if key not in table and key not in OPTIONAL]
    if missing:
        raise WaiverError(f"{where} lacks {', '.join(missing)}: all keys but {OPTIONAL[0]} are needed")
    for key, value in table.items():
        _of_kind(key, value, where)
    _exists(table["case"])
    return Waiver(**table)


def _of_kind(key: str, value: Any, where: str) -> None:
    if key == "expires":
        if not isinstance(value, date) or isinstance(value, datetime):
            raise WaiverError(f"{where}: expires must be a date without quotes, as 2027-03-31; got {value!r}")
    elif not isinstance(value, str) or not value.strip():
        raise WaiverError(f"{where}: {key} must be a text in quotes that is not empty; got {value!r}")


def _exists(case: str) -> None:
    operator, _, rest = case.partition("/")
    if rest == "*" or is_made(case):  # what a claim's id stands for is known when the backend is
        ops.get(operator)
    else:
        cases.get(case)


def apply(
    waivers: Sequence[Waiver], verdicts: Sequence[Verdict], *, suite: str, today: date
) -> tuple[tuple[Verdict, ...], tuple[Waiver, ...]]:
    """Waive what live waivers cover; say of each waiver what it covers and what is wrong with it.

    A waiver that has expired or is for another suite waives nothing. One whose case this run left out is not
    judged, which its ``note`` says.

    Args:
        waivers: as they were read.
        verdicts: of the whole run.
        suite: the version of this suite.
        today: the date at which the run started.
    """
    found, judged = list(verdicts), list[Waiver]()
    for waiver in waivers:
        mine = [i for i, v in enumerate(found) if _covers(waiver, v)]
        problem = _stale(waiver, suite, today) or _unneeded(waiver, [found[i] for i in mine], found)
        covers = [i for i in mine if found[i].status in AGAINST and not _stale(waiver, suite, today)]
        for i in covers:
            found[i] = _waived(found[i], waiver)
        note = "" if problem or covers else _left_out(waiver, found)
        names = tuple(found[i].implementation for i in covers)
        judged.append(msgspec.structs.replace(waiver, covers=names, problem=problem, note=note))
    return tuple(found), tuple(judged)


def _covers(waiver: Waiver, verdict: Verdict) -> bool:
    return waiver.case == verdict.case and waiver.implementation in ("", verdict.implementation)


def _waived(verdict: Verdict, waiver: Waiver) -> Verdict:
    why = f"{waiver.reason} ({waiver.link}, until {waiver.expires})"
    return msgspec.structs.replace(verdict, status=WAIVED, was=verdict.status, waiver=why)


def _stale(waiver: Waiver, suite: str, today: date) -> str:
    """Say why a waiver no longer counts, or return an empty string."""
    if waiver.expires < today:
        return f"it expired on {waiver.expires}: remove it, or look at the failure again and renew it"
    if waiver.suite != suite:
        return f"it is for suite {waiver.suite}, this is {suite}: look at the failure again and renew it"
    return ""


def _unneeded(waiver: Waiver, mine: Sequence[Verdict], verdicts: Sequence[Verdict]) -> str:
    """Say why a waiver is not needed, or return an empty string."""
    if repeated := next((v for v in mine if v.status == WAIVED), None):
        return f"it repeats another: {repeated.implementation} is waived already; remove one"
    passed = ", ".join(v.implementation for v in mine if v.status == PASSED)
    if any(v.status in AGAINST for v in mine):
        return f"{passed} passes: name the implementation that fails" if passed else ""
    if passed:
        return f"{passed} passes: remove it"
    if _left_out(waiver, verdicts):
        return ""
    if mine:
        return f"it matches nothing that ran: {mine[0].implementation} does not claim the case; remove it"
    names = {v.implementation for v in verdicts if v.operator == waiver.case.partition("/")[0]}
    if waiver.implementation and waiver.implementation not in names:
        return f"it matches nothing: {_no_such(waiver.implementation, names)}"
    if is_made(waiver.case):
        return "it matches nothing: no implementation that was tried makes such a claim in this profile"
    return "it matches nothing: the case was not asked for, or nothing implements its operator here"


def _no_such(name: str, names: Collection[str]) -> str:
    hint = nearest(name, names) or "."
    return f"no implementation {name!r} of the operator was tried{hint} Tried: {', '.join(sorted(names)) or 'none'}"


def _left_out(waiver: Waiver, verdicts: Sequence[Verdict]) -> str:
    """Say why this run left out everything that the waiver covers, or return an empty string."""
    everything = f"{waiver.case.partition('/')[0]}/*"
    reasons = [
        v.problems[0]
        for v in verdicts
        if v.status == NOT_RUN
        and v.case in (waiver.case, everything)
        and waiver.implementation in ("", v.implementation)
    ]
    return f"not judged, its case did not run: {reasons[0]}" if reasons else ""


def lines(waivers: Sequence[Waiver]) -> Iterator[str]:
    """Yield what a person must be told of the waivers, those first that are failures."""
    for waiver in sorted(waivers, key=lambda w: not w.problem):
        if said := waiver.problem or waiver.note:
            by = f" by {waiver.implementation}" if waiver.implementation else ""
            yield f"waiver of {waiver.case}{by}: {said}"
