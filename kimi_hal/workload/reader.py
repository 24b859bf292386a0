"""The workload as an engine would hold it: operands for each operator family, widened on demand.

Every accessor is deterministic to the last bit on any machine: stored integers, exact sums, one gather, one
or two float64 multiplications, one rounding to the result's type.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_hal.errors import FormatError
from kimi_hal.model import K3_1_PRO
from kimi_hal.workload import attention, codes, file, kda, maps, noise
from kimi_hal.workload.attention import HIDDEN_BITS, JOINED, VALUE_BITS, WIDTH, Projection
from kimi_hal.workload.kda import KDAInputs
from kimi_hal.workload.paths import BUILD
from kimi_hal.workload.rows import Heads, Rows, chosen, positions
from kimi_hal.workload.text import Text

BF16 = torch.bfloat16
LATENT = K3_1_PRO.kv_rank + K3_1_PRO.pe_dim
#: Rows whose 96 absorbed queries are mixed at a time.
QUERY_ROWS = 128

#: What every accessor together reads: tensors, and notes in the metadata.
TENSORS = (
    "hidden.codes",
    "hidden.scale",
    "text.zlib",
    "token.start",
    "token.length",
    "token.ids",
    *(f"{name}.{part}" for name in ("query", "key", "value") for part in ("weight", "bias")),
    "kda.A_log",
    "kda.dt_bias",
    "router.codes",
    "router.gain",
    "router.bias",
)
NOTES = ("seed", "files", "heads")


class Router(NamedTuple):
    """The router's parameters: ``gate [896, 7168]`` in the dtype asked for, ``bias [896]`` float32."""

    gate: Tensor
    bias: Tensor


def read(path: Path) -> Workload:
    """Read a workload file; errors as in ``kimi_hal.workload.load``."""
    tensors, metadata = file.decode(path)
    missing = [name for name in TENSORS if name not in tensors] + [n for n in NOTES if n not in metadata]
    if missing or not metadata["seed"].isdecimal():
        reason = f"it lacks {', '.join(missing)}" if missing else f"its seed is {metadata['seed']!r}"
        raise FormatError(f"{path} is no whole workload file, {reason}; build it again with: {BUILD}")
    return Workload(tensors, metadata)


