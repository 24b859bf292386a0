"""How K3.1's layers are laid out over a slice of TPUs: meshes, the layout of every operand, and what is exchanged.

A slice is ``groups`` times ``dcp`` devices. Heads and experts are divided over all of them (TP and EP), the caches
over the ``dcp`` devices of a group, each of which holds the positions that ``kimi_hal.parallel.ownership`` gives it;
every group holds the whole context. The index heads are not divided: the groups divide a step's rows instead, so that
no row is scored twice. Layouts are data: the programs that follow them are in ``layers.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kimi_hal.errors import SpecError
from kimi_hal.model import K3_1_PRO, Model
from kimi_hal_tpu import counts
from kimi_hal_tpu.collectives import Collective

#: The axis of the devices that share a context, that of the groups, and both: tensor and expert parallelism.
DCP, GROUP = "dcp", "group"
TP = (GROUP, DCP)
#: Width of the shared experts together, over all devices.
SHARED = 6144


@dataclass(frozen=True)
class Operand:
    """A whole operand, and its layout.

    Args:
        shape: over all devices.
        dtype: as jax has it.
        spec: which mesh axes divide which dimensions; what is not divided is the same on every device.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P

    def own(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one device's part on a mesh of these sizes."""
        parts = [math.prod(sizes[a] for a in _axes(entry)) for entry in self.spec]
        parts += [1] * (len(self.shape) - len(parts))
        return tuple(size // part for size, part in zip(self.shape, parts, strict=True))


@dataclass(frozen=True)
class Exchange:
    """One message of a layer, as each device sees it: what it carries, and how."""

    what: str
    how: Collective


@dataclass(frozen=True)
class Layout:
    """A slice, and the rows of a decode on it.

    Args:
        groups: that each hold the whole context.
        dcp: devices that share it; a group's heads are attended to by all of them.
        interleave: positions that one device owns in a row.
        rows: requests of one token each.
        context: positions that a request may have.
        page: positions of a page of either cache.
        model: whose sizes.
        shared: width of the shared experts together.

    Raises:
        SpecError: a size is no whole number of 1 or more, or something does not divide evenly; says what.
    """

    groups: int = 4
    dcp: int = 8
    interleave: int = 1
    rows: int = 64
    context: int = 65536
    page: int = 64
    model: Model = K3_1_PRO
    shared: int = SHARED

    def __post_init__(self) -> None:
        """Refuse what is no size, and what does not divide evenly."""
        self._check_sizes()
        m = self.model
        whole = {
            "mla_heads": (m.mla_heads, self.tp),
            "kda_heads": (m.kda_heads, self.tp),
            "experts": (m.experts, self.tp),
            "moe_hidden": (m.moe_hidden, self.tp),
            "the shared experts' width": (self.shared, self.tp),
            "rows": (self.rows, self.groups),
            "context": (self.context, self.dcp * math.lcm(self.page, self.interleave)),
        }
        uneven = [f"{name} {size} into {parts}" for name, (size, parts) in whole.items() if size % parts]
        if uneven:
            raise SpecError(
                f"a slice of {self.groups} groups of {self.dcp} devices does not divide evenly: {', '.join(uneven)}"
            )

    def _check_sizes(self) -> None:
        names = ("groups", "dcp", "interleave", "rows", "context", "page", "shared")
        if wrong := counts.not_counts({name: getattr(self, name) for name in names}):
            raise SpecError(f"sizes of a slice are whole numbers of 1 or more, got {', '.join(wrong)}")

    @property
    def tp(self) -> int:
        """Return all devices: heads and experts are divided over them."""
        return self.groups * self.dcp

    @property
    def sizes(self) -> dict[str, int]:
        """Return the mesh's axes, outermost first: neighbours of the innermost one are neighbours of the network."""
        return {GROUP: self.groups, DCP: self.dcp}

    @property
    def heads(self) -> int:
        """Return the attention heads of one device."""
        return self.model.mla_heads // self.tp

    @property
    def columns(self) -> int:
        """Return the pages that a device holds of a request."""
        return self.context // self.dcp // self.page

    @property
    def slots(self) -> int:
        """Return the slots of all caches of a group together."""
        return self.rows * self.context

    def operands(self, layer: str) -> dict[str, Operand]:
        """Return every operand of a layer: ``"kda"``, ``"dsa"`` or ``"moe"``."""
        return {"kda": self._kda, "dsa": self._dsa, "moe": self._moe}[layer]()

    def _kda(self) -> dict[str, Operand]:
        m, t, bf16 = self.model, self.rows, jnp.bfloat16
        heads, d, by_head = m.kda_heads, m.kda_dim, P(None, TP)
        return {
            "x": Operand((t, m.hidden), bf16, P()),
            "qkv": Operand((m.hidden, heads, 5, d), bf16, by_head),  # and the raw and the output gate
            "beta": Operand((m.hidden, heads), bf16, by_head),
            "conv": Operand((m.conv_width, heads, 3, d), bf16, by_head),
            "A_log": Operand((heads,), jnp.float32, P(TP)),
            "dt_bias": Operand((heads, d), jnp.float32, P(TP)),
            "norm": Operand((d,), jnp.float32, P()),
            "out": Operand((heads, d, m.hidden), bf16, P(TP)),
            "state_ids": Operand((t,), jnp.int32, P()),
            "conv_state": Operand((t, heads, m.conv_width - 1, 3, d), bf16, by_head),
            "state": Operand((t, heads, d, d), jnp.float32, by_head),
        }

    def _dsa(self) -> dict[str, Operand]:
        m, t, bf16, fp8 = self.model, self.rows, jnp.bfloat16, jnp.float8_e4m3fn
        heads, width = m.mla_heads, m.kv_rank + m.pe_dim
        return {
            "x": Operand((t, m.hidden), bf16, P()),
            "row_len": Operand((t,), jnp.int32, P()),
            "block_table": Operand(
                (t, self.columns), jnp.int32, P()
            ),  # a device's own pages have the same numbers
            "q": Operand((m.hidden, heads, width), bf16, P(None, TP)),
            "kv": Operand((m.hidden, width), bf16, P()),
            "index_q": Operand((m.hidden, m.index_heads, m.index_dim), bf16, P()),
            "index_k": Operand((m.hidden, m.index_dim), bf16, P()),
            "index_w": Operand((m.hidden, m.index_heads), bf16, P()),
            "value": Operand((heads, m.kv_rank, m.value_dim), bf16, P(TP)),
            "out": Operand((heads, m.value_dim, m.hidden), bf16, P(TP)),
            "latents": Operand((self.slots, width), fp8, P(DCP)),
            "index": Operand((self.slots, m.index_dim), fp8, P(DCP)),
            "index_scale": Operand((self.slots,), jnp.float32, P(DCP)),
        }

    def _moe(self) -> dict[str, Operand]:
        m, u8, bf16, by_expert = self.model, jnp.uint8, jnp.bfloat16, P(TP)
        e, h, i, s = m.experts, m.moe_hidden, m.moe_intermediate, self.shared
        return {
            "x": Operand((self.rows, m.hidden), bf16, P()),
            "gate": Operand((m.hidden, e), jnp.float32, P()),
            "bias": Operand((e,), jnp.float32, P()),
            "down": Operand((m.hidden, h), bf16, P(None, TP)),
            "w13": Operand((e, 2 * i, h // 2), u8, by_expert),
            "w13_scale": Operand((e, 2 * i, h // 32), u8, by_expert),
            "w2": Operand((e, h, i // 2), u8, by_expert),
            "w2_scale": Operand((e, h, i // 32), u8, by_expert),
            "norm": Operand((h,), jnp.float32, P(TP)),
            "up": Operand((h, m.hidden), bf16, P(TP)),
            "shared_w1": Operand((m.hidden, s), bf16, P(None, TP)),
            "shared_w3": Operand((m.hidden, s), bf16, P(None, TP)),
            "shared_w2": Operand((s, m.hidden), bf16, P(TP)),
        }

    def results(self, layer: str) -> dict[str, P]:
        """Return the layout of what a layer returns: ``y``, and the caches or states that it wrote."""
        written = {"kda": ("conv_state", "state"), "dsa": ("latents", "index", "index_scale"), "moe": ()}
        operands = self.operands(layer)
        return {"y": P()} | {name: operands[name].spec for name in written[layer]}

    def exchanges(self, layer: str) -> tuple[Exchange, ...]:
        """Return what a layer exchanges; an exchange with nobody is none."""
        found = {"kda": self._kda_exchanges, "dsa": self._dsa_exchanges, "moe": self._moe_exchanges}[layer]()
        return tuple(each for each in found if each.how.ranks > 1)

    def _kda_exchanges(self) -> tuple[Exchange, ...]:
        return (self._summed("partial sums of the output projection"),)

    def _dsa_exchanges(self) -> tuple[Exchange, ...]:
        m, t, ours = self.model, self.rows, self.rows // self.groups
        group_heads = self.heads * self.dcp
        return (
            Exchange("candidates of a group's rows", Collective("all-gather", self.dcp, 8 * ours * m.topk)),
            Exchange(
                "own winners of a group's rows", Collective("all-gather", self.groups, 4 * ours * m.topk)
            ),
            Exchange(
                "query heads", Collective("all-gather", self.dcp, 2 * t * self.heads * (m.kv_rank + m.pe_dim))
            ),
            Exchange("partial results", Collective("all-to-all", self.dcp, 2 * t * group_heads * m.kv_rank)),
            Exchange("their LSE", Collective("all-to-all", self.dcp, 4 * t * group_heads)),
            self._summed("partial sums of the output projection"),
        )

    def _moe_exchanges(self) -> tuple[Exchange, ...]:
        m, t = self.model, self.rows
        return (
            Exchange(
                "latents of the experts", Collective("all-gather", self.tp, 2 * t * m.moe_hidden // self.tp)
            ),
            Exchange("sums over experts", Collective("reduce-scatter", self.tp, 4 * t * m.moe_hidden)),
            Exchange("sums of squares", Collective("all-reduce", self.tp, 4 * t)),
            self._summed("partial sums of both projections"),
        )

    def _summed(self, what: str) -> Exchange:
        return Exchange(what, Collective("all-reduce", self.tp, 2 * self.rows * self.model.hidden))


def _axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
