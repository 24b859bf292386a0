// indexer_logits over MXFP4 keys: 32 or 64 heads of one or more rows together.
#include "scores.cuh"

SCORES(fp4_32x1, Fp4, 32, 32, 5, 20)
SCORES(fp4_32x2, Fp4, 64, 32, 5, 20)
SCORES(fp4_32x4, Fp4, 128, 32, 3, 24)
SCORES(fp4_32x8, Fp4, 256, 32, 2, 20)
SCORES(fp4_64x1, Fp4, 64, 64, 5, 20)
SCORES(fp4_64x4, Fp4, 256, 64, 2, 20)
