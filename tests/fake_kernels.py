"""The kernels of a plugin for the CPU: right ones, which are the reference under another name, and wrong ones."""

from __future__ import annotations

from kimi_hal.dispatch import signatures
from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Properties, Sizes
from kimi_hal.ops import OPERATORS
from kimi_hal.reference import backend
from kimi_hal.reference.capabilities import coverage

#: operator -> what spoils a call: fn(results, operands by name) -> results
SPOILT = {}
#: What the builders were given, newest last.
CONTEXTS = []


def kernel(operator: str, name: str = "fast", build: str = "fake_kernels:build", **fields) -> Implementation:
    """Declare an implementation that covers every Spec of an operator."""
    properties = fields.pop("properties", Properties(deterministic=True))
    covered = tuple(
        Capability(("*",), c, properties=properties) for c in coverage(OPERATORS[operator].spec_type)
    )
    preferences = (Preference(rank=fields.pop("rank", 0)),)
    return Implementation(operator, name, build, covered, preferences, **fields)


def build(ctx):
    """Return the reference's function, spoilt if the test asks for it."""
    CONTEXTS.append(ctx)
    op, right = OPERATORS[ctx.operator], backend.build(ctx)

    def call(given):
        results = signatures.apply(op, right, given)
        return SPOILT[op.name](results, given) if op.name in SPOILT else results

    return signatures.function(op, f"fake_{op.name}", call)


def merge(ctx):
    """Return a function written as a vendor would."""

    def run(outs, lses, *, out=None, lse_out=None):
        ctx.check(outs=outs, lses=lses, out=out, lse_out=lse_out)
        return backend.build(ctx)(outs, lses, out=out, lse_out=lse_out)

    return run


def needs_a_library(ctx):
    import a_library_that_nobody_has  # noqa: F401


def crashes(ctx):
    raise RuntimeError("nvcc fatal: unsupported gpu architecture")


def other_names(ctx):
    return lambda parts, lses, *, out, lse_out=None, stream=None: None


def no_function(ctx):
    return 7


def size(spec, limits, arch):
    return Sizes(workspace=100 * limits.max_rows, step=16, persistent=32)


def size_as_dict(spec, limits, arch):
    return {"workspace": 1}


def prepare(ctx):
    def fill(row_req, row_len, block_table, *, step, cu_seqlens=None, cu_seqlens_host=None, max_context=None):
        step.fill_(7)

    return fill


def weights(ctx, *, donate, **checkpoint):
    return [checkpoint[name] for name in sorted(checkpoint)] + [donate]


def demanding(ctx):
    """Return a function that tells which buffers it was given."""

    def call(given):
        step = given["step"]
        return given["workspace"].numel(), None if step is None else step.tolist()

    return signatures.function(OPERATORS[ctx.operator], "demanding", call)


def scribbles(ctx):
    """Return the reference's function that also leaves bytes in its workspace."""
    right = backend.build(ctx)

    def call(given):
        if given["workspace"] is not None:
            given["workspace"].fill_(0xAB)
        return signatures.apply(OPERATORS[ctx.operator], right, given)

    return signatures.function(OPERATORS[ctx.operator], "scribbles", call)
