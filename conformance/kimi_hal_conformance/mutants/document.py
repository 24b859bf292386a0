"""Print ``docs/mutants.md``: ``python -m kimi_hal_conformance.mutants.document > docs/mutants.md``."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal_conformance.mutants import catalogue
from kimi_hal_conformance.mutants.mutant import Mutant

HEAD = """\
# Mutants

A suite that cannot fail proves nothing. `kimi-hal conformance prove` runs the suite over wrong implementations,
each of which is the reference, or the core, with one line or one constant changed, and fails if one of them
survives. For each it prints the test that killed it and the smallest input that shows the fault.

- A mutant imitates a fault that somebody met and reported; the table links the report. The fault is the report's,
  the changed line is this project's own.
- A mutant passes a tolerance that the field's own tests use, on random inputs: all of them full, in range and in
  the first format of their kind, states fresh, one request of each length, at standard deviations 1 and 0.1
  (`mutants/plain.py`, `mutants/tolerances.py`). "same" stands for what is no kernel: the ordinary use gives the
  same answer.
- A mutant lives in a private copy of the package (`mutants/clone.py`), so that the oracle beside it stays right.
- A case runs an operator; a property holds functions that are no operator: selection, settings, checks, groups,
  ownership, byte layouts, the packed cache. Properties of a mutant's area run over a copy of the whole package.

`prove --quick` runs the quick profile's cases alone, `--every` all tests over each mutant and not only those up to
the first that kills, `--only ID` one mutant, `--operator NAME` those of an operator,
`--json FILE` writes what happened. This page is made by `python -m kimi_hal_conformance.mutants.document`.
"""


def lines() -> Iterator[str]:
    """Yield the page's lines."""
    yield from HEAD.splitlines()
    by_file: dict[str, list[Mutant]] = {}
    for mutant in catalogue.load().values():
        by_file.setdefault(mutant.file, []).append(mutant)
    total = sum(map(len, by_file.values()))
    yield ""
    yield f"There are {total} of them, in {len(by_file)} files of `kimi_hal/`."
    for file in sorted(by_file):
        yield from ("", f"## {file}", "", "| mutant | what is wrong | tried by | passes | report |")
        yield "| --- | --- | --- | --- | --- |"
        yield from map(row, by_file[file])


def row(mutant: Mutant) -> str:
    """Return a mutant's line of its table."""
    tried = ", ".join((*mutant.operators, *(f"{area} properties" for area in mutant.areas)))
    owner, name, _, number = mutant.imitates.removeprefix("https://github.com/").split("/")
    return (
        f"| `{mutant.id}` | {mutant.breaks} | {tried} | {mutant.passes} | "
        f"[{owner}/{name} #{number}]({mutant.imitates}) |"
    )


if __name__ == "__main__":
    print("\n".join(lines()))
