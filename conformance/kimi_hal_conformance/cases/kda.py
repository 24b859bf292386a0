"""Cases of the kda family: convolution, gate, prefill, decode, and the verify and commit pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference.kda import kda_conv
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.draws import ints, near_ties, normal, strided

LIMITS = Limits(max_rows=192, max_reqs=16, rows_per_req=8, uniform=False)
BF16 = torch.bfloat16
SLOTS = 9


def gate_parameters(g: torch.Generator, spec: KDASpec) -> dict[str, Tensor]:
    """Return ``A_log`` and ``dt_bias`` as trained models have them: log of 1 to 16, and inverse softplus."""
    rate = torch.rand(spec.num_heads, generator=g) * 15 + 1
    return {"A_log": rate.log(), "dt_bias": normal(g, spec.num_heads * spec.head_dim, spread=2.0)}


def rows_of(g: torch.Generator, spec: KDASpec, rows: int) -> dict[str, Tensor | None]:
    """Return q, k, v as views of one convolution output, and the gate raw or finished."""
    heads, dim = spec.num_heads, spec.head_dim
    mixed = normal(g, rows, 3, heads, dim, dtype=BF16)
    operands: dict[str, Tensor | None] = {name: mixed[:, i] for i, name in enumerate("qkv")}
    raw_g, raw_beta = normal(g, rows, heads, dim, spread=2.0), normal(g, rows, heads, spread=2.0)
    if spec.gate == "log":
        finished = -5.0 * torch.sigmoid(raw_g)
        return operands | {
            "raw_g": finished,
            "raw_beta": torch.sigmoid(raw_beta),
            "A_log": None,
            "dt_bias": None,
        }
    return (
        operands
        | {"raw_g": raw_g.to(BF16), "raw_beta": strided(raw_beta.to(BF16), 1)}
        | gate_parameters(g, spec)
    )


def state_pool(g: torch.Generator, spec: KDASpec) -> Tensor:
    """Return a pool of float32 states, each slot different, slots further apart than they are long."""
    heads, dim = spec.num_heads, spec.head_dim
    size = heads * dim**2
    pool = normal(g, SLOTS, size + 64, spread=0.1)
    return pool.as_strided((SLOTS, heads, dim, dim), (size + 64, dim * dim, dim, 1))


def conv_pool(g: torch.Generator, spec: KDASpec) -> Tensor:
    """Return a pool of bf16 convolution states in the Spec's layout."""
    channels = 3 * spec.num_heads * spec.head_dim
    shape = (spec.conv_width - 1, channels)
    if spec.conv_layout == "channel_width":
        shape = shape[::-1]
    return normal(g, SLOTS, *shape, dtype=BF16)


def sequences(lengths: Sequence[int], padding: int = 0) -> dict[str, Tensor]:
    """Return offsets of sequences, a slot for each, and which of them continue; one of several is padding."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = [(3 * i + 1) % SLOTS for i in range(len(lengths))]
    if padding:
        ids[-1] = -1
    return {"cu_seqlens": ends, "state_ids": ints(ids)}


def decode_operands(spec: KDASpec, rows: int) -> Make:
    """Return one token a row; the last two rows of four or more are padding and out of range."""

    def make(g: torch.Generator) -> Operands:
        ids = [(2 * i) % SLOTS for i in range(rows)]
        if rows > 3:
            ids[-2:] = [-1, SLOTS]
        pool = state_pool(g, spec)
        columns = (
            torch.stack([ints(ids), ints([7] * rows), ints([8] * rows)], dim=1)
            if rows
            else ints([]).view(0, 3)
        )
        return rows_of(g, spec, rows) | {"state": pool, "state_ids": columns[:, 0]}

    return make


def prefill_operands(spec: KDASpec, lengths: Sequence[int], tail: int = 0, resume: bool = True) -> Make:
    """Return ragged sequences with ``tail`` padding rows behind the last."""

    def make(g: torch.Generator) -> Operands:
        rows = sum(lengths) + tail
        operands = (
            rows_of(g, spec, rows)
            | {"state": state_pool(g, spec)}
            | sequences(lengths, padding=len(lengths) > 3)
        )
        if resume:
            operands["has_initial_state"] = torch.tensor(
                [i % 2 == 0 for i in range(len(lengths))], dtype=torch.bool
            )
        return operands

    return make


def checkpointed(make: Make, offsets: Sequence[int]) -> Make:
    """Return operands that also store a checkpoint in the slot behind each sequence's own."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        ids = (operands["state_ids"] + 1).where(ints(offsets) >= 0, -1)
        return operands | {"checkpoint_offsets": ints(offsets).clamp(min=0), "checkpoint_ids": ids}

    return wrapped


