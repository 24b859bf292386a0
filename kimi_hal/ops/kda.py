"""Kimi Delta Attention: causal convolution, gate, recurrence, and speculative verification with commit.

Per head, with ``S`` the state held as ``[V, K]``, in at least float32:

1. ``q, k, v = SiLU(conv(x))``, a depthwise causal convolution over 4 tokens without bias.
2. ``q^ = q · rsqrt(Σq² + 1e-6) · scale`` and ``k^ = k · rsqrt(Σk² + 1e-6)``.
3. ``g = lower_bound · sigmoid(exp(A_log) · (raw_g + dt_bias))`` per channel of K; without a bound
   ``g = −exp(A_log) · softplus(raw_g + dt_bias)``. ``beta = sigmoid(raw_beta)`` per head.
4. ``S ← S · exp(g)``, then ``u = beta · (v − S k^)``, then ``S ← S + u k^ᵀ``, then ``o = S q^``.

Formulas: ``docs/operators.md``; flash-linear-attention ``fla/ops/kda/naive.py`` and ``gate.py``, vLLM
``models/kimi_k3/nvidia/ops``. State rules: rule 8 of ``docs/contract.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.ops import sequences
from kimi_hal.ops import values as check
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.spec import Limits, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KDASpec(Spec):
    """The six ``kda_*`` operators and ``kda_layer_decode``: one Spec, so that verify and commit cannot drift.

    Args:
        num_heads: heads of this call (96 over the tensor-parallel ranks).
        head_dim: K = V, channels of a head.
        gate: ``"raw"``: the operators compute the gate from raw_g, raw_beta, A_log and dt_bias.
            ``"log"``: raw_g and raw_beta hold finished values (``kda_gate``), A_log and dt_bias are None.
        lower_bound: of the raw gate; ``None``: the unbounded softplus gate.
        qk_norm: q and k are L2-normalised inside the operator.
        scale: multiplies the query.
        conv_width: taps of the convolution; its state holds one less.
        conv_layout: of the conv state: ``"width_channel"`` ``[slots, 3, C]``, ``"channel_width"``
            ``[slots, C, 3]``.
        state_dtype: of the recurrent state.
        checkpoints: the calls store states at given offsets (``checkpoint_offsets``, ``checkpoint_ids``).
        num_layers: layers that one ``kda_commit`` advances.
        norm_eps: of the RMSNorm in ``kda_layer_decode``.
    """

    num_heads: int
    head_dim: int = 128
    gate: str = "raw"
    lower_bound: float | None = -5.0
    qk_norm: bool = True
    scale: float = 128**-0.5
    conv_width: int = 4
    conv_layout: str = "width_channel"
    state_dtype: str = "float32"
    checkpoints: bool = False
    num_layers: int = 1
    norm_eps: float = 1e-5

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_heads": Range(1, 128),
        "head_dim": Range(1, 256),
        "gate": OneOf(("raw", "log")),
        "lower_bound": Range(-5.0, 0.0),
        "scale": Range(0, 1 << 16),
        "conv_width": OneOf((4,)),
        "conv_layout": OneOf(("width_channel", "channel_width")),
        "state_dtype": OneOf(("float32",)),
        "num_layers": Range(1, 1024),
        "norm_eps": Range(0, 1),
    }

    @property
    def channels(self) -> int:
        """Return C, the channels of the convolution: q, k and v of every head."""
        return 3 * self.num_heads * self.head_dim

    @property
    def gate_dtype(self) -> str:
        """Return the dtype of raw_g and raw_beta: finished values are float32."""
        return "bfloat16" if self.gate == "raw" else "float32"

    def dims(self) -> dict[str, int]:
        """Return H, K = V, HK, C, taps, layers, and the conv state's rows and columns in its layout."""
        rows, columns = self.conv_width - 1, self.channels
        if self.conv_layout == "channel_width":
            rows, columns = columns, rows
        return {
            "H": self.num_heads,
            "K": self.head_dim,
            "V": self.head_dim,
            "HK": self.num_heads * self.head_dim,
            "C": self.channels,
            "taps": self.conv_width,
            "conv_rows": rows,
            "conv_columns": columns,
            "layers": self.num_layers,
        }


