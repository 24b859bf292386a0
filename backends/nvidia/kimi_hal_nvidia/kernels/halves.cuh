// A coarse order of scores that ranks most of them apart: 2,048 bins by sign, exponent and five bits of float16.
#pragma once
#include "order.cuh"

// The bins of two scores, four to each bin, in the halves of a word. NaN has bin 0; -0 has that of +0. A score beyond
// float16 has its infinity's bin, one too small for it has zero's: bins grow with scores, and that is all they promise.
__device__ __forceinline__ u32 pair_of_bins(float first, float second) {
  u32 halves, negative;
  asm("{\n.reg .b32 zero;\nmov.b32 zero, 0;\ncvt.rn.f16x2.f32 %0, %1, %2;\nadd.rn.f16x2 %0, %0, zero;\n}"
      : "=r"(halves)
      : "f"(second), "f"(first));  // -0 + 0 is +0
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(negative) : "r"(halves));
  u32 order = halves ^ (negative | 0x80008000u);
  return ((order >> 3 & 0x1ffc1ffcu) + 0x00040004u) & 0x1ffc1ffcu;
}

constexpr u32 MINUS_INFINITY_BIN = 32;  // lower bins have nothing but NaN

// Ordinals of scores that no score of a bin but bin 0 is below, or above.
__device__ __forceinline__ u32 ordinal_of_half(int order) {
  u32 o = max(0x3ff, min(order, 0xfc00));  // from -inf to +inf
  unsigned short half = o & 0x8000 ? o ^ 0x8000 : ~o;
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return ordinal(x);
}
// Zero's bin has also negative scores that are too small, whence two steps down.
__device__ __forceinline__ u32 least_of_bin(u32 bin) { return ordinal_of_half(static_cast<int>(bin - 1) * 32 - 2); }
__device__ __forceinline__ u32 most_of_bin(u32 bin) { return ordinal_of_half(static_cast<int>(bin - 1) * 32 + 32); }
