"""What the layer costs a call.

Predictions: a plan's run is the builder's own function, so its call costs what a direct call costs, at most
1.05 times; a metadata check is attribute reads alone, about 0.15 µs an operand on an idle server core, 1 µs
for an attention call.

Runs on the host: what is measured is Python before a kernel is launched, the same for every device.
"""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kimi_hal as hal
from benchmarks.record import keep
from kimi_hal.dispatch import planning
from kimi_hal.dispatch.contract import API_VERSION, Backend, Capability, Implementation, Probe
from kimi_hal.dispatch.loader import Loaded, load
from kimi_hal.dispatch.plan import Plan
from kimi_hal.dispatch.planning import Wanted
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.operator import output_shapes, torch_dtype
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference.capabilities import coverage
from kimi_hal.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from inputs import example

SPEC = SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3fn.tensor")
LIMITS = Limits(max_rows=256, max_reqs=64)
ROUNDS, CALLS = 201, 1_000


def build(ctx: Any) -> Callable[..., Any]:
    """Return a run function that does nothing, so that only the call is measured."""

    def run(
        q: Any,
        cache: Any,
        indices: Any,
        k_scale: Any = None,
        q_scale: Any = None,
        index_len: Any = None,
        block_table: Any = None,
        row_req: Any = None,
        *,
        step: Any = None,
        out: Any = None,
        lse_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        return out, lse_out

    ctx.settings["made"] = run
    return run


def vendor_plan(made: dict[str, Any]) -> Plan:
    """Plan with a backend of our own, whose builder leaves its function in ``made``."""
    covered = tuple(Capability(("*",), c) for c in coverage(SparseMLASpec))
    item = Implementation("sparse_mla", "nothing", "benchmarks.call_overhead:build", covered)
    backend = Backend("vendor", "1.0", API_VERSION, "", "", "", "cpu")
    registry = load(Settings(backend="reference"))
    registry.backends["vendor"] = Loaded(backend, (item,), _probe=Probe(present=True, arch="host"))
    registry.points["vendor"] = registry.points["reference"]
    registry.variables = lambda name: made  # type: ignore[method-assign]
    settings = Settings(backend="vendor")
    return planning.make(
        Wanted(OPERATORS["sparse_mla"], SPEC, LIMITS, "cpu", None, None, None, settings, registry)
    )


def compare(statements: dict[str, str], names: dict[str, Any]) -> dict[str, float]:
    """Return nanoseconds a call of each statement; rounds alternate, so that all see the same machine."""
    timers = {name: timeit.Timer(text, globals=names) for name, text in statements.items()}
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            taken[name].append(timer.timeit(CALLS) / CALLS * 1e9)
    return {name: round(min(times), 1) for name, times in taken.items()}


def calls() -> dict[str, Any]:
    """Measure a call through the plan against a direct one."""
    made: dict[str, Any] = {}
    plan = vendor_plan(made)
    args = "(q, cache, indices, scale, out=out, lse_out=lse)"
    names = dict.fromkeys(("q", "cache", "indices", "scale", "out", "lse"), torch.zeros(1))
    names |= {"direct": made["made"], "plan": plan, "run": plan.run, "none": lambda *a, **k: None}
    found = compare({"direct": f"direct{args}", "run": f"run{args}", "plan.run": f"plan.run{args}"}, names)
    return {
        "plan.run is the builder's function": plan.run is made["made"],
        "nanoseconds": found,
        "run over direct": round(found["run"] / found["direct"], 3),
        "plan.run over direct": round(found["plan.run"] / found["direct"], 3),
    }


def checks() -> dict[str, Any]:
    """Measure the metadata check of every operator's example, without and with its output buffers."""
    found = {}
    for name, op in OPERATORS.items():
        spec, limits, args, kwargs = example(name)
        given = dict(op.signature.bind(*args, **kwargs).arguments)
        outs = {
            s.keyword: torch.empty(s.shape, dtype=torch_dtype(s.dtype))
            for s in output_shapes(op, spec, limits, given)
        }
        names = {**given, **outs, "check": check.compiled(op, spec, limits, device="cpu")}
        plain = f"check({', '.join(f'{n}={n}' for n in given)})"
        statements = {"inputs": plain}
        if outs:
            statements["inputs and outputs"] = f"check({', '.join(f'{n}={n}' for n in [*given, *outs])})"
        tensors = sum(len(v) if isinstance(v, list) else isinstance(v, torch.Tensor) for v in given.values())
        found[name] = {"tensors": tensors, **compare(statements, names)}
    return found


def entries() -> dict[str, float]:
    """Measure the three entries around a function that does nothing, in nanoseconds."""
    plan = vendor_plan({})
    q, cache, indices, scale = example("sparse_mla").args
    out, lse = torch.empty(3, 2, 512, dtype=torch.bfloat16), torch.empty(3, 2)
    names = {"plan": plan, "q": q, "cache": cache, "indices": indices, "scale": scale, "out": out, "lse": lse}
    call = "(q, cache, indices, scale, out=out, lse_out=lse)"
    with torch.inference_mode():
        return compare({"plan.run": f"plan.run{call}", "plan.op": f"plan.op{call}"}, names)


def planning_time() -> float:
    """Return the median milliseconds of one ``plan``."""
    once = timeit.Timer(lambda: hal.plan("sparse_mla", SPEC, LIMITS, device="cpu"))
    once.timeit(3)
    return round(statistics.median(once.repeat(21, 1)) * 1e3, 2)


def main() -> None:
    """Measure, print and keep."""
    figures = {
        "call": calls(),
        "entries, ns": entries(),
        "plan, ms": planning_time(),
        "metadata check, ns": checks(),
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
    keep("call_overhead", figures)


if __name__ == "__main__":
    main()
