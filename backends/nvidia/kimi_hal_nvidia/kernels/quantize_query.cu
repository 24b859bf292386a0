// quantize_index_query: half a warp for each query of a row and head, eight numbers a lane.
#include <cuda_bf16.h>

#include "block.cuh"

struct Quantizing {
  const void* q;
  const void* weights;
  unsigned char* q_out;
  unsigned char* scale_out;
  void* weights_out;
  long long q_row, q_head, weights_row, q_out_row, q_out_head, scale_out_row, scale_out_head, weights_out_row;
  int rows, heads, q_float, weights_float, weights_out_float, hadamard;
  float weight_scale;
};

constexpr int THREADS = 128, EACH = 8, LANES = 16;
constexpr float FLOOR = 1e-4f, TARGET = 448.0f;
constexpr float ROOT = 0.08838834764831845f;  // 128^-1/2

__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }

// The least exponent whose power of two is no less than x, as far as float32 has it as a normal number.
__device__ __forceinline__ int ceil_log2(float x) {
  u32 bits = __float_as_uint(x);
  int exponent = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
  return min(max(exponent, -126), 127);
}

__device__ __forceinline__ float power(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }
// Its reciprocal, which is below the normal numbers for the largest.
__device__ __forceinline__ float reciprocal(int exponent) {
  return __uint_as_float(exponent == 127 ? 0x00400000u : static_cast<u32>(127 - exponent) << 23);
}

// A number of one of two types; `i` counts in it.
__device__ __forceinline__ float number(const void* from, long long i, int is_float) {
  return is_float ? static_cast<const float*>(from)[i] : __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
}

// Two numbers of a word.
__device__ __forceinline__ void widen(float* x, u32 two) {
  x[0] = __uint_as_float(two << 16), x[1] = __uint_as_float(two & 0xffff0000u);
}

// This lane's numbers of a query, wherever it stands.
__device__ __forceinline__ void load(float (&x)[EACH], const Quantizing& p, long long at) {
  bool whole = (reinterpret_cast<u64>(p.q) + at * (p.q_float ? 4 : 2)) % 16 == 0;
  if (whole && !p.q_float) {
    uint4 v = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + at);
    widen(x, v.x), widen(x + 2, v.y), widen(x + 4, v.z), widen(x + 6, v.w);
  } else if (whole) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p.q) + at);
    float4 v = from[0], w = from[1];
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w, x[4] = w.x, x[5] = w.y, x[6] = w.z, x[7] = w.w;
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = number(p.q, at + i, p.q_float);
  }
}

// Turns the query by the orthonormal Hadamard matrix in Sylvester's order: the nearest numbers are paired first.
__device__ __forceinline__ void turn(float (&x)[EACH]) {
#pragma unroll
  for (int half = 1; half < EACH; half *= 2) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (i & half) continue;
      float low = x[i], high = x[i + half];
      x[i] = low + high, x[i + half] = low - high;
    }
  }
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float other = __shfl_xor_sync(EVERY, x[i], step);
      x[i] = lane() & step ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] *= ROOT;
}

__device__ __forceinline__ float largest(const float (&x)[EACH]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) most = fmaxf(most, fabsf(x[i]));  // NaN doesn't count
  return most;
}

__device__ __forceinline__ u32 two_fp8(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// The e2m1 code of a number: to nearest, ties to even, saturating; NaN has 0.
__device__ __forceinline__ u32 fp4(float x) {
  float magnitude = fminf(fabsf(x), 6.0f);
  u32 bits = __float_as_uint(magnitude);
  u32 normal = (bits + 0x1fffffu + (bits >> 22 & 1) >> 22) - (126 << 1);
  u32 tiny = __float_as_uint(magnitude * 2.0f + 8388608.0f) & 0x7fffffu;
  u32 code = magnitude < 1.0f ? tiny : normal;
  return is_nan(x) ? 0 : code | __float_as_uint(x) >> 31 << 3;
}

// Where a lane's bytes go.
template <int BYTES>
__device__ __forceinline__ unsigned char* place(const Quantizing& p, long long row, int head) {
  return p.q_out + row * p.q_out_row + head * p.q_out_head + lane() % LANES * BYTES;
}

// Quantises a query and writes its codes, and its scales if they stay apart, where `live`; returns the scale that does not.
struct Fp8 {
  static __device__ __forceinline__ float put(const Quantizing& p, const float (&x)[EACH], long long row, int head, bool live) {
    float most = largest(x);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    int exponent = ceil_log2(__fdiv_rn(fmaxf(most, FLOOR), TARGET));
    float by = reciprocal(exponent);
    u32 low = two_fp8(x[0] * by, x[1] * by) | two_fp8(x[2] * by, x[3] * by) << 16;
    u32 high = two_fp8(x[4] * by, x[5] * by) | two_fp8(x[6] * by, x[7] * by) << 16;
    unsigned char* to = place<8>(p, row, head);
    if (live && reinterpret_cast<u64>(to) % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    } else if (live) {
#pragma unroll
      for (int i = 0; i < 8; i++) to[i] = (i < 4 ? low : high) >> i % 4 * 8;
    }
    return power(exponent);
  }
};

struct Fp4 {
  static __device__ __forceinline__ float put(const Quantizing& p, const float (&x)[EACH], long long row, int head, bool live) {
    float most = largest(x);
    u32 broken = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) broken |= is_nan(x[i]);
#pragma unroll
    for (int step = 2; step; step /= 2) {  // four lanes have a group of 32
      most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
      broken |= __shfl_xor_sync(EVERY, broken, step);
    }
    int exponent = ceil_log2(__fdiv_rn(most, 6.0f));
    float by = reciprocal(exponent);
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) codes |= (broken ? 0 : fp4(x[i] * by)) << 4 * i;
    unsigned char* to = place<4>(p, row, head);
    if (live && reinterpret_cast<u64>(to) % 4 == 0) {
      *reinterpret_cast<u32*>(to) = codes;
    } else if (live) {
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] = codes >> 8 * i;
    }
    if (live && lane() % 4 == 0) {
      p.scale_out[row * p.scale_out_row + head * p.scale_out_head + lane() % LANES / 4] = broken ? 255 : exponent + 127;
    }
    return 1.0f;
  }
};

// It is launched as any kernel is: all that goes before it is done. So the next one may begin at once.
template <typename Element>
__device__ __forceinline__ void quantize(const Quantizing& p) {
  let_followers_start();
  u32 all = static_cast<u32>(p.rows) * p.heads, item = (blockIdx.x * THREADS + threadIdx.x) / LANES;
  bool live = item < all;
  item = min(item, all - 1);
  u32 of_row = item / p.heads;
  int head = static_cast<int>(item - of_row * p.heads);
  long long row = of_row;
  bool first = live && lane() % LANES == 0;
  float x[EACH];
  load(x, p, row * p.q_row + head * p.q_head + lane() % LANES * EACH);
  float weight = first ? number(p.weights, row * p.weights_row + head, p.weights_float) : 0.0f;
  if (p.hadamard) turn(x);
  float scale = Element::put(p, x, row, head, live);
  if (first) {
    float w = weight * p.weight_scale * scale;
    long long at = row * p.weights_out_row + head;
    if (p.weights_out_float) static_cast<float*>(p.weights_out)[at] = w;
    else static_cast<__nv_bfloat16*>(p.weights_out)[at] = __float2bfloat16_rn(w);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_fp8(const __grid_constant__ Quantizing p) { quantize<Fp8>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) quantize_fp4(const __grid_constant__ Quantizing p) { quantize<Fp4>(p); }

static_assert(sizeof(Quantizing) == 136);
