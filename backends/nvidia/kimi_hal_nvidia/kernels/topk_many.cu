// topk_select of many long rows: a block for each, two of them on a multiprocessor.
#include "slices.cuh"

#define MANY(NAME, SCORE, ROUND)                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 2) many_##NAME(const __grid_constant__ Selection p) { \
    select_slices<SCORE, ROUND, 512, 5632, 4096, false, 16>(p);                                            \
  }
EVERY_FORM(MANY)
