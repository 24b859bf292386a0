"""A pytest run that compiles: a test for each operator, implementation and target, its kernels told one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

import pytest

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance import plugins
from kimi_hal_conformance.compiling.command import strict
from kimi_hal_conformance.compiling.lane import CompileLane
from kimi_hal_conformance.compiling.order import ALL, Order, case_id, said
from kimi_hal_conformance.compiling.run import CompileRequest, child_environment, chosen, orders, replay
from kimi_hal_conformance.sessions import Item, Session, objections
from kimi_hal_conformance.verdict import AGAINST, FAILED, NOT_RUN, PASSED, Verdict

#: Options of a run that launches kernels, and what they are where nobody gave them.
RUNNING = {"--kimi-execution": "native", "--kimi-profile": ""}


class CompileSession(Session):
    """The suite's part of a pytest run that compiles and runs nothing.

    Raises:
        pytest.UsageError: an option is given that means nothing where no kernel is launched.
    """

    def __init__(self, config: pytest.Config) -> None:
        wrong = [option for option, unset in RUNNING.items() if config.getoption(option) != unset]
        if wrong:
            raise pytest.UsageError(f"--kimi-compile-only runs no case: leave out {', '.join(wrong)}")
        super().__init__(config)
        self.asked = CompileRequest(
            self.request.backend,
            targets=tuple(config.getoption("--kimi-target")),
            implementation=self.request.implementation,
            only=self.request.only,
            strict=strict(False),
        )
        self._compiler: CompileLane | None = None
        self._cache: TemporaryDirectory[str] | None = None

    def items(self) -> Sequence[Item]:
        """Return a test for each implementation of an operator and each target, also for what has no kernel there.

        Raises:
            pytest.UsageError: no such backend, target, implementation or case, or a backend that gives no targets.
        """
        try:
            loaded = plugins.registry(self.asked.backend).get(self.asked.backend)
            work = list(orders(loaded, chosen(loaded, self.asked), self.asked))
        except KimiHalError as error:
            raise pytest.UsageError(str(error)) from error
        return [_item(order, reason) for order, reason in work]

    def verdict(self, item: Item) -> Verdict:
        """Compile the kernels of an item, and return one verdict on all of them."""
        assert isinstance(item.batch, Order)
        if self._compiler is None:
            self._cache = TemporaryDirectory(prefix="kimi-hal-compile-")
            self._compiler = CompileLane(child_environment(self.asked, self._cache.name))
        try:
            found = list(self._compiler.compile(item.batch))
        except BaseException:  # interrupted, also by a limit that another plugin sets: begin anew
            self.stop()
            raise
        return together(item.batch, found, self.asked)

    def stop(self) -> None:
        """End the process, and drop what it has compiled."""
        super().stop()
        if self._compiler is not None:
            self._compiler.stop()
        if self._cache is not None:
            self._cache.cleanup()
        self._compiler = self._cache = None

    def objections(self) -> Iterator[str]:
        """Yield why the run proves nothing although no test failed."""
        return objections(self.statuses, {})

    def pytest_report_header(self) -> str:
        """Say what is compiled."""
        targets = ", ".join(self.asked.targets) or "every target"
        return f"kimi-hal: backend {self.asked.backend}, compile-only, {targets}"


def _item(order: Order, reason: str) -> Item:
    trial = f"{order.operator} {order.implementation}"
    case = case_id(order.operator, ALL, order.target.name)
    return Item(case, trial, 0, None if reason else order, reason)


def together(order: Order, found: Sequence[Verdict], asked: CompileRequest) -> Verdict:
    """Return one verdict on kernels: wrong where one is, else right where one is; every problem by its kernel."""
    wrong = [v for v in found if v.status in AGAINST]
    told = wrong or [v for v in found if v.status == NOT_RUN]
    status = FAILED if wrong else PASSED if any(v.status == PASSED for v in found) else NOT_RUN
    lines: list[str] = []
    for one in told:
        lines += [f"{one.case}: {one.status}: {problem}" for problem in one.problems]
        lines += [f"replay: {command}" for command in filter(None, [replay(one, asked)]) if wrong]
    return said(order, ALL, status, *lines, output="\n".join(v.output for v in wrong if v.output))
