// topk_select of rows of up to 8,192 columns: a block for each.
#include "held.cuh"

#define SHORT(NAME, SCORE, ROUND)                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 2) short_##NAME(const __grid_constant__ Selection p) { \
    select_alone<SCORE, ROUND, 512, 16>(p);                                                              \
  }
EVERY_FORM(SHORT)
