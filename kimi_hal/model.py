"""The numbers of Kimi K3.1 Pro, in one place. Sources: ``docs/operators.md``.

K3.1's own configuration file was not public when this was written: the indexer's numbers come from the
public announcements of day-0 support, the others from K3's public configuration, which K3.1 keeps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of a hybrid model of KDA layers, sparse-attention layers and latent MoE.

    All widths are counts of elements, ``max_context`` is in tokens. Per-rank sizes follow by ``heads``.
    """

    name: str
    hidden: int
    layers: int
    full_attention_layers: tuple[int, ...]  # 0-based
    max_context: int
    vocabulary: int
    mla_heads: int
    kv_rank: int
    pe_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    topk: int
    kda_heads: int
    kda_dim: int
    conv_width: int
    gate_lower_bound: float
    experts: int
    experts_per_token: int
    shared_experts: int
    moe_hidden: int
    moe_intermediate: int
    situ_beta: float
    situ_linear_beta: float
    norm_eps: float
    residual_block: int

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Return the 0-based layers that are not full attention."""
        return tuple(i for i in range(self.layers) if i not in self.full_attention_layers)

    @property
    def softmax_scale(self) -> float:
        """Return (nope + pe)^-½, the scale of the attention logits."""
        return float((self.nope_dim + self.pe_dim) ** -0.5)

    def heads(self, tp: int) -> int:
        """Return the MLA and KDA heads of one of ``tp`` tensor-parallel ranks.

        Raises:
            ValueError: ``tp`` does not divide the heads; names the sizes that do.
        """
        return self._share(self.mla_heads, tp, "heads")

    def intermediate(self, tp: int) -> int:
        """Return the expert width of one of ``tp`` tensor-parallel ranks."""
        return self._share(self.moe_intermediate, tp, "expert columns")

    def _share(self, total: int, tp: int, what: str) -> int:
        if tp < 1 or total % tp:
            legal = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
            raise ValueError(f"tp={tp} does not divide {total} {what}; possible: {legal}")
        return total // tp


K3_1_PRO = Model(
    name="Kimi K3.1 Pro",
    hidden=7168,
    layers=93,
    full_attention_layers=(*range(3, 92, 4), 92),
    max_context=1 << 20,
    vocabulary=163840,
    mla_heads=96,
    kv_rank=512,
    pe_dim=64,
    nope_dim=128,
    value_dim=128,
    index_heads=32,
    index_dim=128,
    topk=2048,
    kda_heads=96,
    kda_dim=128,
    conv_width=4,
    gate_lower_bound=-5.0,
    experts=896,
    experts_per_token=16,
    shared_experts=2,
    moe_hidden=3584,
    moe_intermediate=3072,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    norm_eps=1e-5,
    residual_block=12,
)
