// indexer_logits over FP8 keys by FP8 products: 32 or 64 heads, scores as float32 or bfloat16.
#include "sums.cuh"

FP8_SUMS(fp8_sum_32_float32, float, 32, 4, 12)
FP8_SUMS(fp8_sum_64_float32, float, 64, 4, 12)
FP8_SUMS(fp8_sum_32_bfloat16, __nv_bfloat16, 32, 4, 12)
FP8_SUMS(fp8_sum_64_bfloat16, __nv_bfloat16, 64, 4, 12)
