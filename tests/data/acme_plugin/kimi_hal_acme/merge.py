"""Merging of attention states, one part after the other. Imported only when it is planned."""

from __future__ import annotations

import torch

ORDERS = {"forward": 1, "backward": -1}


def build(ctx):
    """Return the run function of ``merge_attn_states`` for one Spec."""
    want_lse, dtype, check = ctx.spec.return_lse, getattr(torch, ctx.spec.dtype), ctx.check
    step = ORDERS[ctx.settings.get("KIMI_HAL_ACME_ORDER", "forward")]

    def run(outs, lses, *, out=None, lse_out=None):
        check(outs=outs, lses=lses, out=out, lse_out=lse_out)
        clean = torch.where(lses.isfinite(), lses, -torch.inf)
        lse = torch.logsumexp(clean, dim=0)
        shift = torch.where(lse == -torch.inf, 0.0, lse)
        total = torch.zeros(outs.shape[1:], dtype=torch.float32)
        for part, weight in list(zip(outs, clean, strict=True))[::step]:
            share = torch.exp(weight - shift)[..., None]
            total += torch.where(weight[..., None] == -torch.inf, 0.0, share * part.float())
        lse = lse if want_lse else lse[:, :0]
        return place(total.to(dtype), out), place(lse, lse_out)

    return run


def place(value, buffer):
    """Return a result, in the caller's buffer if there is one."""
    return value if buffer is None else buffer.copy_(value)
