// topk_select of few long rows: a cluster of blocks for each row, a block on each multiprocessor.
#include "slices.cuh"

#define WIDE(NAME, SCORE, ROUND)                                                                           \
  extern "C" __global__ void __launch_bounds__(512, 1) wide_##NAME(const __grid_constant__ Selection p) { \
    select_slices<SCORE, ROUND, 512, 8192, 16384, true, 32>(p);                                            \
  }
EVERY_FORM(WIDE)
