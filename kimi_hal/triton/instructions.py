"""What the portable kernels' code must hold, by target: patterns of opcodes, each with its reason."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Instruction, Target

#: Targets -> how their matrix units' instructions begin, with float16 or bfloat16 operands and float32 sums.
MATRIX = {
    "sm_80": r"mma\.sync.*f32\.{type}\.{type}\.f32",
    "sm_89": r"mma\.sync.*f32\.{type}\.{type}\.f32",
    "sm_90a": r"wgmma\.mma_async.*\.f32\.{type}\.{type}",
    "sm_100a": r"tcgen05\.mma.*kind::f16",
    "sm_103a": r"tcgen05\.mma.*kind::f16",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_{type}",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_{type}",
}
#: Targets that convert an FP8 type by instruction.
CONVERTS = {"e4m3fn": ("sm_89", "sm_90a", "sm_100a", "sm_103a", "gfx950"), "e4m3fnuz": ("gfx942",)}
CONVERSION = r"cvt\.rn\.f16x2\.e4m3x2|v_cvt_(scalef32_)?pk_(f32|f16)_fp8"
ANY_CONVERSION = r"cvt\..*e4m3|v_cvt_.*fp8"

NO_FP8_PRODUCTS = Instruction(
    r".*(e4m3\.e4m3|kind::f8|mfma.*fp8|mfma.*f8f6f4)",
    "FP8 products are not added in float32 on every chip, and scores are float32 sums",
)
NO_APPROXIMATE_DIVISION = Instruction(
    r"div\.(full|approx)", "an approximate quotient gives other bytes than the format's rule"
)
NO_FP8_TYPE = Instruction(
    rf"{ANY_CONVERSION}|.*\.e4m3\.", "latents are decoded by integer arithmetic, as a chip without FP8 has it"
)
ASYNCHRONOUS = Instruction(
    r"cp\.async\.c[ag]\.shared\.global", "tiles of keys arrive while others are multiplied"
)
NOT_ASYNCHRONOUS = Instruction(ASYNCHRONOUS.pattern, "this target has the plain cut: no loads in flight")


def cuda(target: Target) -> bool:
    """Tell whether the code is PTX."""
    return target.named.startswith("sm_")


def matrix(target: Target, dtype: str) -> Instruction:
    """Return the products of ``"f16"`` or ``"bf16"`` numbers by the matrix unit, added in float32."""
    pattern = MATRIX[target.named].replace("{type}", dtype)
    return Instruction(pattern, f"{dtype} is multiplied by the matrix unit and added in float32")


def conversion(target: Target, element: str) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Return what is expected of a kernel that reads an FP8 type, and what is forbidden."""
    if target.named in CONVERTS[element]:
        return (Instruction(CONVERSION, f"{element} is converted by instruction"),), ()
    return (), (Instruction(CONVERSION, f"this target does not convert {element}: its bits are shifted"),)


def wide_loads(target: Target, *, asynchronous: bool = False) -> Instruction:
    """Return loads of sixteen bytes a thread; asynchronous ones too, where a loop may load ahead."""
    ptx = r"ld\.global(\.\w+)*\.v4\.b32" + (r"|cp\.async\.c[ag]\.shared\.global" if asynchronous else "")
    return Instruction(
        ptx if cuda(target) else r"(global|buffer)_load_dwordx4",
        "rows are read sixteen bytes a thread at a time",
    )


def exact_division(target: Target) -> Instruction:
    """Return the correctly rounded quotient of float32 numbers."""
    pattern = r"div\.rn\.f32" if cuda(target) else r"v_div_fixup_f32"
    return Instruction(pattern, "scales are correctly rounded quotients")


def exponential(target: Target) -> Instruction:
    """Return the exponential of float32 numbers."""
    pattern = r"ex2\.approx(\.ftz)?\.f32" if cuda(target) else r"v_exp_f32"
    return Instruction(pattern, "decay and weights are exponentials by instruction")
