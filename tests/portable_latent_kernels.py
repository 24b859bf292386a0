"""The kernels of the sparse_mla family as they are launched for the model's own sizes."""

from __future__ import annotations

from typing import Any

from compiled import Kernel

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.triton import attention, latent_plan, latent_quantisation, sparse_mla

#: PPU architectures compile from these of CUDA.
ARCHITECTURES = {"80": "ppu_10", "89": "ppu_15", "90": "sm_90", "100": "sm_100"}
POINTERS = {
    "q": "*bf16",
    "cache": "*u8",
    "indices": "*i32",
    "k_scale": "*fp32",
    "q_scale": "*fp32",
    "index_len": "*i32",
    "block_table": "*i32",
    "row_req": "*i32",
    "out": "*bf16",
    "lse_out": "*fp32",
    "softmax_scale": "fp32",
}
ROWS = ("q_row", "q_head", "page_stride", "index_row", "out_row", "out_head", "width")
FP8, FNUZ = "latent.fp8.e4m3fn.tensor", "latent.fp8.e4m3fnuz.tensor"
NVFP4, RECORD, WIDE = "latent.nvfp4.352", "latent.flashmla.656", "latent.bf16"


def attend(arch: str, rows: int, terms: int = 2, **fields: Any) -> Kernel:
    """Return attention as a plan for ``rows`` rows launches it."""
    spec = SparseMLASpec(**fields)
    cut = latent_plan.cut(spec, Limits(max_rows=rows, max_reqs=rows), ARCHITECTURES.get(arch, arch))
    constants = sparse_mla._constants(spec, cut) | {"TERMS": terms, "LSE": True}
    warps = constants.pop("num_warps")
    absent = {
        "k_scale": not formats.latent(spec.latent).needs_scale,
        "q_scale": spec.q_dtype == "bfloat16",
        "index_len": not spec.has_index_len,
        "block_table": spec.index_space == "slot",
        "row_req": spec.index_space == "slot",
    }
    constants |= {name: None for name, missing in absent.items() if missing}
    types = POINTERS | ({"q": "*u8"} if spec.q_dtype != "bfloat16" else {})
    types |= {"out": "*fp32"} if cut.splits > 1 or spec.out_dtype == "float32" else {}
    return Kernel(attention.attend, types, constants, ROWS, warps)


def store(name: str) -> Kernel:
    """Return the store of a format."""
    fmt = formats.latent(name)
    types = {"kv_c": "*bf16", "k_pe": "*bf16", "slots": "*i64", "cache": "*u8", "k_scale": "*fp32"}
    constants = {"FORMAT": latent_plan.FORMATS[name].kind, "ROW_BYTES": fmt.row_bytes, "PAGE": 64}
    if not fmt.needs_scale:
        constants["k_scale"] = None
    return Kernel(latent_quantisation.store, types, constants, ("kv_row", "pe_row", "page_stride"))


def kernels(backend: str, arch: str) -> dict[str, Kernel]:
    """Return every kernel, each format among them."""
    spread = {"index_space": "position", "dcp": DCP(world=8, rank=3, interleave=1), "has_index_len": True}
    parts = {"parts": "*fp32", "lses": "*fp32", "out": "*bf16", "lse_out": "*fp32"}
    together = {"D": 512, "BLOCK": 128, "SPLITS": 32, "LSE": True}
    return {
        "decode": attend(arch, 1, num_heads=12, latent=FP8),
        "nvfp4": attend(arch, 64, num_heads=12, latent=NVFP4),
        "sharded": attend(arch, 64, terms=1, num_heads=96, latent=FNUZ, **spread),
        "record": attend(
            arch, 4096, 3, num_heads=12, latent=RECORD, q_dtype="float8_e4m3fn", out_dtype="float32"
        ),
        "bf16": attend(arch, 4096, num_heads=12, latent=WIDE),
        "combine": Kernel(attention.combine, parts, together, ("out_row", "out_head")),
        **{f"store {name}": store(name) for name in latent_plan.FORMATS},
    }
