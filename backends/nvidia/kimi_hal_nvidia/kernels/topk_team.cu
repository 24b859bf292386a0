// topk_select of few rows of up to 131,072 columns, or 262,144: a cluster of up to 16 blocks for each.
#include "held.cuh"

#define TEAM(NAME, SCORE, ROUND)                                                                                \
  extern "C" __global__ void __launch_bounds__(512, 1) team_##NAME(const __grid_constant__ Selection p) {       \
    select_together<SCORE, ROUND, 512, 16>(p);                                                                \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(1024, 1) large_team_##NAME(const __grid_constant__ Selection p) { \
    select_together<SCORE, ROUND, 1024, 16>(p);                                                               \
  }
EVERY_FORM(TEAM)