class Workload:
    """Activations over ``context`` tokens of real text. Not Kimi K3.1's output: see ``provenance``.

    Rows are positions in the text, 0 to ``context − 1``: an integer, a slice, a range, a sequence or an int64
    tensor. Heads are a count (the first so many) or the heads themselves, as a tensor-parallel rank holds
    them. Results are on the CPU, bfloat16 unless another ``dtype`` is named.
    """

    def __init__(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self._tensors = tensors
        self.provenance = dict(metadata)
        self.seed = int(metadata["seed"])
        self.sha256 = metadata.get("sha256", "")
        self.context = len(tensors["hidden.codes"])

    def __repr__(self) -> str:
        return f"Workload({self.context} tokens, seed {self.seed}, sha256 {self.sha256[:12]})"

    # ---- text -------------------------------------------------------------------------------------------

    @cached_property
    def source(self) -> Text:
        """Return the text and the place of each token in it."""
        content = zlib.decompress(bytes(self._tensors["text.zlib"].tolist())).decode()
        files = tuple((str(name), int(start)) for name, start in json.loads(self.provenance["files"]))
        return Text(content, self._tensors["token.start"], self._tensors["token.length"], files)

    @property
    def token_ids(self) -> Tensor:
        """Return the encoder's vocabulary ids, ``[context]`` int64."""
        return self._tensors["token.ids"].long()

    def text(self, position: int, around: int = 3) -> str:
        """Return the text from ``around`` tokens before a position to as many after it; 0 gives the token."""
        return self.source.around(self._position(position), around)

    def place(self, position: int) -> str:
        """Return where a token stands, as ``heapq.py:17``."""
        return self.source.place(self._position(position))

    # ---- sparse attention -------------------------------------------------------------------------------

    def index_keys(self, rows: Rows = slice(None), *, dtype: torch.dtype = BF16) -> Tensor:
        """Return index keys ``[S, 128]``: the keys of four of the encoder's heads, joined."""
        keys = self._joined("key")(self._hidden(rows))
        return (keys * 2.0**-VALUE_BITS).to(dtype)

    def index_query(self, rows: Rows, *, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        """Return ``index_q [T, 32, 128]`` and head weights ``[T, 32]``.

        Head n is the joined query with its four parts weighted 0, 1 or 2, another pattern for each n: its
        scores are a sum of real attention logits. A weight is 1 plus a quarter of one hidden channel, so most
        are positive and a few are not.
        """
        hidden = self._hidden(rows)
        query = self._joined("query")(hidden).view(-1, 1, JOINED, attention.HEAD_DIM)
        wide = (query * self._patterns[:, :, None]).flatten(2)
        channels = noise.permutation(self.seed, "index.weights", WIDTH)[: K3_1_PRO.index_heads]
        weights = 1 + hidden[:, channels] * 2.0 ** -(HIDDEN_BITS + 2)
        return (wide * 2.0**-VALUE_BITS).to(dtype), weights.to(dtype)

    def latents(
        self, start: int = 0, stop: int | None = None, *, dtype: torch.dtype = BF16
    ) -> tuple[Tensor, Tensor]:
        """Return ``kv_c [S, 512]`` and ``k_pe [S, 64]`` of positions ``start`` to ``stop``: hidden states."""
        wide = self._widened("latent", slice(start, stop), LATENT, dtype)
        return wide[:, : K3_1_PRO.kv_rank].contiguous(), wide[:, K3_1_PRO.kv_rank :].contiguous()

    def mla_query(
        self, rows: Rows, heads: Heads = K3_1_PRO.mla_heads, *, dtype: torch.dtype = BF16
    ) -> Tensor:
        """Return absorbed queries ``q [T, H, 576]``.

        With softmax scale 192^-½ over ``latents``, head i < 12 has the attention logits of the encoder's head
        i, up to a constant of the row; heads 12 to 95 are normalised sums and differences of two of them.
        """
        query = self._projection("query")(self._hidden(rows))
        own = chosen(heads, K3_1_PRO.mla_heads)
        starts = range(0, max(len(query), 1), QUERY_ROWS)
        return torch.cat([self._absorbed(query[at : at + QUERY_ROWS], own, dtype) for at in starts])

    def _absorbed(self, query: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        first, second, share, other = attention.pairs(heads)
        asked = self._projection("key").absorb(query)
        mixed = asked[:, first] * share[:, None] + asked[:, second] * other[:, None]
        latent = self._map("latent", LATENT)
        # The encoder divides by √32, the operator multiplies by 192^-½, the latents carry the map's gain.
        scale = (attention.HEAD_DIM * K3_1_PRO.softmax_scale**2) ** -0.5 / latent.gain
        return latent.expand(mixed, scale, dtype)

    # ---- KDA --------------------------------------------------------------------------------------------

    def kda_inputs(
        self, rows: Rows, heads: Heads = K3_1_PRO.kda_heads, *, dtype: torch.dtype = BF16
    ) -> KDAInputs:
        """Return the KDA operators' operands.

        q, k and v are the encoder's, heads joined; gates are hidden states, widened. The decay's, the
        convolution's and the norm's parameters have no counterpart in the encoder: they are drawn from the
        seed.
        """
        hidden, own = self._hidden(rows), chosen(heads, K3_1_PRO.kda_heads)
        query, key, value = (self._projection(name)(hidden) for name in ("query", "key", "value"))
        return KDAInputs(
            x=kda.mix(self.seed, (query, key, value), own, dtype),
            raw_g=kda.gate(self.seed, "g", hidden, own, dtype),
            raw_beta=kda.beta(self.seed, hidden, own, dtype),
            out_gate=kda.gate(self.seed, "out_gate", hidden, own, dtype),
            conv_weight=kda.convolution(self.seed, own, dtype),
            A_log=self._tensors["kda.A_log"][own],
            dt_bias=self._tensors["kda.dt_bias"][kda.channels(own)],
            norm_weight=kda.norm_weight(self.seed),
        )

    # ---- mixture of experts -----------------------------------------------------------------------------

    def hidden(self, rows: Rows, width: int = K3_1_PRO.hidden, *, dtype: torch.dtype = BF16) -> Tensor:
        """Return hidden states widened to ``[T, width]``, with the root mean square of an element kept.

        7168 is what the router reads, 3584 what the experts read; the two belong together by ``projection``.
        """
        return self._widened("hidden", rows, width, dtype)

    def projection(self, wide: int, narrow: int, *, dtype: torch.dtype = BF16) -> Tensor:
        """Return ``P [wide, narrow]`` with ``hidden(rows, narrow) @ Pᵀ = hidden(rows, wide)``.

        ``projection(3584, 7168)`` is the latent down-projection, ``projection(7168, 3584)`` the way back.
        """
        out, inner = self._map("hidden", wide), self._map("hidden", narrow)
        return out.expand(inner.matrix(), out.gain / inner.gain, dtype).T.contiguous()

    def router(self, *, dtype: torch.dtype = BF16) -> Router:
        """Return the gate ``[896, 7168]``, whose rows are directions of real hidden states, and its bias.

        The bias evens out the load, as the correction bias of auxiliary-loss-free balancing does.
        """
        wide = self._map("hidden", K3_1_PRO.hidden)
        narrow = self._tensors["router.codes"].double() * self._tensors["router.gain"].double()[:, None]
        return Router(wide.expand(narrow, 1 / wide.gain, dtype), self._tensors["router.bias"])

    def router_logits(self, rows: Rows) -> Tensor:
        """Return ``hidden(rows) @ gateᵀ`` without the roundings of either, ``[T, 896]`` float32."""
        exact = self._hidden(rows) @ self._tensors["router.codes"].double().T
        return (exact * 2.0**-HIDDEN_BITS * self._tensors["router.gain"].double()).float()

    # ---- checks -----------------------------------------------------------------------------------------

    def expansion_sha256(self) -> str:
        """Return the hash of a sample of every accessor's result, taken at both ends of the text."""
        rows = sorted({*range(min(4, self.context)), *range(max(self.context - 4, 0), self.context)})
        gate, bias = self.router()
        digest = hashlib.sha256()
        for tensor in (
            self.index_keys(rows),
            *self.index_query(rows),
            *self.latents(0, 4),
            self.mla_query(rows),
            *vars(self.kda_inputs(rows[:2], range(0, K3_1_PRO.kda_heads, 7))).values(),
            self.hidden(rows),
            self.hidden(rows, K3_1_PRO.moe_hidden),
            gate[::64],
            bias,
            self.router_logits(rows),
        ):
            digest.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
        return digest.hexdigest()

    def verify(self) -> None:
        """Check that this machine widens the stored tensors to the bits that the builder's machine did.

        Raises:
            FormatError: it does not; figures from the two machines are then not of the same input.
        """
        found, written = self.expansion_sha256(), self.provenance.get("expansion_sha256", "")
        if found != written:
            raise FormatError(
                f"this machine widens the workload to other bits: sha256 {found[:12]} with torch "
                f"{torch.__version__}, written {written[:12]} with torch {self.provenance.get('torch')}; "
                "figures from the two machines are not of the same input"
            )

    # ---- what is stored ---------------------------------------------------------------------------------

    def _hidden(self, rows: Rows) -> Tensor:
        """Return hidden states of the rows as float64 integers in units of 2⁻¹⁶, ``[T, 384]``."""
        packed = self._tensors["hidden.codes"][positions(rows, self.context)]
        return codes.unpack(packed).double() * self._tensors["hidden.scale"]

    def _projection(self, name: str) -> Projection:
        return Projection(self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _joined(self, name: str) -> Projection:
        return self._projection(name).joined(json.loads(self.provenance["heads"]))

    def _widened(self, name: str, rows: Rows, width: int, dtype: torch.dtype) -> Tensor:
        wide = self._map(name, width)
        return wide.expand(self._hidden(rows), wide.gain * 2.0**-HIDDEN_BITS, dtype)

    def _map(self, name: str, width: int) -> maps.Isometry:
        return maps.isometry(self.seed, name, WIDTH, width)

    @cached_property
    def _patterns(self) -> Tensor:
        """Return ``[32, 4]`` distinct patterns of 0, 1 and 2, none of them all zero."""
        order = noise.permutation(self.seed, "index.patterns", 3**JOINED - 1)[: K3_1_PRO.index_heads]
        return ((order[:, None] + 1) // 3 ** torch.arange(JOINED) % 3).double()

    def _position(self, position: int) -> int:
        return int(positions(position, self.context))
