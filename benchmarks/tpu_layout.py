"""A decode step of K3.1's layers on 16 chips of TPU7x: what is exchanged, as laid out and as compiled. Nothing is run.

Needs the environment of ``nox -s tpu_jax``: ``.nox/tpu_jax/bin/python -m benchmarks tpu_layout``.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.record import keep

TOPOLOGY = "tpu7x:2x2x4"
#: Layers, and the merge by a ring of remote DMA, whose bytes HLO does not show.
PROGRAMS = {"kda": False, "dsa": False, "dsa, ring": True, "moe": False}


def main() -> None:
    """Compile every layer for the slice and keep what its program exchanges."""
    from kimi_hal_tpu.layout import Layout
    from kimi_hal_tpu.pallas import aot

    layout = Layout()
    mesh = aot.mesh(TOPOLOGY, **layout.sizes)
    figures: dict[str, Any] = {
        "topology": TOPOLOGY,
        "device": mesh.devices.flat[0].device_kind,
        "mesh": layout.sizes,
        "rows": layout.rows,
        "context": layout.context,
    }
    for name, ring in PROGRAMS.items():
        figures[name] = layer(layout, mesh, name.partition(",")[0], ring=ring)
        print(name, figures[name]["seconds"], "s")
    keep("tpu_layout", figures)


def layer(layout: Any, mesh: Any, name: str, *, ring: bool) -> dict[str, Any]:
    """Return what one layer's program holds and exchanges."""
    from kimi_hal_tpu import collectives, layers

    code = layers.compiled(name, layout, mesh, layers.kernels(ring=ring))
    said = layout.exchanges(name)
    found = collectives.found(code.text)
    held = sum(
        math.prod(operand.own(layout.sizes)) * operand.dtype.dtype.itemsize
        for operand in layout.operands(name).values()
    )
    return {
        "laid_out": [{"what": e.what} | figures_of(e.how) for e in said],
        "compiled": [figures_of(c) for c in found],
        "sent_bytes_laid_out": sum(e.how.sent for e in said),
        "sent_bytes_compiled": sum(c.sent for c in found),
        "held_bytes_a_device": held,
        "kernels": code.kernels,
        "on_sparse_core": code.on_sparse_core,
        "code_bytes": code.size,
        "temporary_hbm_bytes": code.temporary,
        "seconds": round(code.seconds, 1),
    }


def figures_of(one: Any) -> dict[str, Any]:
    """Return what is kept of a collective."""
    return {"op": one.op, "ranks": one.ranks, "operand_bytes": one.operand, "sent_bytes": one.sent}


if __name__ == "__main__":
    main()
