"""Mixture of experts: the router, the experts' weights, and the experts themselves.

Formulas: ``docs/operators.md``; HF ``KimiK3MoE``, vLLM ``fused_moe/router/grouped_topk_router.py`` for the
router, ``layers/activation.py`` for SiTU, compressed-tensors ``mxfp4-pack-quantized`` for the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kimi_hal import formats
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.ops import values as check
from kimi_hal.ops.operator import Arg, Out, operator
from kimi_hal.ops.spec import FLOAT_DTYPES, Limits, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec(Spec):
    """``moe_route``: how many experts of how many, and how a score becomes a weight."""

    num_experts: int = 896
    topk: int = 16
    score: str = "sigmoid"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    denom_eps: float = 0.0
    ordered: bool = False

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_experts": Range(1, 1 << 16),
        "topk": Range(1, 1 << 10),
        "score": OneOf(("sigmoid",)),
        "scale": Range(0, 1e6),
        "groups": Range(1, 1 << 10),
        "topk_groups": Range(1, 1 << 10),
        "denom_eps": Range(0, 1),
    }

    def problems(self) -> Iterator[str]:
        """Yield groups that do not divide the experts, and a top-k that the chosen groups cannot fill."""
        if self.num_experts % self.groups:
            yield f"groups={self.groups} does not divide num_experts={self.num_experts}"
            return
        if self.topk_groups > self.groups:
            yield f"topk_groups={self.topk_groups} is more than groups={self.groups}"
        reachable = min(self.topk_groups, self.groups) * (self.num_experts // self.groups)
        if self.topk > reachable:
            yield f"topk={self.topk} is more than the {reachable} experts that a row can reach"

    def dims(self) -> dict[str, int]:
        """Return E experts and k chosen ones."""
        return {"E": self.num_experts, "k": self.topk}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec(Spec):
    """``prepare_moe_weights`` and ``moe_experts``: which experts this rank holds, of what shape and format.

    ``intermediate`` is this tensor-parallel rank's share: 3072 / TP for K3.1. ``act`` is the dtype of ``x``
    and of the activations in the matrix products (W4A16); an implementation that quantises them says so by
    a numerics class. ``activation="swiglu"`` is ``silu(gate) · up``, the limit of SiTU for a large ``beta``
    without ``linear_beta``; it reads neither. A ``linear_beta`` of ``None``, 0 or less passes ``up`` through.
    """

    num_experts: int = 896
    num_local: int = 896
    expert_offset: int = 0
    has_expert_map: bool = False
    topk: int = 16
    hidden: int = 3584
    intermediate: int = 3072
    weights: str = "experts.mxfp4-pack"
    act: str = "bfloat16"
    activation: str = "situ"
    beta: float = 4.0
    linear_beta: float | None = 25.0
    out_dtype: str = "bfloat16"

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "num_experts": Range(1, 1 << 16),
        "num_local": Range(1, 1 << 16),
        "expert_offset": Range(0, 1 << 16),
        "topk": Range(1, 1 << 10),
        "hidden": Range(1, 1 << 20),
        "intermediate": Range(1, 1 << 20),
        "act": OneOf(("bfloat16",)),
        "activation": OneOf(("situ", "swiglu")),
        "beta": Range(1e-3, 1e6),
        "linear_beta": Range(-1e6, 1e6),
        "out_dtype": OneOf(FLOAT_DTYPES),
    }

    def problems(self) -> Iterator[str]:
        """Yield an unknown weight format, widths that cut its groups, and experts beyond the last."""
        unknown = list(formats.problems("experts", self.weights))
        yield from unknown or self._width_problems()
        if self.topk > self.num_experts:
            yield f"topk={self.topk} is more than num_experts={self.num_experts}"
        if self.has_expert_map and self.expert_offset:
            yield f"expert_offset={self.expert_offset} is not read with has_expert_map=True; leave it 0"
        if self.expert_offset + self.num_local > self.num_experts:
            last = f"expert_offset={self.expert_offset} + num_local={self.num_local}"
            yield f"{last} is beyond num_experts={self.num_experts}"

    def _width_problems(self) -> Iterator[str]:
        group = formats.experts(self.weights).group
        for name, operand in (("hidden", "w13"), ("intermediate", "w2")):
            width = getattr(self, name)
            if width % group:
                below, above = width // group * group, (width // group + 1) * group
                near = f"widths are {below} or {above}" if below else f"width is {above}"
                yield (
                    f"{name}={width} cuts a group of {group} along {operand}'s columns ({self.weights}); "
                    f"the nearest whole {near}"
                )

    def dims(self) -> dict[str, int]:
        """Return E, El = num_local, k, Hid and In, and the packed widths and scale counts per row."""
        group = formats.experts(self.weights).group
        return {
            "E": self.num_experts,
            "El": self.num_local,
            "k": self.topk,
            "Hid": self.hidden,
            "2In": 2 * self.intermediate,
            "Hid/2": self.hidden // 2,
            "Hid/g": self.hidden // group,
            "In/2": self.intermediate // 2,
            "In/g": self.intermediate // group,
        }


def _route_values(spec: RouteSpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    if t.get("num_tokens") is not None:
        yield from check.between("num_tokens", t["num_tokens"], 0, t["logits"].shape[0] + 1)
    yield from check.outputs_apart(t, outputs=("weights_out", "ids_out"))


@operator(
    spec=RouteSpec,
    args={
        "logits": Arg("float32", "T E"),
        "bias": Arg("float32", "E"),
        "num_tokens": Arg("int32", "1"),
    },
    outs=(Out("float32", "T k", "weights_out"), Out("int32", "T k", "ids_out")),
    values=_route_values,
)
def moe_route(
    logits: Tensor,
    bias: Tensor,
    num_tokens: Tensor | None = None,
    *,
    weights_out: Tensor | None = None,
    ids_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by biased score and weigh them by the unbiased one.

    ``s = sigmoid(logits)`` in float32; the ``topk`` largest ``s + bias`` (a float32 sum) are chosen;
    ``weight = scale · s / (Σ s + denom_eps)`` over the chosen, or ``scale · s`` without ``renormalize``.
    With ``groups`` > 1 the experts stand in that many equal runs of ids, a run's score is the sum of its two
    largest ``s + bias``, and only experts of the ``topk_groups`` best runs can be chosen.

    Args:
        logits: ``[T, E]`` float32, the gate's product, any row stride.
        bias: ``[E]`` float32, the correction that balances the experts' load.
        num_tokens: ``[1]`` int32; rows from it on are padding and are not read. Clamped to ``[0, T]``.

    Returns:
        ``weights [T, k]`` float32 and ``ids [T, k]`` int32 of logical experts, aligned. Their order in a row
        is free; ascending by id with ``ordered``.

    Edge rules: equal scores go to the smaller id (also between runs, and also where sigmoid saturates: every
    logit from 18 on scores exactly 1 in float32). An expert whose ``s + bias`` is NaN counts as −inf and has
    weight 0, so that a row of NaN gives ids 0 … k − 1 and zeros. A sum of 0 gives zeros. Ids in a row are
    distinct. A padded row gives ids −1 and weights 0.

    Source: vLLM ``grouped_topk_router.py`` (DeepSeek-V3's ``noaux_tc``); rule 9 of ``docs/contract.md``.
    """


