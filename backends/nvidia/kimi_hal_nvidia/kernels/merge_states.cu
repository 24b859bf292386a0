// merge_attn_states: the parts of attention of every row and head, weighed by their LSE. A part whose LSE is not finite is
// empty: its output is never multiplied.
//
// One row and head is spread over 16 warps, a part over four lanes: everything is asked for at once. Few rows wait for code as
// long as for numbers, so up to eight parts have a kernel of their own, two kilobytes of it, with offsets of 32 bits.
#include <cuda_bf16.h>

#include "block.cuh"

struct Merging {
  const __nv_bfloat16* outs;
  const float* lses;
  __nv_bfloat16* out;
  float* lse;
  long long part, row, head, lse_part, lse_row, lse_head, out_row, out_head, lse_out;
  int parts, returns_lse;
};

// The same of at most eight parts. Offsets of outputs are in pieces, others in numbers.
struct Few {
  const __nv_bfloat16* outs;
  const float* lses;
  __nv_bfloat16* out;
  float* lse;
  u32 part, row, head, lse_part, lse_row, lse_head, out_row, out_head, lse_out;
  int parts, returns_lse;
};

constexpr int PIECE = 8;  // numbers of a load
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// An LSE of an empty part is −inf.
__device__ __forceinline__ float clean(float lse) { return fabsf(lse) < INFINITY ? lse : -INFINITY; }
__device__ __forceinline__ float subtrahend(float top) { return top == -INFINITY ? 0.0f : top; }

__device__ __forceinline__ uint4 piece_at(const __nv_bfloat16* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

// Add a part's numbers by its weight; of an empty part nothing.
__device__ __forceinline__ void add(float (&sum)[PIECE], uint4 v, float weight, bool live) {
  u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += live ? weight * __uint_as_float(word[i] << 16) : 0.0f;
    sum[2 * i + 1] += live ? weight * __uint_as_float(word[i] & 0xffff0000u) : 0.0f;
  }
}

__device__ __forceinline__ float quotient(float x, float total) { return __fdividef(x, total == 0.0f ? 1.0f : total); }

__device__ __forceinline__ void write_lse(const Merging& m, long long row, int head, float top, float total) {
  if (m.returns_lse) m.lse[row * m.lse_out + head] = total == 0.0f ? -INFINITY : top + logf(total);
}

// The lanes of a part's neighbours: what eight parts have of four pieces is added to one number a lane.
template <int COUNT>
__device__ __forceinline__ void halve(float (&sum)[PIECE], int step) {
  bool upper = lane() & step;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float given = upper ? sum[i] : sum[COUNT + i], kept = upper ? sum[COUNT + i] : sum[i];
    sum[i] = kept + __shfl_xor_sync(EVERY, given, step);
  }
}

extern "C" __global__ void __launch_bounds__(128) merge_states(const __grid_constant__ Merging m) {
  int head = blockIdx.x >> 2, first = lane() >> 2, latent = ((blockIdx.x & 3) * 4 + warp()) * 32 + (lane() & 3) * PIECE;
  long long row = blockIdx.y;
  const float* lses = m.lses + row * m.lse_row + head * m.lse_head;
  const __nv_bfloat16* outs = m.outs + row * m.row + head * m.head + latent;
  float own = -INFINITY;
  uint4 piece = make_uint4(0, 0, 0, 0);
  if (first < m.parts) own = __ldg(lses + first * m.lse_part), piece = piece_at(outs + first * m.part);
  own = clean(own);
  float top = own;
#pragma unroll 1
  for (int i = first + 8; i < m.parts; i += 8) top = fmaxf(top, clean(__ldg(lses + i * m.lse_part)));
#pragma unroll
  for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(EVERY, top, step));
  float base = subtrahend(top), total = expf(own - base), sum[PIECE] = {};
  add(sum, piece, total, own != -INFINITY);
#pragma unroll 1
  for (int i = first + 8; i < m.parts; i += 8) {
    float lse = clean(__ldg(lses + i * m.lse_part)), weight = expf(lse - base);
    total += weight;
    add(sum, piece_at(outs + i * m.part), weight, lse != -INFINITY);
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(EVERY, total, step);
  halve<4>(sum, 16), halve<2>(sum, 8), halve<1>(sum, 4);
  m.out[row * m.out_row + head * m.out_head + latent + first] = __float2bfloat16_rn(quotient(sum[0], total));
  if (latent == 0 && first == 0) write_lse(m, row, head, base, total);
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float logarithm(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * LN2;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

extern "C" __global__ void __launch_bounds__(512) merge_few(const __grid_constant__ Few m) {
  u32 head = blockIdx.x, row = blockIdx.y, first = lane() >> 2, at = warp() * 4 + (lane() & 3);
  float own = -INFINITY;
  uint4 piece = make_uint4(0, 0, 0, 0);
  if (first < m.parts) {
    own = __ldg(m.lses + (row * m.lse_row + head * m.lse_head + first * m.lse_part));
    piece = __ldg(reinterpret_cast<const uint4*>(m.outs) + (row * m.row + head * m.head + first * m.part + at));
  }
  bool live = fabsf(own) < INFINITY;
  own = clean(own);
  if (!live) piece = make_uint4(0, 0, 0, 0);
  float top = own;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(EVERY, top, step));
  float base = subtrahend(top), weight = power_of_two((own - base) * LOG2E), total = weight, sum[PIECE] = {};
#pragma unroll
  for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(EVERY, total, step);
  u32 word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = weight * __uint_as_float(word[i] << 16);
    sum[2 * i + 1] = weight * __uint_as_float(word[i] & 0xffff0000u);
  }
  halve<4>(sum, 16), halve<2>(sum, 8), halve<1>(sum, 4);
  // The largest part's weight is 1: a total below that is of no part, whose sums are 0.
  __nv_bfloat16* out = m.out + (row * m.out_row + head * m.out_head + at * PIECE + first);
  *out = __float2bfloat16_rn(sum[0] * reciprocal(fmaxf(total, 0.5f)));
  if (threadIdx.x == 0 && m.returns_lse) m.lse[row * m.lse_out + head] = base + logarithm(total);
}

static_assert(sizeof(Merging) == 112 && sizeof(Few) == 80);
