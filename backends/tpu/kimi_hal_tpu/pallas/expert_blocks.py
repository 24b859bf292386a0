"""Expert weights as the kernel of ``experts.py`` reads them: transposed, in blocks that one copy brings.

A checkpoint's row is one output column; here a row is one input, so that the 32 inputs which share a scale lie along
the sublanes, where a TPU spreads a number for nothing. Two codes of a byte are two neighbouring inputs, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import ContractError
from kimi_hal.ops.moe import MoESpec
from kimi_hal_tpu.pallas_claims import EXPERTS_FORMAT

#: Inputs that share a scale.
GROUP = 32
#: Widths of the model's latent are padded to whole tiles of this many numbers.
WIDTH = 256
#: The e8m0 code of 1, under which padding stands.
ONE = 127


@dataclass(frozen=True)
class Blocks:
    """How the experts of a Spec are cut along their intermediate width.

    Attributes:
        hidden: the latent's width in whole tiles.
        columns: intermediate columns of a block.
        count: blocks of an expert.
    """

    hidden: int
    columns: int
    count: int

    @classmethod
    def of(cls, spec: MoESpec) -> Blocks:
        """Return the blocks of a Spec: of 256 columns, or of 128 where that pads less."""
        wide = padded(spec.intermediate, 256)
        columns = 256 if wide == padded(spec.intermediate, 128) else 128
        return cls(padded(spec.hidden, WIDTH), columns, padded(spec.intermediate, columns) // columns)

    def shapes(self, experts: int) -> list[tuple[int, ...]]:
        """Return the shapes of the four tensors: gate and up of a block side by side, then down; each with scales."""
        both = 2 * self.columns
        return [
            (experts, self.count, self.hidden // 2, both),
            (experts, self.count, self.hidden // GROUP, both),
            (experts, self.count, self.columns // 2, self.hidden),
            (experts, self.count, self.columns // GROUP, self.hidden),
        ]


def padded(size: int, tile: int) -> int:
    """Return a size in whole tiles."""
    return -(-size // tile) * tile


def build(ctx: BuildContext) -> Callable[..., list[Tensor]]:
    """Return ``prepare_moe_weights`` for a Spec."""

    def prepare(
        w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, *, donate: bool = False
    ) -> list[Tensor]:
        ctx.check(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, donate=donate)
        return blocked(ctx.spec, w13, w13_scale, w2, w2_scale)

    return prepare


def weights(ctx: BuildContext, *, donate: bool = False, **checkpoint: Any) -> list[Tensor]:
    """Return the tensors that ``moe_experts`` takes; ``donate`` frees nothing here before the caller does."""
    return blocked(ctx.spec, **checkpoint)


def blocked(spec: MoESpec, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> list[Tensor]:
    """Return a checkpoint's experts in blocks, in memory of their own; padding is zeros under a scale of 1."""
    blocks = Blocks.of(spec)
    shapes = blocks.shapes(w13.shape[0])
    made = [w13.new_full(shape, fill) for shape, fill in zip(shapes, (0, ONE, 0, ONE), strict=True)]
    for expert in range(w13.shape[0]):
        for target, source in zip(made[:2], (w13, w13_scale), strict=True):
            _side_by_side(target[expert].unflatten(2, (2, blocks.columns)), source[expert])
        for target, source in zip(made[2:], (w2, w2_scale), strict=True):
            target[expert].view(-1, blocks.hidden)[: source.shape[2], : source.shape[1]] = source[expert].T
    return made


def _side_by_side(target: Tensor, source: Tensor) -> None:
    """Write gate rows and up rows ``[2 · In, inputs]`` into ``[block, inputs, 2, columns of a block]``."""
    for half, rows in enumerate(source.chunk(2)):
        for block, part in zip(target, rows.split(target.shape[3]), strict=True):
            block[: part.shape[1], half, : part.shape[0]] = part.T


def require(spec: MoESpec, found: Sequence[Any]) -> None:
    """Refuse a list that another implementation prepared, or that another Spec was given for.

    Raises:
        ContractError: the arrays are not those of ``Blocks.shapes``.
    """
    wanted = Blocks.of(spec).shapes(spec.num_local)
    given = [(tuple(array.shape), str(array.dtype).removeprefix("torch.")) for array in found]
    if given == [(shape, "uint8") for shape in wanted]:
        return
    listed = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in given) or "nothing"
    raise ContractError(
        "moe_experts",
        [
            "weights must be the list that prepare_moe_weights of this implementation returned for this Spec "
            f"({EXPERTS_FORMAT}: uint8 {', uint8 '.join(str(list(shape)) for shape in wanted)}), got {listed}"
        ],
    )