_QKV = {
    "q": Arg("bfloat16", "T H K", strided="inner"),
    "k": Arg("bfloat16", "T H K", strided="inner"),
    "v": Arg("bfloat16", "T H V", strided="inner"),
}
_GATE = {
    "raw_g": Arg("spec.gate_dtype", "T H K", strided="inner"),
    "raw_beta": Arg("spec.gate_dtype", "T H"),
    "A_log": Arg("float32", "H"),
    "dt_bias": Arg("float32", "HK"),
}
_STATE = Arg("float32", "slots H V K", strided="inner")
_CONV_STATE = Arg("bfloat16", "slots conv_rows conv_columns")
_CONV = {"x": Arg("bfloat16", "T C"), "weight": Arg(("bfloat16", "float32"), "C taps")}
_IDS = Arg("int32", "N", strided="any")
_CUTS = {"state_ids": _IDS, "cu_seqlens": Arg("int32", "N+1", strided="any")}
_START = {
    "has_initial_state": Arg("bool", "N", strided="any"),
    "checkpoint_offsets": _IDS,
    "checkpoint_ids": _IDS,
}


def _checkpoint_presence(spec: KDASpec) -> dict[str, bool]:
    return {"checkpoint_offsets": spec.checkpoints, "checkpoint_ids": spec.checkpoints}


def _gate_presence(spec: KDASpec) -> dict[str, bool]:
    return {"A_log": spec.gate == "raw", "dt_bias": spec.gate == "raw"}


def _prefill_presence(spec: KDASpec) -> dict[str, bool]:
    return {**_gate_presence(spec), **_checkpoint_presence(spec)}


def _commit_presence(spec: KDASpec) -> dict[str, bool]:
    return {
        "A_logs": spec.gate == "raw",
        "dt_biases": spec.gate == "raw",
        "checkpoint_ids": spec.checkpoints,
        "checkpoint_lens": spec.checkpoints,
    }


def _sequence_values(t: Mapping[str, Any], rows: int, capacity: int) -> Iterator[str]:
    """Check cuts, state slots and checkpoints of a call over sequences."""
    yield from sequences.cuts(t, rows)
    counts, ids = sequences.counts(t), t["state_ids"].tolist()
    live = [count > 0 for count in counts]
    yield from sequences.slots("state_ids", ids, live, capacity)
    written = [slot for slot, used in zip(ids, live, strict=True) if used]
    yield from sequences.checkpoints(t, "checkpoint_offsets", counts, written, capacity)


def _apart(t: Mapping[str, Any], *mutated: str) -> Iterator[str]:
    """Check that outputs and mutated buffers overlap nothing else."""
    yield from check.outputs_apart(t, outputs=[name for name in ("out", "g_out", "beta_out") if name in t])
    inputs = [name for name, value in t.items() if hasattr(value, "data_ptr") and name != "out"]
    for i, name in enumerate(mutated):
        yield from check.no_overlap(t, name, [other for other in inputs if other not in mutated[: i + 1]])


def _conv_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from _sequence_values(t, t["x"].shape[0], t["conv_state"].shape[0])
    yield from _apart(t, "conv_state")


