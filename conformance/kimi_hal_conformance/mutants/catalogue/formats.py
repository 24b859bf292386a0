"""Mutants of the byte layouts: elements, scales, and where they stand."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

FLOATS = "formats/minifloat.py"
SCALES = "formats/scales.py"
INDEX = "formats/index_bytes.py"
LATENT = "formats/latent_bytes.py"
EXPERT = "formats/expert_bytes.py"
KEYS = ("store_index_keys",)
QUERY = ("quantize_index_query",)
LATENTS = ("store_latent",)

ELEMENTS = (
    Mutant(
        id="fnuz_read_as_fn",
        file=INDEX,
        old="values = minifloat.decode(elements, minifloat.ELEMENTS[fmt.element], dtype)",
        new="values = minifloat.decode(elements, minifloat.E4M3FN, dtype)",
        breaks="Keys of the fnuz dialect are read in the other one.",
        imitates="https://github.com/vllm-project/vllm/issues/45562",
        passes="deepgemm",
        operators=("indexer_logits",),
        areas=("formats",),
        fault=22,
    ),
    Mutant(
        id="fnuz_minus_zero_written",
        file=FLOATS,
        old=(
            "sign = (torch.signbit(x) & (kind.signed_zero | (code != 0))).to(torch.int32) << (kind.width - 1)"
        ),
        new="sign = torch.signbit(x).to(torch.int32) << (kind.width - 1)",
        breaks="A small negative value becomes byte 0x80, which is NaN in the fnuz dialect.",
        imitates="https://github.com/sgl-project/sglang/pull/28455",
        passes="deepgemm",
        operators=(*KEYS, *QUERY, *LATENTS),
        areas=("formats",),
        fault=22,
    ),
    Mutant(
        id="fnuz_scaled_for_fn",
        file=SCALES,
        old='"e4m3fnuz": 224.0',
        new='"e4m3fnuz": 448.0',
        breaks="Keys of the fnuz dialect are scaled for the other one's largest value and saturate.",
        imitates="https://github.com/sgl-project/sglang/pull/28455",
        passes="deepgemm",
        operators=(*KEYS, *QUERY),
        fault=22,
    ),
    Mutant(
        id="fp8_ties_away_from_zero",
        file=FLOATS,
        old="normal = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop",
        new="normal = (bits + (1 << (drop - 1))) >> drop",
        breaks="A value half way between two codes is rounded away from zero.",
        imitates="https://github.com/ROCm/aiter/pull/3992",
        passes="deepgemm",
        operators=(*KEYS, *QUERY, *LATENTS),
        areas=("formats",),
    ),
    Mutant(
        id="fp8_subnormals_flushed",
        file=FLOATS,
        old="code = torch.where(magnitude < 2.0 ** (1 - kind.bias), subnormal, normal)",
        new="code = torch.where(magnitude < 2.0 ** (1 - kind.bias), subnormal * 0, normal)",
        breaks="Values below the smallest normal one become 0.",
        imitates="https://github.com/1CatAI/1Cat-vLLM/pull/222",
        passes="deepgemm",
        operators=(*KEYS, *QUERY, *LATENTS),
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="fp8_not_saturated",
        file=FLOATS,
        old="magnitude = x.abs().clamp(max=kind.largest)",
        new=(
            "magnitude = x.abs().where(x.abs() <= kind.largest, torch.nan if kind.width == 8 else "
            "kind.largest)"
        ),
        breaks="A value beyond the largest one does not saturate.",
        imitates="https://github.com/sgl-project/sglang/pull/28455",
        passes="deepgemm",
        operators=LATENTS,
        areas=("formats",),
        fault=22,
    ),
    Mutant(
        id="nibbles_high_first",
        file=FLOATS,
        old="for value in (values[byte & 15], values[byte >> 4]))",
        new="for value in (values[byte >> 4], values[byte & 15]))",
        breaks="The even element of a byte is read from its high nibble.",
        imitates="https://github.com/kekzl/imp/pull/567",
        passes="flashinfer-bench",
        operators=("moe_experts", "indexer_logits"),
        areas=("formats",),
        fault=21,
    ),
    Mutant(
        id="e8m0_nan_is_inf",
        file=FLOATS,
        old="bits = torch.where(code == 255, 0x7FC00000, bits)",
        new="bits = torch.where(code == 255, 0x7F800000, bits)",
        breaks="Scale code 255 is +inf and not NaN.",
        imitates="https://github.com/NVIDIA/TransformerEngine/pull/3262",
        passes="cosine",
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="e8m0_zero_is_zero",
        file=FLOATS,
        old="bits = torch.where(code == 0, 0x00400000, code << 23)",
        new="bits = code << 23",
        breaks="Scale code 0 is 0 and not 2^-127.",
        imitates="https://github.com/NVIDIA/TransformerEngine/pull/3262",
        passes="cosine",
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="e8m0_128_is_nan",
        file=FLOATS,
        old="bits = torch.where(code == 255, 0x7FC00000, bits)",
        new="bits = torch.where((code == 255) | (code == 134), 0x7FC00000, bits)",
        breaks="The scale 128 is read as NaN.",
        imitates="https://github.com/sgl-project/sglang/pull/25519",
        passes="cosine",
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="e8m0_bias_128",
        file=FLOATS,
        old="bits = torch.where(code == 0, 0x00400000, code << 23)",
        new="bits = torch.where(code <= 1, 0x00400000, (code - 1) << 23)",
        breaks="The exponent's bias is 128.",
        imitates="https://github.com/vllm-project/vllm/pull/46676",
        passes="flashinfer-bench",
        operators=("moe_experts",),
        areas=("formats",),
        fault=20,
    ),
)

SCALE_RULES = (
    Mutant(
        id="scale_exponent_to_nearest",
        file=SCALES,
        old="exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)",
        new="exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) >= 0x400000)",
        breaks="A power-of-two scale is the nearest one and not the next larger: the largest elements saturate.",
        imitates="https://github.com/deepseek-ai/FlashMLA/pull/184",
        passes="cosine",
        operators=(*KEYS, *QUERY, *LATENTS),
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="scale_exponent_by_logarithm",
        file=SCALES,
        old="exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)",
        new="exponent = torch.ceil(torch.log2(x) - 1e-6).nan_to_num(neginf=-127.0).int()",
        breaks="The exponent comes from a logarithm with a safety margin: just above a power of two it is too small.",
        imitates="https://github.com/deepseek-ai/FlashMLA/pull/184",
        passes="deepgemm",
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="scale_floor_1e_10",
        file=SCALES,
        old="AMAX_FLOOR = 1e-4",
        new="AMAX_FLOOR = 1e-10",
        breaks="Tiny keys get a scale of their own size where the contract has a floor.",
        imitates="https://github.com/pytorch/ao/pull/4598",
        passes="deepgemm",
        operators=(*KEYS, *QUERY),
        fault=20,
    ),
    Mutant(
        id="scale_of_zero_block_is_zero",
        file=SCALES,
        old="scale_code = torch.where(torch.isnan(scale), 255, exponent + 127).to(torch.uint8)",
        new=(
            "scale_code = torch.where(torch.isnan(scale), 255, (exponent + 127).where(amax(blocks) > "
            "0, 0)).to(torch.uint8)"
        ),
        breaks="An all-zero block has scale byte 0.",
        imitates="https://github.com/flashinfer-ai/flashinfer/pull/3592",
        passes="deepgemm",
        operators=(*KEYS, *QUERY),
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="scale_of_all_heads",
        file=INDEX,
        old="scale = scales.exp2(scales.fp8_exponent(scales.amax(q), fmt.element))",
        new=(
            "scale = scales.exp2(scales.fp8_exponent(scales.amax(q).amax(-1, "
            "keepdim=True).expand(q.shape[:-1]), fmt.element))"
        ),
        breaks="All heads of a query share the scale of the largest.",
        imitates="https://github.com/vllm-project/vllm/pull/42956",
        passes="flashinfer-bench",
        operators=QUERY,
    ),
    Mutant(
        id="experts_scale_of_next_tile",
        file=SCALES,
        old="return (values * minifloat.decode_e8m0(scale, dtype)[..., None]).flatten(-2)",
        new=(
            "return (values * minifloat.decode_e8m0(scale[..., torch.arange(scale.shape[-1], "
            "device=scale.device) // 2 * 2], dtype)[..., None]).flatten(-2)"
        ),
        breaks="Of two groups in a tile of 64 the second is read with the first one's scale.",
        imitates="https://github.com/sgl-project/sglang/pull/37759",
        passes="flashinfer-bench",
        operators=("moe_experts", "indexer_logits"),
        areas=("formats",),
        fault=21,
    ),
    Mutant(
        id="experts_scale_by_mx_rule",
        file=EXPERT,
        old="CARRY_FROM_1_75 = 1 << 21",
        new="CARRY_FROM_1_75 = (1 << 22) - 1",
        breaks="The expert format's scales are rounded up from another mantissa than the library's.",
        imitates="https://github.com/vllm-project/compressed-tensors/pull/595",
        passes="deepgemm",
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="experts_zero_group_scale_0",
        file=EXPERT,
        old="return torch.where(largest == 0, 127, (rounded - 2).clamp(0, 254))",
        new="return (rounded - 2).clamp(0, 254)",
        breaks="An all-zero group of an expert has scale byte 0.",
        imitates="https://github.com/vllm-project/compressed-tensors/pull/595",
        passes="same",
        areas=("formats",),
        fault=20,
    ),
)

LAYOUTS = (
    Mutant(
        id="latent_key_part_unscaled",
        file=LATENT,
        old=(
            "return minifloat.decode(rows, minifloat.ELEMENTS[fmt.element], dtype) * "
            "k_scale.to(rows.device, dtype)"
        ),
        new=(
            "return minifloat.decode(rows, minifloat.ELEMENTS[fmt.element], dtype) * "
            "torch.cat((k_scale.to(rows.device, dtype).expand(fmt.kv_rank), torch.ones(fmt.pe_dim, "
            "device=rows.device, dtype=dtype)))"
        ),
        breaks="The cache's scale is not applied to the shared key part.",
        imitates="https://github.com/vllm-project/vllm/pull/42956",
        passes="flashmla",
        operators=("sparse_mla",),
        areas=("formats",),
        fault=21,
    ),
    Mutant(
        id="latent_scale_divides",
        file=LATENT,
        old="return minifloat.encode(x / scale, minifloat.ELEMENTS[fmt.element])",
        new="return minifloat.encode(x * scale, minifloat.ELEMENTS[fmt.element])",
        breaks="A dequantisation factor is taken for a quantisation factor.",
        imitates="https://github.com/modular/modular/issues/6600",
        passes="flashmla",
        operators=LATENTS,
        areas=("formats",),
        fault=21,
    ),
    Mutant(
        id="latent_dialect_of_device",
        file=LATENT,
        old="return minifloat.encode(x / scale, minifloat.ELEMENTS[fmt.element])",
        new="return minifloat.encode(x / scale, minifloat.E4M3FN)",
        breaks="Latents are written in the dialect of the device and not of their cache.",
        imitates="https://github.com/vllm-project/vllm/pull/42893",
        passes="flashmla",
        operators=LATENTS,
        areas=("formats",),
        fault=22,
    ),
    Mutant(
        id="nvfp4_scales_swizzled_twice",
        file=LATENT,
        old=(
            "scale_code = scales.groups(lanes, fmt.kv_rank // fmt.group // NVFP4_LANES).transpose(1, "
            "2).flatten(1)"
        ),
        new="scale_code = lanes",
        breaks="The scales of an NVFP4 latent are read in the order in which they stand.",
        imitates="https://github.com/modular/modular/issues/6600",
        passes="flashmla",
        operators=("sparse_mla",),
        areas=("formats",),
        fault=21,
    ),
    Mutant(
        id="nvfp4_scale_to_nearest",
        file=LATENT,
        old="scale_code = minifloat.encode_up(needed, minifloat.E4M3FN)",
        new="scale_code = minifloat.encode(needed, minifloat.E4M3FN)",
        breaks="A block's scale is the nearest one, so that its largest elements saturate.",
        imitates="https://github.com/pytorch/ao/pull/4598",
        passes="flashmla",
        operators=LATENTS,
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="nvfp4_zero_block_scale_0",
        file=LATENT,
        old="needed = scales.divide(scales.amax(blocks), 6.0).clamp(min=2.0**-9, max=448.0)",
        new="needed = scales.divide(scales.amax(blocks), 6.0).clamp(max=448.0)",
        breaks="An all-zero block has a scale of 0, and 1 / 0 reaches its elements.",
        imitates="https://github.com/NVIDIA/TensorRT-LLM/pull/12320",
        passes="flashmla",
        operators=LATENTS,
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="flashmla_scale_squeezed",
        file=LATENT,
        old="factor = flashmla_scales(fmt, rows).to(dtype)",
        new="factor = scales.exp2(scales.ceil_log2(flashmla_scales(fmt, rows))).to(dtype)",
        breaks="A record's float32 scales are squeezed to powers of two when they are read.",
        imitates="https://github.com/deepseek-ai/FlashMLA/pull/184",
        passes="flashmla",
        operators=("sparse_mla",),
        areas=("formats",),
        fault=20,
    ),
    Mutant(
        id="latent_block_stride_ignored",
        file=LATENT,
        old="return cache.view(cache.shape[0], page, fmt.row_bytes)",
        new=(
            "return torch.as_strided(cache, (cache.shape[0], page, fmt.row_bytes), (page * "
            "fmt.row_bytes, fmt.row_bytes, 1))"
        ),
        breaks="Pages that stand further apart than they are long are addressed as if they were contiguous.",
        imitates="https://github.com/vllm-project/vllm-ascend/pull/15408",
        passes="flashmla",
        operators=("sparse_mla", *LATENTS),
        fault=23,
    ),
    Mutant(
        id="index_tile_order_ignored",
        file=INDEX,
        old="elements = cache[:, :border].view(pages, runs, fmt.element_bytes // chunk, tokens, chunk)",
        new=(
            "elements = cache[:, :border].view(pages, runs, tokens, fmt.element_bytes // chunk, "
            "chunk).transpose(2, 3)"
        ),
        breaks="A shuffled page is addressed as a plain one.",
        imitates="https://github.com/vllm-project/tpu-inference/pull/3480",
        passes="deepgemm",
        operators=("indexer_logits", *KEYS),
        areas=("formats",),
        fault=23,
    ),
    Mutant(
        id="index_scale_lanes_ignored",
        file=INDEX,
        old="return elements[index].flatten(1), scale[index].transpose(1, 2).flatten(1)",
        new="return elements[index].flatten(1), scale[index].flatten(1)",
        breaks="The scale bytes of a key are read lane by lane.",
        imitates="https://github.com/local-inference-lab/b12x/pull/37",
        passes="deepgemm",
        operators=("indexer_logits",),
        areas=("formats",),
        fault=23,
    ),
    Mutant(
        id="index_scale_kind_of_other_record",
        file=INDEX,
        old='if fmt.scale in ("ue8m0x4", "e8m0"):',
        new='if fmt.scale == "e8m0":',
        breaks="Four e8m0 bytes are read as one float32.",
        imitates="https://github.com/vllm-project/tpu-inference/pull/3480",
        passes="deepgemm",
        operators=("indexer_logits",),
        areas=("formats",),
        fault=22,
    ),
)

CONVERSIONS = (
    Mutant(
        id="convert_nan_code_kept",
        file="formats/converted_bytes.py",
        old=(
            "return torch.where(highest, 0x80, torch.where(codes == 0x80, 0, codes)).to(torch.uint8), "
            "2.0, every"
        ),
        new="return torch.where(highest, 0x80, codes).to(torch.uint8), 2.0, every",
        breaks="A minus zero of one dialect becomes the NaN of the other.",
        imitates="https://github.com/sgl-project/sglang/pull/28455",
        passes="same",
        areas=("formats",),
        fault=22,
    ),
    Mutant(
        id="convert_scale_not_halved",
        file="formats/converted_bytes.py",
        old="return torch.where(codes == 0x80, 0x7F, codes).to(torch.uint8), 0.5, ~highest.any(dim=-1)",
        new="return torch.where(codes == 0x80, 0x7F, codes).to(torch.uint8), 1.0, ~highest.any(dim=-1)",
        breaks="Codes go to the other dialect without their scale.",
        imitates="https://github.com/vllm-project/vllm/pull/45681",
        passes="same",
        areas=("formats",),
        fault=22,
    ),
)

add(ELEMENTS)
add(SCALE_RULES)
add(LAYOUTS)
add(CONVERSIONS)
