"""Look for false alarms: cases on implementations that are right, in this process, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from unittest import mock

from kimi_hal.dispatch import points, policy
from kimi_hal.dispatch.device import HostDevice
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.case import CASES, Case
from kimi_hal_conformance.execute import run_case
from kimi_hal_conformance.otherwise.plugin import ATTENTION, NAME
from kimi_hal_conformance.verdict import Verdict

#: Operators whose results are copies and comparisons: they have no budget that could be too small.
DISCRETE = ("all_gather", "topk_select", "topk_merge", "store_latent", "store_index_keys")


@contextmanager
def registered() -> Iterator[None]:
    """Let this process see the plugin as if it were installed."""
    found = points.found()
    own = EntryPoint(name=NAME, value="kimi_hal_conformance.otherwise.plugin", group=points.GROUP)
    policy.thaw()
    with mock.patch.object(points, "found", return_value=EntryPoints([*found, own])):
        yield
    policy.thaw()


def subjects(case: Case) -> list[str]:
    """Return the full names of who is right and answers a case."""
    rounded = [f"{NAME}.p16"] if case.operator in ATTENTION else []
    return ["reference.torch", f"{NAME}.float32", *rounded]


def verdicts(chosen: Callable[[Case], bool], seeds: Iterable[int]) -> Iterator[Verdict]:
    """Yield the verdict on each chosen case, of each implementation and seed."""
    every = [case for case in CASES.values() if case.operator not in DISCRETE and chosen(case)]
    with registered():
        for seed in seeds:
            for case in every:
                for name in subjects(case):
                    yield run_case(case, Subject(name, "cpu", HostDevice()), seed)