@operator(
    spec=KDASpec,
    args={**_CONV, "conv_state": Arg("bfloat16", _CONV_STATE.shape, mutated=True), **_CUTS, **_START},
    outs=(Out("bfloat16", "T C", "out"),),
    presence=_checkpoint_presence,
    values=_conv_values,
)
def kda_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve each channel with its own and the last 3 inputs of its sequence, then SiLU; advance the state.

    ``y[t] = SiLU(Σ_j weight[:, j] · x[t − 3 + j])``, inputs before the sequence's first row from its state.

    Args:
        x: ``[T, C]`` bf16 raw inputs, channels ``[q | k | v]``, C = 3·H·K; rows may be strided.
        weight: ``[C, 4]`` bf16 or float32, oldest tap first.
        conv_state: ``[slots, 3, C]`` or ``[slots, C, 3]`` bf16 (``Spec.conv_layout``), the last 3 raw inputs,
            oldest first, written in place; a view of a wider buffer is legal.
        state_ids: ``[N]`` int32 slot of each sequence; negative: the sequence is padding.
        cu_seqlens: ``[N + 1]`` int32: sequence n is rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``.
        has_initial_state: ``[N]`` bool; False: the inputs before the first row are zero, whatever the slot
            holds. ``None``: all True.
        checkpoint_offsets: ``[N]`` int32, with ``Spec.checkpoints``: after that many rows of the sequence in
            this call the state is also stored in ``checkpoint_ids``. The start counts: an offset below 3
            stores inputs of before the call too, an offset of 0 only those.
        checkpoint_ids: ``[N]`` int32 slots; negative: none.

    Returns:
        ``y [T, C]`` bf16.

    Edge rules: a padding sequence, and rows at or beyond ``cu_seqlens[N]``, give zeros and touch no state; so
    does a sequence whose slot is out of range. An empty sequence leaves its slot as it is, bit for bit.
    ``cu_seqlens`` starts at 0, never decreases and ends at or before T. A slot that two live sequences name
    is an error in checked mode. A stored input keeps its bits, −0 too; a NaN stays some NaN.
    T = 0 and N = 0 are legal.

    Source: HF ``KimiK3``'s short convolution; vLLM ``causal_conv1d.py``.
    """


def _kda_gate_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from _apart(t)


@operator(
    spec=KDASpec,
    args={
        "raw_g": Arg("bfloat16", "T H K", strided="inner"),
        "raw_beta": Arg("bfloat16", "T H"),
        "A_log": _GATE["A_log"],
        "dt_bias": _GATE["dt_bias"],
    },
    outs=(Out("float32", "T H K", "g_out"), Out("float32", "T H", "beta_out")),
    values=_kda_gate_values,
)
def kda_gate(
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    g_out: Tensor | None = None,
    beta_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Finish the gate: the natural-log decay of every channel, and beta of every head.

    ``g = lower_bound · sigmoid(exp(A_log) · (raw_g + dt_bias))``, or without a bound
    ``g = −exp(A_log) · softplus(raw_g + dt_bias)``; ``beta = sigmoid(raw_beta)``. These are what the other
    operators take under ``gate="log"``, and compute themselves under ``gate="raw"``.

    Args:
        raw_g: ``[T, H, K]`` bf16.
        raw_beta: ``[T, H]`` bf16; rows may be strided and of any alignment.
        A_log: ``[H]`` float32 (a checkpoint stores 128 entries, of which the first 96 are heads).
        dt_bias: ``[H · K]`` float32, head-major.

    Returns:
        ``g [T, H, K]`` float32, never positive, and ``beta [T, H]`` float32.

    Edge rules: softplus is the identity above 20. Large arguments of either sign give the limits and no NaN
    (an argument of 90 with ``A_log = 0`` and no bound gives −90). There is no padding marker: every row is
    computed. T = 0 is legal.

    Source: flash-linear-attention ``fla/ops/kda/gate.py``.
    """


def _prefill_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from _sequence_values(t, t["q"].shape[0], t["state"].shape[0])
    yield from _apart(t, "state")


@operator(
    spec=KDASpec,
    args={
        **_QKV,
        **_GATE,
        "state": Arg("float32", _STATE.shape, mutated=True, strided="inner"),
        **_CUTS,
        **_START,
    },
    outs=(Out("bfloat16", "T H V", "out"),),
    presence=_prefill_presence,
    values=_prefill_values,
)
def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run the recurrence over N sequences of any length, in place in the state pool.

    Args:
        q: ``[T, H, K]`` bf16 after the convolution; a view of ``kda_conv``'s ``[T, C]`` is legal.
        k: ``[T, H, K]``, likewise.
        v: ``[T, H, V]``, likewise.
        raw_g: ``[T, H, K]`` bf16 raw gate, or with ``gate="log"`` the finished float32 decay g.
        raw_beta: ``[T, H]`` bf16, or with ``gate="log"`` the finished float32 beta; rows of any alignment.
        A_log: ``[H]`` float32; ``None`` with ``gate="log"``.
        dt_bias: ``[H · K]`` float32; ``None`` with ``gate="log"``.
        state: ``[slots, H, V, K]`` float32, value-major, any ``stride(0)``.
        state_ids: ``[N]`` int32 slot of each sequence; negative: the sequence is padding.
        cu_seqlens: ``[N + 1]`` int32: sequence n is rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``.
        has_initial_state: ``[N]`` bool; False: the state starts at zero, whatever the slot holds.
            ``None``: all True.
        checkpoint_offsets: ``[N]`` int32, with ``Spec.checkpoints``: after that many rows of the sequence in
            this call (0: before the first) the state is also stored in ``checkpoint_ids``; a multiple of the
            plan's checkpoint multiple.
        checkpoint_ids: ``[N]`` int32 slots; negative: none.

    Returns:
        ``o [T, H, V]`` bf16.

    Edge rules: a padding sequence, and rows at or beyond ``cu_seqlens[N]``, give zeros and touch no state; so
    does a sequence whose slot is out of range. An empty sequence leaves its slot as it is, bit for bit.
    ``cu_seqlens`` starts at 0, never decreases and ends at or before T. A slot that two live sequences name
    is an error in checked mode. A checkpoint beyond its sequence is not stored. A row that is not finite reaches
    its own output, its state and what comes after it, never a row before it. T = 0 and N = 0 are legal.

    Source: flash-linear-attention ``fla/ops/kda/naive.py``; state orientation as FlashKDA and vLLM hold it.
    """


def _decode_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    ids = t["state_ids"].tolist()
    yield from sequences.slots("state_ids", ids, [True] * len(ids), t["state"].shape[0])
    yield from _apart(t, "state")


@operator(
    spec=KDASpec,
    args={
        **_QKV,
        **_GATE,
        "state": Arg("float32", _STATE.shape, mutated=True, strided="inner"),
        "state_ids": Arg("int32", "T", strided="any"),
    },
    outs=(Out("bfloat16", "T H V", "out"),),
    presence=_gate_presence,
    values=_decode_values,
)
def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    state_ids: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Advance each row's state by its one token: ``kda_prefill`` of T sequences of one row each.

    Args:
        q: ``[T, H, K]`` bf16 after the convolution.
        k: ``[T, H, K]`` bf16.
        v: ``[T, H, V]`` bf16.
        raw_g: ``[T, H, K]`` bf16, or float32 g with ``gate="log"``.
        raw_beta: ``[T, H]`` bf16, or float32 beta with ``gate="log"``.
        A_log: ``[H]`` float32; ``None`` with ``gate="log"``.
        dt_bias: ``[H · K]`` float32; ``None`` with ``gate="log"``.
        state: ``[slots, H, V, K]`` float32, value-major, any ``stride(0)``, in place.
        state_ids: ``[T]`` int32 slot of each row; negative: the row is padding.

    Returns:
        ``o [T, H, V]`` bf16.

    Edge rules: a padding row, or one whose slot is out of range, gives zeros and touches no state; slot 0 is
    an ordinary slot. Each live slot advances exactly once. T = 0 is legal.

    Source: vLLM ``fused_recurrent_kda_packed_decode``; flash-linear-attention ``naive.py``.
    """


