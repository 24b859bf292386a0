"""Choose what to compile for a backend, compile it, and gather the report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import msgspec

from kimi_hal import ops
from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import Implementation, Target
from kimi_hal.dispatch.loader import Loaded
from kimi_hal.errors import UnknownNameError, unknown
from kimi_hal.settings import VARIABLES
from kimi_hal_conformance import __version__, plugins, schedule
from kimi_hal_conformance.compiling.lane import CompileLane
from kimi_hal_conformance.compiling.order import ALL, PREFIX, Order, said
from kimi_hal_conformance.conditions import HOST_LANES, cores, versions
from kimi_hal_conformance.schema import Environment, Report, compose
from kimi_hal_conformance.verdict import NOT_RUN, Verdict

#: What a report says of how and what was run.
EXECUTION = "compile_only"
#: Seconds that one kernel may take.
LIMIT = 300.0
#: Read by compilers and kernel modules; a run decides them itself.
SWITCHES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
OWN_CODE = "no kernel of its own to compile: it is composed of torch operations or of a library's kernels"
OF_PARTS = "no kernel of its own to compile: it is made of the backend's other operators"


@dataclass(frozen=True)
class CompileRequest:
    """What was asked for on the command line.

    Args:
        backend: an installed backend.
        targets: names; empty: all that the backend gives.
        implementation: full name of the one implementation; empty: all.
        only: case ids; empty: every kernel.
        limit: seconds that one kernel may take; ``None``: ``LIMIT``.
        lanes: processes at once; ``None``: one a core, 4 at most.
        strict: a missing tool fails.
        operators: these alone; empty: all.
    """

    backend: str
    targets: Sequence[str] = ()
    implementation: str = ""
    only: Sequence[str] = ()
    limit: float | None = None
    lanes: int | None = None
    strict: bool = False
    operators: Sequence[str] = ()

    @property
    def limited_to(self) -> tuple[str, ...]:
        """Return what alone is asked for: targets, operators, an implementation, cases; empty: everything."""
        return *self.targets, *self.operators, *filter(None, (self.implementation,)), *self.only


def run(request: CompileRequest, progress: Callable[[Verdict], None] = lambda verdict: None) -> Report:
    """Compile what a backend describes and return the report, whose cases are kernels.

    Each order's process has no interpreter's switch and a cache that was empty when the run began.

    Raises:
        UnknownNameError: no such backend, target, operator, implementation or case, or a backend that gives no
            targets.
        PluginError: the backend cannot be loaded.
    """
    started, begin = datetime.now(UTC), time.perf_counter()
    registry = plugins.registry(request.backend)
    loaded, probe = registry.get(request.backend), registry.probe(request.backend)
    work = list(orders(loaded, chosen(loaded, request), request))
    with TemporaryDirectory(prefix="kimi-hal-compile-") as cache:
        verdicts = compile_all(work, child_environment(request, cache), lanes(request), progress)
    return compose(
        suite_version=__version__,
        backend=loaded.name,
        environment=Environment(
            execution=EXECUTION,
            profile=EXECUTION,
            seed=0,
            repeats=0,
            versions=versions(loaded, probe),
            devices=tuple(probe.devices),
            python=platform.python_version(),
            platform=platform.platform(),
            started=started.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - begin,
            limited_to=request.limited_to,
        ),
        on_trial=tuple(schedule.on_record(i, loaded) for i in on_trial(loaded, request)),
        not_implemented=schedule.missing(loaded, request.operators),
        verdicts=[msgspec.structs.replace(v, replay=replay(v, request)) for v in verdicts],
    )


def chosen(loaded: Loaded, request: CompileRequest) -> tuple[Target, ...]:
    """Return the targets that are asked for."""
    known = {t.name: t for t in loaded.backend.targets}
    if not known:
        raise UnknownNameError(
            f"{loaded.name} gives no targets, so nothing of it can be compiled without its device "
            "(Backend.targets, docs/vendor.md)"
        )
    for name in request.targets:
        if name not in known:
            raise unknown(f"target of {loaded.name}", name, known)
    return tuple(t for t in known.values() if not request.targets or t.name in request.targets)


def on_trial(loaded: Loaded, request: CompileRequest) -> Iterator[Implementation]:
    """Yield every implementation that is asked for, by operator."""
    named = {parts(case)[0] for case in request.only}
    for implementation in schedule.chosen(loaded, request.implementation, request.operators):
        if not named or implementation.operator in named:
            yield implementation


def orders(loaded: Loaded, targets: Sequence[Target], request: CompileRequest) -> Iterator[tuple[Order, str]]:
    """Yield what is compiled, and what is not with the reason."""
    for implementation in on_trial(loaded, request):
        for target in targets:
            only = kernels(request.only, implementation.operator, target, targets)
            if request.only and not only:
                continue
            order = Order(
                operator=implementation.operator,
                implementation=schedule.full_name(implementation, loaded),
                function=implementation.compile or "",
                target=target,
                limit=request.limit or LIMIT,
                strict=request.strict,
                only=only,
            )
            yield order, left_out(implementation, target)


def left_out(implementation: Implementation, target: Target) -> str:
    """Say why an implementation has no kernel for a target, or return an empty string."""
    if implementation.name == composed.NAME:
        return OF_PARTS
    if implementation.compile is None:
        return OWN_CODE
    claimed = sorted({arch for c in implementation.capabilities for arch in c.arch})
    if target.arch not in claimed and "*" not in claimed:
        return f"no kernel for {target.arch}: it claims {', '.join(claimed)}"
    return ""


def parts(case: str) -> tuple[str, str, str]:
    """Return operator, kernel and target of a case's id.

    Raises:
        UnknownNameError: it is not of the form, or names no operator.
    """
    prefix, _, rest = case.partition("/")
    operator, _, rest = rest.partition("/")
    kernel, _, target = rest.partition("/")
    if prefix != PREFIX or not target:
        raise UnknownNameError(f"{case!r} is not of the form {PREFIX}/<operator>/<kernel>/<target>")
    return ops.get(operator).name, kernel, target


def kernels(only: Sequence[str], operator: str, target: Target, targets: Sequence[Target]) -> tuple[str, ...]:
    """Return the kernels of an operator and a target that are asked for by id; ``*`` asks for all of them."""
    asked = [parts(case) for case in only]
    for _, _, name in asked:
        if name not in {t.name for t in targets}:
            raise unknown("target", name, [t.name for t in targets])
    return tuple(kernel for op, kernel, name in asked if (op, name) == (operator, target.name))


def compile_all(
    work: Sequence[tuple[Order, str]],
    environment: Mapping[str, str],
    width: int,
    progress: Callable[[Verdict], None],
) -> list[Verdict]:
    """Return every verdict in the orders' order, from several processes at once."""
    idle: SimpleQueue[CompileLane] = SimpleQueue()
    crew = [CompileLane(environment) for _ in range(width)]
    for lane in crew:
        idle.put(lane)

    def one(item: tuple[Order, str]) -> list[Verdict]:
        order, reason = item
        if reason:
            return [said(order, ALL, NOT_RUN, reason)]
        lane = idle.get()
        try:
            found = []
            for verdict in lane.compile(order):
                progress(verdict)
                found.append(verdict)
            return found
        finally:
            idle.put(lane)

    pool = ThreadPoolExecutor(width)
    try:
        return [verdict for verdicts in pool.map(one, work) for verdict in verdicts]
    finally:  # also on Ctrl-C: what runs is ended, what waits is dropped
        for lane in crew:
            lane.stop()
        pool.shutdown(cancel_futures=True)


def lanes(request: CompileRequest) -> int:
    """Return how many processes run at once."""
    return request.lanes or min(HOST_LANES, cores())


def child_environment(request: CompileRequest, cache: str) -> dict[str, str]:
    """Return the children's environment: the core's settings and compilers' switches are the run's own."""
    own = {*VARIABLES, *SWITCHES}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return threads | inherited | {"KIMI_HAL_BACKEND": request.backend, "TRITON_CACHE_DIR": cache}


def replay(verdict: Verdict, request: CompileRequest) -> str:
    """Return the command that compiles one kernel again; empty where nothing was compiled."""
    _, kernel, target = parts(verdict.case)
    if kernel == ALL:
        return ""
    words = ["kimi-hal conformance run", "--backend", request.backend, "--compile-only", "--target", target]
    return " ".join([*words, "--implementation", verdict.implementation, "--case", verdict.case])
