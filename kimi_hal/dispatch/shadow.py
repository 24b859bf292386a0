"""The run function under ``KIMI_HAL_CHECK=shadow:N``: one call in N is repeated by the reference and compared.

The written rows are copied before the call, the implementation runs, then the reference runs on the copies,
so that memory which the reference has freed can hold no answer. Eager calls only: a captured or traced call
cannot be compared, and is refused. A difference raises: a wrong result is not to become a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import budget, capture, selected, signatures
from kimi_hal.dispatch.contract import Implementation
from kimi_hal.dispatch.touched import Snapshot, snapshot
from kimi_hal.errors import ShadowError
from kimi_hal.ops import values
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Spec

Run = Callable[..., Any]

#: Written arguments that only their own implementation can read.
OPAQUE = {"kda_verify": ("records",)}


@dataclass(frozen=True)
class Shadow:
    """What a shadow check needs to know of a plan.

    Args:
        op: the operator.
        spec: its Spec.
        name: full name of the implementation.
        implementation: its declaration: classes of rounding.
        writer_tie: how its cache writer breaks ties.
        reference: the reference's run function for this Spec.
        records_bytes: of the reference's records.
        every: N of ``shadow:N``.
    """

    op: Operator
    spec: Spec
    name: str
    implementation: Implementation
    writer_tie: str
    reference: Run
    records_bytes: int
    every: int


def refusal(op: Operator, chosen: Implementation, reference: Implementation) -> str | None:
    """Return why a plan cannot be compared with the reference, or ``None``."""
    if op.listed:
        return "its result is the implementation's own format"
    same = chosen.weights_format is not None and chosen.weights_format == reference.weights_format
    if op.takes_weights and not same:
        return f"the reference cannot read weights in {chosen.weights_format or 'a format without a name'}"
    if "records" in op.args and not op.args["records"].mutated and chosen.records != reference.records:
        return f"the reference cannot read records in {chosen.records}"
    return None


def shadowed(shadow: Shadow, run: Run) -> Run:
    """Return ``run`` with a comparison on its first call and every N-th after it."""
    calls = itertools.count(1)

    def call(given: dict[str, Any]) -> Any:
        capture.refuse(shadow.op.name, given, "KIMI_HAL_CHECK=shadow compares values")
        number = next(calls)
        if (number - 1) % shadow.every:
            return signatures.apply(shadow.op, run, given)
        before = _before(shadow, given)
        results = signatures.apply(shadow.op, run, given)
        reasons = list(_compare(shadow, given, before, results))
        if reasons:
            raise ShadowError(shadow.op.name, shadow.name, number, reasons)
        return results

    return signatures.around(shadow.op, "shadowed", run, call)


def _before(shadow: Shadow, given: Mapping[str, Any]) -> Snapshot:
    """Copy what the call writes: mutated rows, and inputs whose memory an output buffer shares."""
    taken = snapshot(shadow.op, shadow.spec, given)
    for name in OPAQUE.get(shadow.op.name, ()):
        del taken.rows[name]
        own = given[name].new_zeros((given[name].shape[0], shadow.records_bytes))
        taken.arguments[name] = own
    buffers = [given[o.keyword] for o in shadow.op.outs if given.get(o.keyword) is not None]
    for name in shadow.op.args:
        value: Any = given.get(name)
        if hasattr(value, "data_ptr") and any(values.overlaps(buffer, value) for buffer in buffers):
            taken.arguments[name] = value.clone()
    return taken


def _compare(shadow: Shadow, given: Mapping[str, Any], before: Snapshot, results: Any) -> Iterator[str]:
    """Run the reference on the copies and yield every difference."""
    op = shadow.op
    outputs = dict(zip([o.keyword for o in op.outs], op.results(results), strict=True))
    operands = {**given, **before.arguments}
    for name in ("step", "workspace", *outputs):
        if name in operands:
            operands[name] = None
    if op.sizes is not None and outputs:  # a width that the caller chose is the reference's as well
        operands.update({name: _blank(tensor) for name, tensor in outputs.items()})
    answers = op.results(signatures.apply(op, shadow.reference, operands))
    expected = dict(zip(outputs, answers, strict=True))
    yield from _outputs(shadow, given, outputs, expected)
    for label, now, kept in before.written(given):
        yield from _written(shadow, given, label, now, kept)


def _outputs(
    shadow: Shadow, given: Mapping[str, Any], actual: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[str]:
    op, numerics = shadow.op, shadow.implementation.numerics
    if op.name in selected.SELECTIONS:
        yield from selected.differences(op, shadow.spec, given, actual, expected, numerics)
        return
    for name, tensor in actual.items():
        theirs = expected[name]
        if op.name == "indexer_logits":  # columns behind a row's keys are unspecified
            tensor, theirs = (_visible(shadow.spec, given, t) for t in (tensor, theirs))
        yield from budget.buffers(name, tensor, theirs, numerics)


def _written(shadow: Shadow, given: Mapping[str, Any], label: str, now: Any, kept: Any) -> Iterator[str]:
    numerics = shadow.implementation.numerics
    if shadow.writer_tie != "even" and shadow.op.name in ("store_latent", "store_index_keys"):
        # A writer that breaks ties otherwise than to even writes other bytes; what they mean is as close.
        now, kept = (_decoded(shadow.spec, given, cache) for cache in (now, kept))
        numerics = (*numerics, "cache=fp8")
    yield from budget.buffers(label, now, kept, numerics)


def _decoded(spec: Any, given: Mapping[str, Any], cache: Any) -> Any:
    import torch

    from kimi_hal import formats

    if hasattr(spec, "index"):
        index = formats.index(spec.index)
        return index.read(cache, torch.arange(cache.shape[0] * index.page, device=cache.device))
    slots = torch.arange(cache.shape[0] * spec.page, device=cache.device)
    return formats.latent(spec.latent).read(cache, spec.page, slots, given["k_scale"])


def _visible(spec: Any, given: Mapping[str, Any], logits: Any) -> Any:
    import torch

    from kimi_hal.parallel import ownership

    keys = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp))
    keys = keys.clamp(max=given["block_table"].shape[1] * spec.page)
    column = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(column >= keys[:, None], 0)


def _blank(tensor: Any) -> Any:
    """Return a buffer like an output: −inf where the reference writes nothing, as where it allocates."""
    blank = tensor.new_empty(tensor.shape)
    return (
        blank.fill_(-float("inf")) if tensor.dtype.is_floating_point and tensor.element_size() > 1 else blank
    )
