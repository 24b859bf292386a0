// topk_select of rows of up to 16,384 columns, or 32,768: a block for each, with 32 keys a thread.
#include "held.cuh"

#define WHOLE(NAME, SCORE, ROUND)                                                                           \
  extern "C" __global__ void __launch_bounds__(512, 2) middle_##NAME(const __grid_constant__ Selection p) { \
    select_alone<SCORE, ROUND, 512, 32>(p);                                                                 \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(1024, 1) whole_##NAME(const __grid_constant__ Selection p) { \
    select_alone<SCORE, ROUND, 1024, 32>(p);                                                                \
  }
EVERY_FORM(WHOLE)