def conv_operands(spec: KDASpec, lengths: Sequence[int], tail: int = 0) -> Make:
    """Return raw inputs, weights and histories of ragged sequences."""

    def make(g: torch.Generator) -> Operands:
        channels = 3 * spec.num_heads * spec.head_dim
        operands = sequences(lengths, padding=len(lengths) > 3)
        return operands | {
            "x": strided(normal(g, sum(lengths) + tail, channels, dtype=BF16)),
            "weight": normal(g, channels, spec.conv_width, dtype=BF16, spread=0.5),
            "conv_state": conv_pool(g, spec),
            "has_initial_state": torch.tensor([i % 2 == 0 for i in range(len(lengths))], dtype=torch.bool),
        }

    return make


def settle(g: torch.Generator, spec: KDASpec, operands: Operands) -> None:
    """Draw inputs of the convolution again until no output of it is near a tie of bfloat16.

    Then whoever computes the convolution in float32 gives the recurrence the same q, k and v.

    Args:
        g: the case's generator.
        spec: gives the channels and the layout of the state.
        operands: ``x``, which is changed, ``weight``, ``conv_state``, ``state_ids`` and ``cu_seqlens``.
    """
    names = ("x", "weight", "conv_state")
    cuts = {name: operands[name] for name in ("state_ids", "cu_seqlens")}
    for attempt in range(64):
        signed = kda_conv(spec, *(operands[name].clone() for name in names), **cuts, dtype=torch.float64)
        # SiLU of a sum of sizes is at least half of it: what float32 can lose is a share of that.
        size = 2 * kda_conv(spec, *(operands[name].abs() for name in names), **cuts, dtype=torch.float64)
        again = near_ties(signed, 2.0**-20 * size)
        if not again.any():
            return
        operands["x"][again] = normal(g, int(again.sum()), dtype=BF16)
        if attempt % 4 == 3:  # a tap that is nearly 0 passes nothing on of what is drawn again
            taps = again.any(dim=0)
            operands["weight"][taps] = normal(g, int(taps.sum()), spec.conv_width, dtype=BF16, spread=0.5)
    raise AssertionError("the convolution's outputs stay near ties of bfloat16")


def verify_operands(spec: KDASpec, lengths: Sequence[int], limits: Limits) -> Make:
    """Return what ``kda_verify`` takes, except its records, whose size only a plan knows."""

    def make(g: torch.Generator) -> Operands:
        rows = rows_of(g, spec, sum(lengths))
        convolved = conv_operands(spec, lengths)(g)
        names = ("x", "weight", "conv_state", "state_ids", "cu_seqlens")
        shared = {name: convolved[name] for name in names}
        settle(g, spec, shared)
        gate = {name: rows[name] for name in ("raw_g", "raw_beta", "A_log", "dt_bias")}
        return shared | gate | {"state": state_pool(g, spec)}

    return make


def commit_operands(spec: KDASpec, lengths: Sequence[int], accepted: Sequence[int], limits: Limits) -> Make:
    """Return a verify's operands and how many rows of each sequence were accepted."""

    def make(g: torch.Generator) -> Operands:
        return {**verify_operands(spec, lengths, limits)(g), "accepted": ints(accepted)}

    return make


def gate_operands(spec: KDASpec, rows: int) -> Make:
    """Return raw gates with arguments far out on both sides."""

    def make(g: torch.Generator) -> Operands:
        raw = normal(g, rows, spec.num_heads, spec.head_dim, spread=3.0)
        beta = normal(g, rows, spec.num_heads, spread=3.0)
        if rows:
            raw[0, 0, :4] = torch.tensor([90.0, -90.0, 0.0, 20.5])
            beta[0, 0] = 100.0
        return {"raw_g": raw.to(BF16), "raw_beta": strided(beta.to(BF16), 1)} | gate_parameters(g, spec)

    return make


