"""The code of Blackwell's ``indexer_logits``: what PTX asks of the matrix unit, and what the assembler makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

from kimi_hal.dispatch.contract import Compiled, Instruction, Kernel, Target
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.triton import compiling, instructions
from kimi_hal.triton.indexer_kernels import STRIDES, TYPES
from kimi_hal_nvidia import tensor_memory, tensor_memory_scores
from kimi_hal_nvidia.compiling import dumped, opcodes

FP8, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
#: Rows of a request together, of 32 heads: one of decode, and as many as a program takes of a prefill.
CUTS = {"f8f6f4-row": (FP8, 1), "f8f6f4": (FP8, 4), "mxf4-row": (MXFP4, 1), "mxf4": (MXFP4, 4)}

FP8_PRODUCTS = (
    Instruction(r"tcgen05\.mma\..*kind::f8f6f4", "FP8 keys and queries are multiplied as they stand"),
    Instruction(r"UTCQMMA", "the assembler makes FP8 products of them"),
)
MXFP4_PRODUCTS = (
    Instruction(
        r"tcgen05\.mma\..*kind::mxf4\.block_scale", "MXFP4 is multiplied by the unit with its scales"
    ),
    Instruction(r"UTCOMMA", "the assembler makes block-scaled products of four-bit numbers of them"),
    Instruction(r"tcgen05\.st\.", "scales stand in tensor memory"),
)
COMMON = (
    Instruction(r"tcgen05\.ld\.", "sums are read back from tensor memory"),
    Instruction(r"LDTM", "sums are read back from tensor memory"),
    instructions.ASYNCHRONOUS,
)
FORBIDDEN = (
    Instruction(r"mma\.sync|HMMA|QMMA", "no product is a warp's own"),
    Instruction(r"cvt\..*(e4m3|e2m1)|F2FP.*E4M3", "no number is decoded"),
)


def indexer_logits(target: Target) -> tuple[Kernel, ...]:
    """Return the scores of both elements, for one row a program and for several."""
    return tuple(_described(name, layout, rows, target) for name, (layout, rows) in CUTS.items())


def _described(name: str, layout: str, rows: int, target: Target) -> Kernel:
    products = MXFP4_PRODUCTS if layout == MXFP4 else FP8_PRODUCTS
    launch = launched(IndexerSpec(index=layout), rows)
    return Kernel(name, lambda: compiled(launch, target), (*products, *COMMON), FORBIDDEN)


def launched(spec: IndexerSpec, rows: int) -> compiling.Launch:
    """Return the launch of a Spec for ``rows`` rows a program."""
    options = dict(tensor_memory.OPTIONS)
    warps = options.pop("num_warps")
    constants = tensor_memory.constants(spec, rows)
    return compiling.Launch(tensor_memory_scores.scores, TYPES, constants, STRIDES, warps, options)


def compiled(launch: compiling.Launch, target: Target) -> Compiled:
    """Compile a launch and read both its PTX and the machine code that came of it.

    Raises:
        ToolMissingError: Triton's assembler or ``cuobjdump`` is not there.
    """
    read = compiling.compiled(launch, target)
    kept = triton.compile(  # out of Triton's cache
        compiling.source(launch),
        target=compiling.gpu_target(target.named),
        options={"num_warps": launch.warps, **launch.options},
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kept.asm["cubin"])
        machine = opcodes(dumped(path, "-sass"))
    return dataclasses.replace(read, instructions=tuple(sorted({*read.instructions, *machine})))
