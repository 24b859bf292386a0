"""Small latent caches whose every other byte is poison, and the plain answer to attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.reference import sparse_mla as reference

FP8 = "latent.fp8.e4m3fn.tensor"
SCALE = 192**-0.5
#: A byte that decodes to NaN as an element or a scale, by format.
POISON = {FP8: 0x7F, "latent.fp8.e4m3fnuz.tensor": 0x80}


@dataclass
class Latents:
    """A cache in which only ``slots`` were ever written; poisoned bytes pad each page."""

    name: str = FP8
    pages: int = 4
    page: int = 16
    padding: int = 0
    k_scale: Tensor | None = None
    cache: Tensor = field(init=False)

    def __post_init__(self) -> None:
        fmt = formats.latent(self.name)
        if fmt.needs_scale and self.k_scale is None:
            self.k_scale = torch.tensor([0.5])
        row = self.page * fmt.row_bytes
        pool = torch.full((self.pages, row + self.padding), POISON.get(self.name, 0xFF), dtype=torch.uint8)
        self.cache = pool[:, :row]

    def store(self, slots: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """Write latents with the operator's reference and return what the cache now says they are."""
        spec = StoreLatentSpec(latent=self.name, page=self.page)
        reference.store_latent(spec, kv_c, k_pe, slots, self.cache, self.k_scale)
        return self.keys(slots)

    def fill(self, slots: Tensor, seed: int = 0) -> Tensor:
        """Write random latents and return the decoded keys ``[n, 576]`` in float64."""
        generator = torch.Generator().manual_seed(seed)
        return self.store(
            slots,
            torch.randn(len(slots), 512, generator=generator),
            torch.randn(len(slots), 64, generator=generator),
        )

    def keys(self, slots: Tensor) -> Tensor:
        """Return the decoded keys of live slots in float64."""
        fmt = formats.latent(self.name)
        return fmt.read(self.cache, self.page, slots, self.k_scale, dtype=torch.float64)

    def spec(self, num_heads: int, **fields: object) -> SparseMLASpec:
        """Return an attention Spec over this cache."""
        return SparseMLASpec(num_heads=num_heads, latent=self.name, page=self.page, **fields)

    def attend(
        self, q: Tensor, indices: Tensor, dtype: torch.dtype = torch.float32, /, **given: object
    ) -> tuple[Tensor, Tensor]:
        """Run the reference; keyword tensors are operands, anything else is a Spec field."""
        operands = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        fields = {name: value for name, value in given.items() if name not in operands}
        spec = self.spec(q.shape[1], **fields)
        return reference.sparse_mla(spec, q, self.cache, indices, self.k_scale, **operands, dtype=dtype)


def queries(rows: int, heads: int, seed: int = 1) -> Tensor:
    """Return bf16 queries with enough spread that a softmax has winners."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(rows, heads, 576, generator=generator)).bfloat16()


def plain(q: Tensor, keys: Tensor, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """Attend one row ``q [H, 576]`` to all of ``keys [n, 576]`` in float64, in the textbook's way."""
    logits = q.double() @ keys.double().T * scale
    return torch.softmax(logits, dim=-1) @ keys.double()[:, :512], torch.logsumexp(logits, dim=-1)


def int32(values: object) -> Tensor:
    """Return an int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32)


def flat_keys(values: list[float], score: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(q, kv_c, k_pe)`` with key i's latent all ``values[i]`` and every logit ``score`` at scale 1.

    The query looks only at the shared part, so the values don't move the scores.
    """
    q = torch.zeros(1, 1, 576)
    q[..., 512] = 1.0
    kv_c = torch.tensor(values)[:, None].expand(-1, 512).clone()
    k_pe = torch.zeros(len(values), 64)
    k_pe[:, 0] = score
    return q.bfloat16(), kv_c, k_pe