def cases() -> Iterator[Case]:
    """Heads of TP sizes, other head sizes, both gates and layouts, ragged and empty sequences."""
    tp8, odd = KDASpec(num_heads=12), KDASpec(num_heads=5, head_dim=60)
    specs = {
        "tp8": tp8,
        "tp32": KDASpec(num_heads=3),
        "odd": odd,
        "log-gate": KDASpec(num_heads=2, head_dim=32, gate="log"),
        "unbounded": KDASpec(num_heads=2, head_dim=32, lower_bound=None),
        "no-norm": KDASpec(num_heads=2, head_dim=32, qk_norm=False, scale=0.25),
        "channel-major": KDASpec(num_heads=2, head_dim=32, conv_layout="channel_width"),
    }
    for label, spec in specs.items():
        yield from steps(
            label, spec, since=INTERP if label != "tp8" else QUICK, fault=14 if spec is odd else 0
        )
    tiny = KDASpec(num_heads=2, head_dim=16)
    for length in (1, 7, 8, 15, 16, 63, 64, 65, 129):
        make = prefill_operands(tiny, (length,), resume=False)
        yield case(f"kda_prefill/small/one-of-{length}", tiny, make, since=INTERP, fault=9)
    yield case("kda_prefill/small/none", tiny, prefill_operands(tiny, ()), since=INTERP)
    kept, ragged = replace(tiny, checkpoints=True), (5, 20, 33)
    make = checkpointed(prefill_operands(kept, ragged), (0, 16, -1))
    yield case("kda_prefill/small/checkpoints", kept, make, since=INTERP)
    make = checkpointed(conv_operands(kept, ragged), (2, 16, -1))
    yield case("kda_conv/small/checkpoints", kept, make, since=INTERP)
    for operator, operands in (("kda_prefill", prefill_operands), ("kda_conv", conv_operands)):
        make = checkpointed(operands(kept, (133, 40, 9)), (128, 0, -1))
        yield case(f"{operator}/small/checkpoints-of-blocks", kept, make, since=QUICK)


def steps(label: str, spec: KDASpec, since: str, fault: int) -> Iterator[Case]:
    """Return the cases of every operator for one Spec; at the model's size the long ones are no quick ones."""
    late = STANDARD if since == QUICK else since
    for rows in (0, 1, 9) if spec.gate == "raw" else ():
        yield case(f"kda_gate/{label}/rows{rows}", spec, gate_operands(spec, rows), since, fault)
    for rows in (0, 1, 6):
        yield case(
            f"kda_decode/{label}/rows{rows}",
            spec,
            decode_operands(spec, rows),
            since,
            fault or 13 * (rows > 1),
        )
    long = (3, 0, 17, 64) if label != "tp8" else (5, 0, 70)
    yield case(f"kda_prefill/{label}/ragged", spec, prefill_operands(spec, long, tail=2), late, fault or 12)
    yield case(
        f"kda_conv/{label}/ragged", spec, conv_operands(spec, (1, 0, 5, 2), tail=3), since, fault or 12
    )
    yield case(f"kda_verify/{label}/drafts", spec, verify_operands(spec, (1, 8, 3), LIMITS), late, fault)
    partial = commit_operands(spec, (4, 8, 3, 2), (2, 8, 0, -1), LIMITS)
    yield case(f"kda_commit/{label}/partial", spec, partial, late, fault)


def case(name: str, spec: KDASpec, make: Make, since: str = QUICK, fault: int = 0) -> Case:
    """Return one case."""
    return Case(name, name.partition("/")[0], spec, LIMITS, make, since=since, fault=fault)


WHY = {
    "kda_gate/": "Decay and beta over arguments far out on both sides.",
    "kda_decode/": "One token a row: each slot advances once, padding and ids out of range touch none.",
    "kda_prefill/": "Ragged sequences against the recurrence: empty ones, some that continue, rows behind the last.",
    "kda_prefill/small/one-of-": "Lengths around every chunk and tile: the chunked sum is the recurrence.",
    "kda_prefill/small/checkpoints": "A state stored on the way is that of the run that wrote it.",
    "kda_conv/": "Taps over a sequence's own history and no other's, and the history that is left behind.",
    "kda_verify/": "Drafts give the outputs of decoding and leave both states as they are.",
    "kda_commit/": "Accepted drafts advance both states as decoding would have; none accepted changes no bit.",
}

add(cases(), WHY)
