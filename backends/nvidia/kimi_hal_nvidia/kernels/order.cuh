// The strict total order of scores: unsigned ordinals that grow with the score. -0 equals +0, NaN is the least.
#pragma once
#include <cuda_bf16.h>

#include "block.cuh"

// The ordinal of NaN; what is no key has 0.
constexpr u32 NAN_ORDINAL = 1;
constexpr u32 MINUS_INFINITY = 0x007fffffu;

__device__ __forceinline__ u32 ordinal(float x) {
  u32 bits = __float_as_uint(x);
  u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
  key = bits == 0x80000000u ? 0x80000000u : key;
  return (bits & 0x7fffffffu) > 0x7f800000u ? NAN_ORDINAL : key;
}

// The score of an ordinal that is no NaN's.
__device__ __forceinline__ float score_of(u32 key) {
  return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
