"""Requests of which a few tokens are new, over ranks that hold all tokens or their own share of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from composite_cases import DSACase
from torch import Tensor

from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel.groups import Group

LIMITS = Limits(max_rows=512, max_reqs=64, max_context=4096, rows_per_req=512, uniform=False)


@dataclass
class PrefillCase:
    """``requests`` is (cached tokens, new tokens) each; ``padding`` more rows stand behind them."""

    requests: tuple[tuple[int, int], ...] = ((0, 50), (100, 7), (0, 1), (37, 33))
    padding: int = 2
    heads: int = 8
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [(i, old + j + 1) for i, (old, new) in enumerate(self.requests) for j in range(new)]
        self.contexts = [old + new for old, new in self.requests]
        self.lengths = [new for _, new in self.requests]
        rows += [(7, 0)] * self.padding
        self.dsa = DSACase(lengths=tuple(self.contexts), rows=tuple(rows), heads=self.heads, **self.fields)

    def plan(self, spec: DSASpec | None = None, limits: Limits = LIMITS) -> Plan:
        """Plan what each rank computes: one rank's whole layer."""
        return plan("dsa_decode", spec or self.dsa.spec(), limits, device="cpu")

    def plan_attention(self, heads: int) -> Plan:
        """Plan attention of some heads over all tokens."""
        spec = dataclasses.replace(self.dsa.spec().attn, num_heads=heads)
        return plan("sparse_mla", spec, LIMITS, device="cpu")

    def expected(self, **more: Any) -> tuple[Tensor, Tensor]:
        """Return out and lse of one rank with all heads."""
        result: tuple[Tensor, Tensor] = self.plan(**more).run(**self.dsa.operands())
        return result

    def heads_of(self, group: Group) -> Tensor:
        """Return the query of a rank's heads, all rows."""
        per = self.heads // group.size()
        return self.dsa.q[:, group.rank() * per : (group.rank() + 1) * per]

    def operands(self, dcp: DCP = DCP()) -> dict[str, Any]:
        """Return what a rank has besides its query."""
        names = (
            "latent_cache",
            "index_cache",
            "latent_table",
            "index_table",
            "row_req",
            "row_len",
            "k_scale",
        )
        given = self.dsa.operands(dcp)
        return {name: given[name] for name in names}


def joined(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put the ranks' heads side by side."""
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)
