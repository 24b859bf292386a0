"""A pytest run over a backend: its trials, the process that runs their cases, and what the run as a whole proves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from kimi_hal.errors import KimiHalError, unknown
from kimi_hal.settings import EXECUTIONS
from kimi_hal_conformance import plugins
from kimi_hal_conformance.case import PROFILES
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.compiling.order import Order
from kimi_hal_conformance.conclusions import UNTESTED, disproven, replay
from kimi_hal_conformance.conditions import child_environment
from kimi_hal_conformance.integrity import Integrity
from kimi_hal_conformance.lane import Lane
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schedule import Schedule, batch, schedules
from kimi_hal_conformance.verdict import PASSED, REFUSED, Verdict

#: What a test's report carries, also from a process of pytest-xdist: status, and of how many of whose cases.
STATUS, TRIAL, SIZE = "kimi_hal_status", "kimi_hal_trial", "kimi_hal_trial_cases"


@dataclass(frozen=True)
class Item:
    """One case of one implementation.

    Args:
        case: its id, or ``"<operator>/*"`` for what is said of all cases.
        trial: ``"<operator> <full name>"``.
        size: how many cases the implementation is to run.
        batch: how the case is run, with this case alone, or what is compiled; ``None``: it is left out.
        reason: why it is left out.
    """

    case: str
    trial: str
    size: int
    batch: Batch | Order | None
    reason: str = ""

    @property
    def id(self) -> str:
        """Return what ``-k`` selects by: implementation and case."""
        return f"{self.trial.partition(' ')[2]}:{self.case}"


class Session:
    """The suite's part of a pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        self.request = _request(config)
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        self.sizes: dict[str, int] = {}
        self._alone = hasattr(config, "workerinput")
        self._lane: Lane | None = None
        self._stream: Iterator[Verdict] = iter(())
        self._coming: list[Item] = []
        self._order: list[Item] = []
        self._judge = Integrity({})

    def items(self) -> Sequence[Item]:
        """Return every case of every implementation, those that are left out too.

        Raises:
            pytest.UsageError: no such backend, implementation or case, or a backend that cannot be loaded.
        """
        load()
        try:
            self._judge = Integrity.now()  # before the plugin is imported
            registry = plugins.registry(self.request.backend)
            loaded = registry.get(self.request.backend)
            probe = registry.probe(self.request.backend)
            trials = list(schedules(loaded, probe, self.request))
        except KimiHalError as error:
            raise pytest.UsageError(str(error)) from error
        return [
            item
            for trial in trials
            for item in _items(trial, batch(trial, loaded, self.request) if trial.cases else None)
        ]

    def verdict(self, item: Item) -> Verdict:
        """Run a case in a process of its implementation's own, and return the verdict with its replay.

        The cases that pytest will ask for next are under way meanwhile, where that is known.
        """
        assert isinstance(item.batch, Batch)
        if self._coming[:1] != [item]:
            self._open(item)
        try:
            found = next(self._stream)
            if self._coming == [item]:
                next(self._stream, None)  # the process of the batch must be gone before the next
        except BaseException:  # interrupted, also by a limit that another plugin sets: begin anew
            self.stop()
            raise
        self._coming.pop(0)
        (found,) = disproven([found], self._judge)
        return msgspec.structs.replace(found, replay=replay(found, self.request))

    def _open(self, item: Item) -> None:
        """Start a batch with this case, and with the rest of its implementation's that are selected."""
        if self._coming or self._lane is None:  # what was under way is not wanted any more
            self.stop()
            self._lane = Lane(child_environment(self.request))
        self._coming = [item]
        if item in self._order and not self._alone:  # a process of pytest-xdist is told its share bit by bit
            rest = self._order[self._order.index(item) :]
            self._coming = [i for i in rest if i.trial == item.trial and i.batch is not None]
        assert isinstance(item.batch, Batch)
        cases = tuple(i.case for i in self._coming)
        self._stream = self._lane.run(msgspec.structs.replace(item.batch, cases=cases))

    def stop(self) -> None:
        """End the process."""
        if self._lane is not None:
            self._lane.stop()
        self._lane, self._coming = None, []

    def objections(self) -> Iterator[str]:
        """Yield why the run proves nothing although no test failed."""
        return objections(self.statuses, {} if self.request.only else self.sizes)

    # --- pytest's hooks ------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """Say what is tried."""
        asked = self.request
        return f"kimi-hal: backend {asked.backend}, {asked.execution}, profile {asked.chosen_profile}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the order in which the selected cases will be run."""
        calls = (getattr(item, "callspec", None) for item in session.items)
        found = (call.params.get("kimi_hal_item") for call in calls if call is not None)
        self._order = [item for item in found if isinstance(item, Item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a verdict, in whichever process it was found."""
        said = dict(report.user_properties)
        if report.when == "call" and STATUS in said:
            trial = str(said[TRIAL])
            self.statuses[trial][str(said[STATUS])] += 1
            self.sizes[trial] = int(str(said[SIZE]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the process; a run that proves nothing is not green."""
        self.stop()
        if not self._alone and session.exitstatus == pytest.ExitCode.OK and any(self.objections()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why a run without a failure is not green."""
        for line in self.objections():
            terminalreporter.write_line(f"kimi-hal: {line}", red=True)


def objections(statuses: Mapping[str, Counter[str]], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield why a run proves nothing although no test failed.

    Args:
        statuses: how many verdicts have which status, by trial.
        sizes: how many cases a trial has in all; a trial that is not in it was not tried as a whole.
    """
    if statuses and not any(counts[PASSED] for counts in statuses.values()):
        yield "nothing passed, so nothing is proven"
    for trial, counts in statuses.items():
        if counts[REFUSED] == sizes.get(trial, 0) > 0:
            yield f"{trial}: {UNTESTED}"


def told(verdict: Verdict) -> str:
    """Return what a failing test says: status, problems, output, and the command that replays it."""
    lines = [f"{verdict.status}: {verdict.implementation} {verdict.case}", *verdict.problems]
    lines += [f"| {line}" for line in verdict.output.splitlines()]
    lines += [f"replay: {verdict.replay}"] if verdict.replay else []
    return "\n".join(lines)


def _items(trial: Schedule, batch: Batch | None) -> Iterator[Item]:
    name = f"{trial.implementation.operator} {trial.full_name}"
    base = Item("", name, len(trial.cases), None)
    for case in trial.cases:
        assert batch is not None
        yield replace(base, case=case.id, batch=msgspec.structs.replace(batch, cases=(case.id,)))
    for left_out, reason in trial.left_out:
        yield replace(base, case=left_out, reason=reason)


def _request(config: pytest.Config) -> Request:
    """Return what is asked for.

    Raises:
        pytest.UsageError: no such execution mode or profile.
    """

    def given(option: str) -> str:
        return str(config.getoption(f"--kimi-{option}"))

    known = {"execution": EXECUTIONS, "profile": ("", *PROFILES)}
    for option, names in known.items():
        if given(option) not in names:
            raise pytest.UsageError(str(unknown(option, given(option), [n for n in names if n])))
    return Request(
        given("backend"),
        given("execution"),
        given("profile"),
        tuple(config.getoption("--kimi-case")),
        given("implementation"),
    )