def _prepare_values(spec: MoESpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    if not t.get("donate"):
        return
    names = ("w13", "w13_scale", "w2", "w2_scale")
    for i, name in enumerate(names):  # each may be overwritten while another is still read
        yield from check.no_overlap(t, written=name, read=names[i + 1 :])


@operator(
    spec=MoESpec,
    args={
        "w13": Arg("uint8", "El 2In Hid/2"),
        "w13_scale": Arg("uint8", "El 2In Hid/g"),
        "w2": Arg("uint8", "El Hid In/2"),
        "w2_scale": Arg("uint8", "El Hid In/g"),
    },
    values=_prepare_values,
    listed=True,
)
def prepare_moe_weights(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *, donate: bool = False
) -> list[Tensor]:
    """Turn the checkpoint's expert weights into the list that this implementation's ``moe_experts`` takes.

    Args:
        w13: ``[El, 2·In, Hid/2]`` uint8: the rank's In gate rows (``w1``), then its In up rows (``w3``). El
            is ``num_local``, In this tensor-parallel rank's ``intermediate``. Two 4-bit codes a byte, the
            even column in the low nibble.
        w13_scale: ``[El, 2·In, Hid/g]`` uint8 exponents, one for g columns of a row (g = 32, e8m0).
        w2: ``[El, Hid, In/2]`` uint8, the down-projection's columns of this rank.
        w2_scale: ``[El, Hid, In/g]`` uint8.
        donate: the inputs may be freed or overwritten, expert by expert, and must not be used again. Without
            it they keep their bytes and share none with the result, so that the weights exist twice.

    Returns:
        An opaque list of tensors. Its length and contents belong to the implementation, which names them by
        ``Implementation.weights_format``.

    Edge rules: widths need only be whole groups, never whole tiles: an implementation pads inside. An expert
    that no token ever reaches is prepared like any other. An all-zero expert has finite scales and stays 0.
    Load time only; never captured.

    Source: compressed-tensors ``mxfp4-pack-quantized``; byte layout in ``docs/formats.md``.
    """


def expert_shapes(spec: MoESpec) -> list[list[int]]:
    """Return the shapes of w13, w13_scale, w2 and w2_scale, as ``prepare_moe_weights`` takes them."""
    size = spec.dims()
    return [[size[word] for word in arg.shape.split()] for arg in prepare_moe_weights.args.values()]


def _experts_presence(spec: MoESpec) -> dict[str, bool]:
    return {"expert_map": spec.has_expert_map}


def _experts_values(spec: MoESpec, limits: Limits | None, t: Mapping[str, Any]) -> Iterator[str]:
    yield from check.below("topk_ids", t["topk_ids"], spec.num_experts, "the model's experts")
    if t.get("expert_map") is not None:
        yield from check.below("expert_map", t["expert_map"], spec.num_local, "this rank's experts")
    yield from check.outputs_apart({**t, **_named(t["weights"])}, outputs=("out",))


def _named(weights: Any) -> dict[str, Any]:
    return {f"weights[{i}]": tensor for i, tensor in enumerate(weights)}


@operator(
    spec=MoESpec,
    args={
        "x": Arg("spec.act", "T Hid"),
        "topk_weights": Arg("float32", "T k"),
        "topk_ids": Arg("int32", "T k"),
        "weights": Arg("*", "*", many=True, strided="any"),
        "expert_map": Arg("int32", "E", strided="any"),
    },
    outs=(Out("spec.out_dtype", "T Hid", "out"),),
    presence=_experts_presence,
    values=_experts_values,
)
def moe_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: list[Tensor],
    expert_map: Tensor | None = None,
    *,
    step: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run each row through the chosen experts that this rank holds, and add their weighted results.

    ``y = Σ_j weight_j · W2_e( act( W1_e x, W3_e x ) )`` with ``e = topk_ids[:, j]``. SiTU is
    ``act(g, u) = β·tanh(g/β)·sigmoid(g) · β'·tanh(u/β')``, where β' = ``linear_beta`` and a β' that is absent
    or not positive leaves u as it is.

    Args:
        x: ``[T, Hid]`` bf16, every token that this rank computes; the operator never communicates.
        topk_weights: ``[T, k]`` float32, applied to the experts' results after ``w2``, never to their input.
        topk_ids: ``[T, k]`` int32 global expert ids.
        weights: the list that ``prepare_moe_weights`` of the same implementation and Spec returned.
        expert_map: ``[E]`` int32: the local index of each global expert, or −1. Required with
            ``has_expert_map``; without it the local index is ``id − expert_offset``.

    Returns:
        ``y [T, Hid]`` in ``Spec.out_dtype``: this rank's partial sum, before any all-reduce and norm. It
        shares no memory with an input.

    Numerics: products accumulate in at least float32. Each implementation rounds where it must round the
    operand of the second product, the activation (at most: gate and up once to bf16, their activation once to
    bf16); the oracle keeps both unrounded and the budget counts these roundings. A row's experts are added
    in float32, in one order that the implementation fixes, and rounded once to ``out_dtype``. The reference
    adds in ascending local index.

    Edge rules: a negative id contributes 0, and so do an id at or beyond E, an expert that another rank
    holds, and a map entry at or beyond ``num_local``; their weight is not multiplied, whatever it holds. An
    expert named twice in a row counts twice. Any expert, and the whole rank, may have no token; a row
    without a local expert is 0. T = 0 is legal.

    Source: HF ``KimiK3MoE``; vLLM ``layers/activation.py``; rule 9 of ``docs/contract.md``.
    """
