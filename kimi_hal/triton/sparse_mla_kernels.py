"""The code of the portable latent kernels, as they are launched for the model's own sizes, and what it must hold."""

from __future__ import annotations

from typing import Any

from kimi_hal import formats
from kimi_hal.dispatch.contract import Kernel, Target
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.triton import attention, instructions, latent_plan, latent_quantisation
from kimi_hal.triton import sparse_mla as builders
from kimi_hal.triton.compiling import Launch, described

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
STRIDES = ("q_row", "q_head", "page_stride", "index_row", "out_row", "out_head")
FP8, FNUZ = "latent.fp8.e4m3fn.tensor", "latent.fp8.e4m3fnuz.tensor"
NVFP4, RECORD, BF16 = "latent.nvfp4.352", "latent.flashmla.656", "latent.bf16"
#: Bytes a thread that an assembler keeps in memory at most, over all targets (Triton 3.9), and some room.
SPILLED = {"nvfp4": 192, "record": 384, "bf16": 160, "sharded": 384}
#: Formats whose scale is a quotient.
DIVIDED = (FP8, NVFP4, RECORD)


def store_latent(target: Target) -> tuple[Kernel, ...]:
    """Return the store of every format."""
    return tuple(
        described(
            name.removeprefix("latent."),
            _store(name),
            target,
            expected=[instructions.exact_division(target)] if name in DIVIDED else [],
            forbidden=[instructions.NO_APPROXIMATE_DIVISION, instructions.NO_FP8_TYPE],
        )
        for name in latent_plan.FORMATS
    )


def sparse_mla(target: Target) -> tuple[Kernel, ...]:
    """Return attention over latents, with FP8 queries too, and the sum of its parts."""
    queries: dict[str, Any] = {"q_dtype": "float8_e4m3fn", "out_dtype": "float32"}
    types = {"parts": "*fp32", "lses": "*fp32", "out": "*bf16", "lse_out": "*fp32"}
    together = Launch(
        attention.combine,
        types,
        {"D": 512, "BLOCK": 128, "SPLITS": 32, "LSE": True},
        ("out_row", "out_head"),
    )
    return (
        _attended("decode", target, 1, ahead=False, num_heads=12, latent=FP8),
        _attended("nvfp4", target, 64, num_heads=12, latent=NVFP4),
        _attended("record", target, 4096, terms=3, num_heads=12, latent=RECORD, **queries),
        _attended("bf16", target, 4096, num_heads=12, latent=BF16),
        described("combine", together, target),
    )


def sparse_mla_p16(target: Target) -> tuple[Kernel, ...]:
    """Return attention with rounded probabilities, on a rank of eight."""
    spread: dict[str, Any] = {
        "index_space": "position",
        "dcp": DCP(world=8, rank=3, interleave=1),
        "has_index_len": True,
    }
    return (_attended("sharded", target, 64, terms=1, num_heads=96, latent=FNUZ, **spread),)


def merge_attn_states(target: Target) -> tuple[Kernel, ...]:
    """Return the merge of eight ranks' parts."""
    types = {"outs": "*bf16", "lses": "*fp32", "out": "*bf16", "lse_out": "*fp32"}
    constants = {"PARTS": 8, "D": 512, "BLOCK": 512, "RETURN_LSE": True}
    launch = Launch(builders._merge, types, constants)
    return (described("parts8", launch, target, expected=[instructions.exponential(target)]),)


def _attended(
    name: str, target: Target, rows: int, *, terms: int = 2, ahead: bool = True, **fields: Any
) -> Kernel:
    """Describe attention as a plan for ``rows`` rows launches it; ``ahead``: its loop loads ahead where it is tuned."""
    expected = [
        instructions.matrix(target, "bf16"),
        instructions.wide_loads(target, asynchronous=True),
    ]
    forbidden = [instructions.NO_FP8_TYPE]
    if ahead and target.arch in latent_plan.MEASURED:
        expected.append(instructions.ASYNCHRONOUS)
    elif ahead:
        forbidden.append(instructions.NOT_ASYNCHRONOUS)
    launch = _attend(target.arch, rows, terms, **fields)
    return described(name, launch, target, expected, forbidden, SPILLED.get(name, 0))


def _attend(arch: str, rows: int, terms: int, **fields: Any) -> Launch:
    spec = SparseMLASpec(**fields)
    cut = latent_plan.cut(spec, Limits(max_rows=rows, max_reqs=rows), arch)
    constants = builders._constants(spec, cut) | {"TERMS": terms, "LSE": True}
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
    return Launch(attention.attend, types, constants, STRIDES, warps)


def _store(name: str) -> Launch:
    fmt = formats.latent(name)
    types = {"kv_c": "*bf16", "k_pe": "*bf16", "slots": "*i64", "cache": "*u8", "k_scale": "*fp32"}
    constants = {"FORMAT": latent_plan.FORMATS[name].kind, "ROW_BYTES": fmt.row_bytes, "PAGE": 64}
    if not fmt.needs_scale:
        constants["k_scale"] = None
    return Launch(latent_quantisation.store, types, constants, ("kv_row", "pe_row", "page_stride"))
