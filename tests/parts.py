"""Run the test parts one after another and print each part's time beside its share.

``make test`` calls this without options; ``--full`` adds what is too long for it and keeps each part's result and
commit under ``benchmarks/results/``. A part over its share is reported, not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FULL = ROOT / "benchmarks" / "results" / "test-full.json"
#: What is behind a commit if the tree was another one.
CHANGED = "+changes"
PACKAGES = ["kimi_hal", "conformance/kimi_hal_conformance"]


@dataclass(frozen=True)
class Part:
    """One part of the run: its test folders, commands before them, and its share of minutes on 2 cores.

    Tests of ``sessions`` stand in the folder of the session's name and run in an environment of their own, which
    nox makes once (``noxfile.py``).
    """

    name: str
    minutes: float
    folders: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    sessions: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a part did."""

    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed and not self.broken


BIN = Path(sys.executable).parent
LINT = (
    (str(BIN / "ruff"), "format", "--check", "."),
    (str(BIN / "ruff"), "check", "."),
    (sys.executable, "-m", "mypy", *PACKAGES),
)
CORE = (
    "formats",
    "ops",
    "reference",
    "dispatch",
    "cli",
    "faults",
    "workload",
    "packaging",
    "examples",
    "hostile",
)
PARTS = (
    Part("lint", 2, commands=LINT),
    Part("core and formats", 6, tuple(f"tests/{name}" for name in CORE)),
    Part("conformance", 12, ("tests/conformance",)),
    Part("cache and parallel", 8, ("tests/parallel", "tests/cache")),
    Part("nvidia", 8, ("tests/nvidia", "tests/portable")),
    Part("amd", 10, ("tests/amd",)),
    Part("ppu", 6, ("tests/ppu",)),
    Part("tpu", 18, ("tests/tpu",), sessions=("tpu_jax", "tpu_xla")),
)


#: What may have gone wrong before any test ran, by the program that was to run them.
ADVICE = {"nox": ": its environment could not be made; --skip tpu leaves it out"}
#: Names of parts that are left out, comma-separated: for a developer's own shell, never for CI.
SKIP = "SKIP_PARTS"


def run_part(part: Part, full: bool, console: Console) -> Outcome:
    """Run one part's commands and tests."""
    outcome, start = Outcome(), time.perf_counter()
    console.rule(f"[bold]{part.name}")
    for command in part.commands:
        if subprocess.run(command, cwd=ROOT).returncode:
            outcome.broken.append(" ".join(Path(word).name for word in command[:3]))
    folders = [folder for folder in part.folders if (ROOT / folder).is_dir()]
    if folders:
        run_pytest([sys.executable, "-m", "pytest"], ["-n", "2", *folders], full, outcome)
    for session in part.sessions:
        nox = [str(BIN / "nox"), "-s", session, "--"]
        run_pytest(nox, [f"tests/{session}"], full, outcome)
    outcome.seconds = time.perf_counter() - start
    return outcome


def run_pytest(command: list[str], arguments: list[str], full: bool, outcome: Outcome) -> None:
    """Run pytest, one torch thread a process, and count from its report."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        marks = "not gpu" if full else "not gpu and not full"
        whole = [*command, "-q", "-m", marks, f"--junitxml={report}", *arguments]
        code = subprocess.run(whole, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
        if not report.is_file():
            what = " ".join(Path(word).name for word in command if word != "--")
            outcome.broken.append(
                f"{what} ended with {code} and no report{ADVICE.get(Path(command[0]).name, '')}"
            )
            return
        for suite in ET.parse(report).getroot().iter("testsuite"):
            count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            bad = count["failures"] + count["errors"]
            outcome.failed += bad
            outcome.skipped += count["skipped"]
            outcome.passed += count["tests"] - bad - count["skipped"]
        if code not in (0, 1):
            outcome.broken.append(f"pytest ended with {code}")


def show(outcomes: dict[str, Outcome], console: Console) -> None:
    """Print the table of parts."""
    table = Table("part", "time", "share", "passed", "failed", "skipped", "")
    shares = {part.name: part.minutes for part in PARTS}
    for name, outcome in outcomes.items():
        over = outcome.seconds > 60 * shares[name]
        note = ", ".join(outcome.broken) or ("over its share" if over else "")
        times = f"{outcome.seconds / 60:.1f} min", f"{shares[name]:g} min"
        counts = (str(n) for n in (outcome.passed, outcome.failed, outcome.skipped))
        table.add_row(name, *times, *counts, note, style=None if outcome.ok else "red")
    console.print(table)


def commit() -> str:
    """Return the commit that is checked out, marked if the tree differs from it in more than what is kept here."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    status = ["git", "status", "--porcelain", "--", ".", f":!{FULL.relative_to(ROOT)}"]
    dirty = subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout
    return head + (CHANGED if dirty else "")


def keep(outcomes: dict[str, Outcome], path: Path, of: str) -> None:
    """Keep what a full run said of each part, with its commit; parts that were not run stay as they were."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    about = {"commit": of, "date": time.strftime("%Y-%m-%d")}
    for name, o in outcomes.items():
        counts = {"passed": o.passed, "failed": o.failed, "skipped": o.skipped}
        known[name] = about | {"seconds": round(o.seconds)} | counts | {"broken": o.broken}
    rows = {part.name: known[part.name] for part in PARTS if part.name in known}
    path.write_text(json.dumps(rows, indent=2) + "\n")


def run_all(chosen: Sequence[Part], full: bool, console: Console, path: Path) -> dict[str, Outcome]:
    """Run parts one after another; of a full run each is kept as it ends, whatever becomes of the others.

    Its commit is the one that it began with, marked if it ended with another.
    """
    outcomes = {}
    for part in chosen:
        before = commit()
        outcomes[part.name] = run_part(part, full, console)
        if full:
            of = before if commit() == before else before.removesuffix(CHANGED) + CHANGED
            keep({part.name: outcomes[part.name]}, path, of)
    return outcomes


def main() -> int:
    """Run the chosen parts; the exit status is 0 only if every one is green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also what is too long for `make test`")
    parser.add_argument("--only", action="append", choices=[p.name for p in PARTS], help="this part alone")
    parser.add_argument(
        "--skip",
        action="append",
        choices=[p.name for p in PARTS],
        default=[name for name in os.environ.get(SKIP, "").split(",") if name],
        help=f"leave this part out; {SKIP} names several, with commas",
    )
    options = parser.parse_args()
    if unknown := set(options.skip) - {p.name for p in PARTS}:
        parser.error(
            f"{SKIP} names {', '.join(sorted(unknown))}; the parts are {', '.join(p.name for p in PARTS)}"
        )
    console = Console(width=100)
    chosen = [p for p in PARTS if (not options.only or p.name in options.only) and p.name not in options.skip]
    outcomes = run_all(chosen, options.full, console, FULL)
    show(outcomes, console)
    for name in options.skip:
        print(f"left out: {name}")
    broken = sum(len(o.broken) for o in outcomes.values())
    passed = sum(o.passed for o in outcomes.values())
    failed = sum(o.failed for o in outcomes.values()) + broken
    print(f"{passed} passed, {failed} failed, {sum(o.skipped for o in outcomes.values())} skipped")
    return 0 if all(o.ok for o in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