def _verify_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from _sequence_values(t, t["x"].shape[0], t["state"].shape[0])
    longest = max(sequences.counts(t), default=0)
    if limits is not None and longest > limits.rows_per_req:
        yield f"cu_seqlens gives a sequence {longest} rows, beyond rows_per_req={limits.rows_per_req}"
    yield from _apart(t, "records")


@operator(
    spec=KDASpec,
    args={
        **_CONV,
        **_GATE,
        "conv_state": _CONV_STATE,
        "state": _STATE,
        **_CUTS,
        "records": Arg("uint8", ">=N record_bytes", mutated=True),
    },
    outs=(Out("bfloat16", "T H V", "out"),),
    presence=_gate_presence,
    values=_verify_values,
)
def kda_verify(
    x: Tensor,
    weight: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    records: Tensor,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the outputs of speculated rows without advancing any state; leave records for ``kda_commit``.

    The result is that of ``kda_conv`` and then ``kda_decode``, row by row: q, k and v are the convolution's
    bf16 outputs.

    Args:
        x: ``[T, C]`` bf16 raw inputs of the convolution, channels ``[q | k | v]``.
        weight: ``[C, 4]`` bf16 or float32.
        raw_g: ``[T, H, K]`` bf16, or float32 g with ``gate="log"``.
        raw_beta: ``[T, H]`` bf16, or float32 beta with ``gate="log"``.
        A_log: ``[H]`` float32; ``None`` with ``gate="log"``.
        dt_bias: ``[H · K]`` float32; ``None`` with ``gate="log"``.
        conv_state: as in ``kda_conv``, only read.
        state: ``[slots, H, V, K]`` float32, only read.
        state_ids: ``[N]`` int32 slot of each sequence; negative: the sequence is padding.
        cu_seqlens: ``[N + 1]`` int32; a sequence has at most ``Limits.rows_per_req`` rows.
        records: ``[max_reqs, plan.records_bytes]`` uint8, row n for sequence n; opaque bytes that only the
            same implementation's ``kda_commit`` reads.

    Returns:
        ``o [T, H, V]`` bf16.

    Edge rules: as ``kda_prefill``. Records of padding and of empty sequences are unspecified: no commit may
    read them. T = 0 and N = 0 are legal.

    Source: vLLM ``models/kimi_k3/nvidia/ops/recoverssm.py`` and its verify in ``kda.py``.
    """


def _commit_values(spec: KDASpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    accepted, ids = t["accepted"].tolist(), t["state_ids"].tolist()
    if limits is not None and max(accepted, default=0) > limits.rows_per_req:
        yield f"accepted holds {max(accepted)}, beyond rows_per_req={limits.rows_per_req}"
    live = [count > 0 and slot >= 0 for count, slot in zip(accepted, ids, strict=True)]
    capacity = t["states"][0].shape[0]
    yield from sequences.slots("state_ids", ids, live, capacity)
    written = ids
    if t.get("out_ids") is not None:
        written = t["out_ids"].tolist()
        yield from sequences.slots("out_ids", written, live, capacity)
        yield from _clobbers("out_ids", written, ids, live)
    rows = [count if used else -1 for count, used in zip(accepted, live, strict=True)]
    taken = [slot for slot, used in zip(written, live, strict=True) if used]
    yield from sequences.checkpoints(t, "checkpoint_lens", rows, taken, capacity)
    if t.get("checkpoint_ids") is not None:
        yield from _clobbers("checkpoint_ids", t["checkpoint_ids"].tolist(), ids, live)


def _clobbers(name: str, written: Sequence[int], ids: Sequence[int], live: Sequence[bool]) -> Iterator[str]:
    """Yield if a live row writes the slot from which another live row starts."""
    owner = {slot: n for n, (slot, used) in enumerate(zip(ids, live, strict=True)) if used}
    for n, slot in enumerate(written):
        if live[n] and owner.get(slot, n) != n:
            yield f"{name} names slot {slot}, the state of live row {owner[slot]}"
            return


@operator(
    spec=KDASpec,
    args={
        "conv_states": Arg("bfloat16", _CONV_STATE.shape, mutated=True, many=True, count="layers"),
        "states": Arg("float32", _STATE.shape, mutated=True, many=True, count="layers", strided="inner"),
        "records": Arg("uint8", ">=N record_bytes", many=True, count="layers"),
        "A_logs": Arg("float32", "H", many=True, count="layers"),
        "dt_biases": Arg("float32", "HK", many=True, count="layers"),
        "state_ids": _IDS,
        "accepted": _IDS,
        "out_ids": _IDS,
        "checkpoint_ids": _IDS,
        "checkpoint_lens": _IDS,
    },
    presence=_commit_presence,
    values=_commit_values,
)
def kda_commit(
    conv_states: Sequence[Tensor],
    states: Sequence[Tensor],
    records: Sequence[Tensor],
    A_logs: Sequence[Tensor] | None,
    dt_biases: Sequence[Tensor] | None,
    state_ids: Tensor,
    accepted: Tensor,
    out_ids: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    checkpoint_lens: Tensor | None = None,
) -> None:
    """Advance state and conv state of all layers as if the accepted rows had been decoded.

    Args:
        conv_states: ``Spec.num_layers`` tensors as in ``kda_conv``, in place.
        states: as many ``[slots, H, V, K]`` float32, in place.
        records: as many ``[max_reqs, plan.records_bytes]`` uint8, as the paired ``kda_verify`` wrote them.
        A_logs: as many ``[H]`` float32; ``None`` with ``gate="log"``.
        dt_biases: as many ``[H · K]`` float32; ``None`` with ``gate="log"``.
        state_ids: ``[N]`` int32, those of the verify; negative: nothing happens.
        accepted: ``[N]`` int32: how many of the sequence's verified rows now belong to it; 0 or less:
            nothing happens, no bit changes.
        out_ids: ``[N]`` int32: the slot that receives the result; the slot of ``state_ids`` is left as it is
            then. Negative: the result is not stored. ``None``: the result goes to ``state_ids``.
        checkpoint_ids: ``[N]`` int32 slots, with ``Spec.checkpoints``: also receive state and conv state as
            they are after ``checkpoint_lens`` rows; negative: none.
        checkpoint_lens: ``[N]`` int32, 0 to ``accepted``.

    Edge rules: slots out of range contribute nothing. More rows than a record has room for, the plan's
    ``Limits.rows_per_req``, count as that many. A record does not say how many rows its verify saw: accepting
    more than those is the caller's error, and what it leaves in the slots that this row writes is
    unspecified. A checkpoint beyond the accepted rows is not stored. A slot that is written twice, or written while
    another live row starts from it, is an error in checked mode; a row may store its checkpoint in its own
    ``state_ids`` slot if its result goes elsewhere.

    Source: vLLM ``models/kimi_k3/nvidia/ops/recoverssm.py`` (its ``num_accepted_tokens`` counts one more than
    the drafts that were accepted, which is the same number where the first verified row is the last sampled
    token).
    """
