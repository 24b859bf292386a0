// indexer_logits over FP8 keys (e4m3fn, a float32 or a power of two as scale): 32 or 64 heads of one or more rows together.
#include "scores.cuh"

SCORES(fp8_32x1, Fp8, 32, 32, 4, 20)
SCORES(fp8_32x2, Fp8, 64, 32, 4, 16)
SCORES(fp8_32x4, Fp8, 128, 32, 2, 16)
SCORES(fp8_32x8, Fp8, 256, 32, 2, 8)
SCORES(fp8_64x1, Fp8, 64, 64, 4, 16)
SCORES(fp8_64x4, Fp8, 256, 64, 2, 8)
