// sparse_mla: attention from one row's heads to the latents that its indices name.
//
// A row and block of 16 heads belongs to a cluster of blocks, each with a part of the row's keys. Latents come as they
// are into shared memory by one copy a row, 64 keys at a time, and are decoded to float16 in registers, where every code
// times its scale is exact. In both products a thread takes the neighbouring bytes of a key: in S = K Qt they lie along
// the contraction, whose order is free, in O = P V they are columns. So nothing is transposed. Eight warps share a tile:
// for S they are four groups of 16 keys by two halves of the contraction, for O each has 64 latents. The blocks of a
// cluster add their parts through each other's shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block.cuh"

struct Attention {
  const void* q;
  const unsigned char* cache;
  const int* indices;
  const float* k_scale;
  const float* q_scale;
  const int* index_len;
  const int* table;
  const int* row_req;
  __nv_bfloat16* out;
  float* lse;
  long long q_row, q_head, page_stride, index_row, len_stride, table_row, req_stride, out_row, out_head, lse_row;
  int width, pages, requests, columns, heads, parts, each, page, space, world, rank, interleave, q_fp8, returns_lse;
  float softmax_scale;
};

enum Space { SLOT, POSITION, LOCAL };

constexpr int HEADS = 16;       // of a block
constexpr int KEYS = 64;        // of a tile
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int GROUPS = KEYS / 16;
constexpr int LATENT = 512, SHARED = 64, WIDTH = LATENT + SHARED;
constexpr int STEPS = WIDTH / 64;   // of S: 64 numbers of the contraction each, the last of the shared part
constexpr int AHEAD = 2;            // tiles of keys in shared memory
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float LIFT = 16384.0f;    // of probabilities, so that small ones keep their bits in float16
constexpr int MOST_PARTS = 16;

// Latents of a tensor's scale: 576 bytes, one a number. In shared memory rows are 6 chunks of 16 bytes modulo 8 apart,
// so that the rows and chunks that a warp reads together lie in different banks.
struct Fp8 {
  static constexpr int BYTES = 576, STRIDE = 608;
  static constexpr int RAISED = 0;  // exponent by which decoded latents are smaller than they are
};

// 256 bytes of e2m1, 64 of e4m3, and a scale for each 16 latents.
struct Nvfp4 {
  static constexpr int BYTES = 352, STRIDE = 352;
  static constexpr int RAISED = 7;
};

template <typename Format>
struct Room {
  unsigned char keys[AHEAD][KEYS * Format::STRIDE];
  uint4 q[STEPS * 4 * 32];              // operands of S, in the order in which a warp takes them
  __half p[GROUPS][HEADS][4][4];        // operands of O
  float4 halves[2][GROUPS][32];         // what one half of the contraction gives to the other
  float most[GROUPS][HEADS];
  float keep[HEADS], factor[HEADS], top[HEADS], total[HEADS], share[HEADS];
  float weight[MOST_PARTS][HEADS];
  u64 arrivals[AHEAD];
  unsigned char live[4][WARPS];         // which keys of a tile there are, a bit each
};
// Afterwards the tiles' place holds this part's output, which the cluster's other blocks read.
constexpr int OUT_STRIDE = LATENT + 4;

__device__ __forceinline__ u32 halves_of(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
  return pair;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Logits stay in base e: a large one would not be a float32 in base 2.
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2E));
  return y;
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < INFINITY; }

// Where an index's latent stands in the cache; null where it names none.
template <typename Format>
__device__ __forceinline__ const unsigned char* located(const Attention& a, const int* table, int index) {
  bool live = index >= 0;
  if (a.space == POSITION) {
    live = live && index / a.interleave % a.world == a.rank;
    index = index / (a.world * a.interleave) * a.interleave + index % a.interleave;
  }
  int page = index / a.page, inside = index - page * a.page;
  if (a.space != SLOT) {
    live = live && page < a.columns;
    page = live ? __ldg(table + page) : -1;
    live = live && page >= 0;
  }
  if (!live || page >= a.pages) return nullptr;
  return a.cache + page * a.page_stride + static_cast<long long>(inside) * Format::BYTES;
}

// Ask for one key's row; a row that names no key becomes zeros. Eight lanes of each warp call it.
template <typename Format>
__device__ __forceinline__ void fetch(Room<Format>& room, int tile, const unsigned char* row) {
  u32 key = 8 * warp() + lane(), arrivals = shared_address(&room.arrivals[tile % AHEAD]);
  unsigned char* to = room.keys[tile % AHEAD] + key * Format::STRIDE;
  u32 live = __ballot_sync(0xff, row != nullptr);
  if (lane() == 0) room.live[tile % 4][warp()] = live;
  // What this thread, or the queries, wrote here before is overwritten by the copy.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (row) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrivals), "r"(Format::BYTES) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
        "l"(row), "r"(Format::BYTES), "r"(arrivals)
        : "memory");
  } else {
#pragma unroll 1
    for (int i = 0; i < Format::BYTES; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(arrivals) : "memory");
  }
}

template <typename Format>
__device__ __forceinline__ void arrived(Room<Format>& room, int tile) {
  u32 arrivals = shared_address(&room.arrivals[tile % AHEAD]), parity = tile / AHEAD & 1, done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(arrivals), "r"(parity)
        : "memory");
  } while (!done);
}

// Which element of the query stands at `position` of the order in which keys are multiplied.
template <typename Format>
__device__ __forceinline__ int element_at(int position);
template <>
__device__ __forceinline__ int element_at<Fp8>(int position) {
  return position;
}
// A word's eight numbers are decoded as pairs (i, i + 4).
template <>
__device__ __forceinline__ int element_at<Nvfp4>(int position) {
  if (position >= LATENT) return position;
  int i = position & 7;
  return (position & ~7) + (i >> 1) + 4 * (i & 1);
}

// Where the 16 numbers begin that lane t of four multiplies in a step.
template <typename Format>
__device__ __forceinline__ int first_position(int step, int t);
template <>
__device__ __forceinline__ int first_position<Fp8>(int step, int t) {
  return 64 * step + 16 * t;
}
// A chunk has 32 numbers: steps 2 g and 2 g + 1 take its halves; the last step is of bytes.
template <>
__device__ __forceinline__ int first_position<Nvfp4>(int step, int t) {
  return step == STEPS - 1 ? LATENT + 16 * t : 128 * (step >> 1) + 32 * t + 16 * (step & 1);
}

// Put the block's queries into shared memory as float16, each head raised by a power of two to where float16 is fine.
// On the way they are parked in the second tile's place, in the row's order.
template <typename Format>
__device__ __forceinline__ void take_queries(Room<Format>& room, const Attention& a, long long row, int first_head) {
  constexpr int MINE = HEADS / WARPS, EACH = WIDTH / 32;
  float unit = a.softmax_scale * (a.k_scale ? __ldg(a.k_scale) : 1.0f) * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
  // Each head is read by a whole warp. All numbers are on their way before one is used.
  float x[MINE][EACH];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int head = min(first_head + static_cast<int>(warp()) + WARPS * i, a.heads - 1);
    long long at = row * a.q_row + head * a.q_head + lane();
    if (a.q_fp8) {
      const unsigned char* from = static_cast<const unsigned char*>(a.q) + at;
      u32 codes[EACH];
#pragma unroll
      for (int n = 0; n < EACH; ++n) codes[n] = __ldg(from + 32 * n);
#pragma unroll
      for (int n = 0; n < EACH; ++n)
        x[i][n] = __half2float(__ushort_as_half(static_cast<unsigned short>(halves_of(codes[n]))));
    } else {
      const unsigned short* from = static_cast<const unsigned short*>(a.q) + at;
      u32 codes[EACH];
#pragma unroll
      for (int n = 0; n < EACH; ++n) codes[n] = __ldg(from + 32 * n);
#pragma unroll
      for (int n = 0; n < EACH; ++n) x[i][n] = __uint_as_float(codes[n] << 16);
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int h = warp() + WARPS * i;
    bool inside = first_head + h < a.heads;
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      x[i][n] = inside ? x[i][n] : 0.0f;
      if (finite(x[i][n])) most = fmaxf(most, fabsf(x[i][n]) * (32 * n < LATENT ? 1.0f : exp2f(-Format::RAISED)));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    int exponent = most > 0.0f ? min(119, 13 - Format::RAISED - ilogbf(most)) : 0;
    float raised = exp2f(exponent);
    if (lane() == 0) room.factor[h] = exp2f(-exponent) * unit;
    __half* parked = reinterpret_cast<__half*>(room.keys[1]) + h * WIDTH;
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      parked[32 * n + lane()] = __float2half_rn(x[i][n] * (32 * n < LATENT ? raised * exp2f(Format::RAISED) : raised));
  }
  __syncthreads();
  const __half* parked = reinterpret_cast<const __half*>(room.keys[1]);
  for (int at = threadIdx.x; at < STEPS * 4 * 32; at += THREADS) {
    int to = at & 31, half = at >> 5 & 1, block = at >> 6 & 1, step = at >> 7;
    int position = first_position<Format>(step, to & 3) + 8 * half;
    const __half* mine = parked + (8 * block + (to >> 2)) * WIDTH;
    __align__(16) __half eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = mine[element_at<Format>(position + i)];
    room.q[at] = *reinterpret_cast<uint4*>(eight);
  }
}

// Two latents of e2m1 in the top nibbles of a word's halves, 2^14 smaller than they are.
__device__ __forceinline__ u32 e2m1(u32 x) { return (x & 0x80008000u) | ((x >> 3) & 0x0e000e00u); }

__device__ __forceinline__ u32 times(u32 pair, u32 scale) {
  __half2 x = *reinterpret_cast<__half2*>(&pair), s = *reinterpret_cast<__half2*>(&scale);
  __half2 y = __hmul2(x, s);
  return *reinterpret_cast<u32*>(&y);
}

// Scales of two latents, e4m3 in the low bytes of a word, times 2^7: with the 2^14 above, 2^7 are missing.
__device__ __forceinline__ u32 scales_of(u32 codes) { return times(halves_of(codes), 0x58005800u); }

// The scale code of 16 latents of a key.
__device__ __forceinline__ u32 scale_code(const unsigned char* tile, int key, int group) {
  return tile[key * Nvfp4::STRIDE + 320 + 8 * (group & 3) + (group >> 2)];
}

__device__ __forceinline__ void decode_bytes(u32 (&to)[8], uint4 w) {
  u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = halves_of(words[i]), to[2 * i + 1] = halves_of(words[i] >> 16);
}

__device__ __forceinline__ void decode_nibbles(u32 (&to)[8], uint2 w, u32 scale) {
  u32 words[2] = {w.x, w.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) to[4 * i + n] = times(e2m1(words[i] << (12 - 4 * n)), scale);
  }
}

// The 16 numbers of a step of a key, in the order of the queries.
template <typename Format>
__device__ __forceinline__ void decoded(u32 (&to)[8], const unsigned char* tile, int key, int step, int t);
template <>
__device__ __forceinline__ void decoded<Fp8>(u32 (&to)[8], const unsigned char* tile, int key, int step, int t) {
  decode_bytes(to, *reinterpret_cast<const uint4*>(tile + key * Fp8::STRIDE + 64 * step + 16 * t));
}
template <>
__device__ __forceinline__ void decoded<Nvfp4>(u32 (&to)[8], const unsigned char* tile, int key, int step, int t) {
  const unsigned char* row = tile + key * Nvfp4::STRIDE;
  if (step == STEPS - 1) {
    decode_bytes(to, *reinterpret_cast<const uint4*>(row + LATENT / 2 + 16 * t));
  } else {
    int chunk = 4 * (step >> 1) + t, half = step & 1;
    u32 scale = scales_of(scale_code(tile, key, 2 * chunk + half) * 0x0101u);
    decode_nibbles(to, *reinterpret_cast<const uint2*>(row + 16 * chunk + 8 * half), scale);
  }
}

// Which of 16 keys a lane's first row is: neighbours in a phase are two apart.
__device__ __forceinline__ int key_of(int g) { return (g & 4) | (g & 1) << 1 | (g >> 1 & 1); }

// S of 16 keys over this warp's half of the contraction: s[b] holds keys (k, k + 8) and heads 8 b + (2 t, 2 t + 1).
template <typename Format>
__device__ __forceinline__ void scores(float (&s)[2][4], const unsigned char* tile, const uint4* q, int key, int half) {
  int t = lane() & 3;
  float other[2][4] = {};  // a second chain of sums
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    int step = i < 4 ? 4 * half + i : STEPS - 1;
    if (i == 4 && half) break;
    u32 low[8], high[8];
    decoded<Format>(low, tile, key, step, t);
    decoded<Format>(high, tile, key + 8, step, t);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint4 x = q[(4 * step + 2 * block) * 32 + lane()], y = q[(4 * step + 2 * block + 1) * 32 + lane()];
      multiply(s[block], low[0], high[0], low[1], high[1], x.x, x.y);
      multiply(other[block], low[2], high[2], low[3], high[3], x.z, x.w);
      multiply(s[block], low[4], high[4], low[5], high[5], y.x, y.y);
      multiply(other[block], low[6], high[6], low[7], high[7], y.z, y.w);
    }
  }
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][i] += other[b][i];
  }
}

// O += P V of 16 keys and this warp's 64 latents: o[i] holds heads (g, g + 8) and latents 16 t + (i, 8 + i).
template <typename Format>
__device__ __forceinline__ void add_values(float (&o)[8][4], const unsigned char* tile, int base, uint2 low, uint2 high);

template <>
__device__ __forceinline__ void add_values<Fp8>(
    float (&o)[8][4], const unsigned char* tile, int base, uint2 low, uint2 high) {
  int t = lane() & 3, at = 64 * warp() + 8 * (lane() >> 2);
  u32 w[4][2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint2 v = *reinterpret_cast<const uint2*>(tile + (base + 4 * j + t) * Fp8::STRIDE + at);
    w[j][0] = v.x, w[j][1] = v.y;
  }
#pragma unroll
  for (int word = 0; word < 2; ++word) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 choice = pair ? 0x7362 : 0x5140;
      u32 first = __byte_perm(w[0][word], w[1][word], choice), second = __byte_perm(w[2][word], w[3][word], choice);
      int i = 4 * word + 2 * pair;
      multiply(o[i], low.x, high.x, low.y, high.y, halves_of(first), halves_of(second));
      multiply(o[i + 1], low.x, high.x, low.y, high.y, halves_of(first >> 16), halves_of(second >> 16));
    }
  }
}

template <>
__device__ __forceinline__ void add_values<Nvfp4>(
    float (&o)[8][4], const unsigned char* tile, int base, uint2 low, uint2 high) {
  int t = lane() & 3, at = 8 * warp() + (lane() >> 2);
  u32 w[4], codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int key = base + 4 * j + t;
    w[j] = *reinterpret_cast<const u32*>(tile + key * Nvfp4::STRIDE + 4 * at);
    codes[j] = scale_code(tile, key, at >> 1);
  }
  u32 first_scale = scales_of(codes[0] | codes[1] << 8), second_scale = scales_of(codes[2] | codes[3] << 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 choice = half ? 0x7632 : 0x5410;
    u32 first = __byte_perm(w[0], w[1], choice), second = __byte_perm(w[2], w[3], choice);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      multiply(o[4 * half + n], low.x, high.x, low.y, high.y, times(e2m1(first << (12 - 4 * n)), first_scale),
               times(e2m1(second << (12 - 4 * n)), second_scale));
  }
}

// This block's part: maxima of its keys' logits, sums of their exponentials, and outputs.
struct Part {
  float o[8][4];
  float top[2], total[2];  // of two heads; `total` of this thread's keys alone
};

template <typename Format>
__device__ __forceinline__ void add_tile(Part& part, Room<Format>& room, int tile) {
  const unsigned char* keys = room.keys[tile % AHEAD];
  int g = lane() >> 2, t = lane() & 3, group = warp() & 3, half = warp() >> 2, key = key_of(g);
  float s[2][4] = {};
  scores<Format>(s, keys, room.q, 16 * group + key, half);
  // Each half keeps the heads of one block and gives the other's away.
  room.halves[half][group][lane()] = half ? make_float4(s[0][0], s[0][1], s[0][2], s[0][3])
                                          : make_float4(s[1][0], s[1][1], s[1][2], s[1][3]);
  asm volatile("bar.sync %0, 64;" ::"r"(1 + group) : "memory");
  float4 rest = room.halves[1 - half][group][lane()];
  float mine[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) mine[i] = half ? s[1][i] : s[0][i];
  mine[0] += rest.x, mine[1] += rest.y, mine[2] += rest.z, mine[3] += rest.w;
  int head = 8 * half + 2 * t;
  u32 live = *reinterpret_cast<const unsigned short*>(&room.live[tile % 4][2 * group]);
  float most[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float factor = room.factor[head + c];
    mine[c] = live >> key & 1 ? mine[c] * factor : -INFINITY;
    mine[c + 2] = live >> (key + 8) & 1 ? mine[c + 2] * factor : -INFINITY;
    most[c] = fmaxf(mine[c], mine[c + 2]);
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], __shfl_xor_sync(EVERY, most[c], step));
  }
  if (g == 0) room.most[group][head] = most[0], room.most[group][head + 1] = most[1];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float higher = part.top[c];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) higher = fmaxf(higher, room.most[i][head + c]);
    // Nothing yet, or a logit of +inf: whatever is subtracted, the exponential says the right thing of it.
    float base = finite(higher) ? higher : 0.0f;
    float keep = exponential(part.top[c] - base);
    float p = exponential(mine[c] - base), p_8 = exponential(mine[c + 2] - base);
    part.top[c] = higher;
    part.total[c] = part.total[c] * keep + p + p_8;
    room.p[group][head + c][key & 3][key >> 2] = __float2half_rn(p * LIFT);
    room.p[group][head + c][key & 3][2 + (key >> 2)] = __float2half_rn(p_8 * LIFT);
    if (group == 0 && g == 0) room.keep[head + c] = keep;
  }
  __syncthreads();
  float keep = room.keep[g], keep_8 = room.keep[g + 8];
  if (__any_sync(EVERY, keep != 1.0f || keep_8 != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) part.o[i][0] *= keep, part.o[i][1] *= keep, part.o[i][2] *= keep_8, part.o[i][3] *= keep_8;
  }
#pragma unroll
  for (int step = 0; step < GROUPS; ++step) {
    uint2 low = *reinterpret_cast<const uint2*>(room.p[step][g][t]);
    uint2 high = *reinterpret_cast<const uint2*>(room.p[step][g + 8][t]);
    add_values<Format>(part.o, keys, 16 * step, low, high);
  }
}

// Leave this part's maxima, sums and outputs in shared memory.
template <typename Format>
__device__ __forceinline__ void finish(Part& part, Room<Format>& room) {
  int g = lane() >> 2, t = lane() & 3, group = warp() & 3, head = 8 * (warp() >> 2) + 2 * t;
  __syncthreads();  // the last tile has been read
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) part.total[c] += __shfl_xor_sync(EVERY, part.total[c], step);
    if (g == 0) room.most[group][head + c] = part.total[c];
    if (g == 0 && group == 0) room.top[head + c] = part.top[c];
  }
  float* out = reinterpret_cast<float*>(room.keys);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int latent = 64 * warp() + 16 * t + i;
    out[g * OUT_STRIDE + latent] = part.o[i][0];
    out[g * OUT_STRIDE + latent + 8] = part.o[i][1];
    out[(g + 8) * OUT_STRIDE + latent] = part.o[i][2];
    out[(g + 8) * OUT_STRIDE + latent + 8] = part.o[i][3];
  }
  __syncthreads();
  if (threadIdx.x < HEADS) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += room.most[i][threadIdx.x];
    room.total[threadIdx.x] = sum;
  }
}

__device__ __forceinline__ float remote_float(const float* p, u32 rank) {
  return __uint_as_float(remote(reinterpret_cast<const u32*>(p), rank));
}

__device__ __forceinline__ float4 remote_four(const float* p, u32 rank) {
  u32 at;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_four(__nv_bfloat16* to, float4 v) {
  to[0] = __float2bfloat16_rn(v.x), to[1] = __float2bfloat16_rn(v.y);
  to[2] = __float2bfloat16_rn(v.z), to[3] = __float2bfloat16_rn(v.w);
}

// How much each part counts, and what its sum is divided by: a thread a head.
template <typename Format>
__device__ __forceinline__ void weigh(Room<Format>& room, const Attention& a, long long row, int first_head, int part) {
  int head = threadIdx.x;
  float tops[MOST_PARTS], totals[MOST_PARTS], top = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_PARTS; ++i) {
    tops[i] = i < a.parts ? remote_float(room.top + head, i) : -INFINITY;
    totals[i] = i < a.parts ? remote_float(room.total + head, i) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < MOST_PARTS; ++i) top = fmaxf(top, tops[i]);
  float base = finite(top) ? top : 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_PARTS; ++i) {
    float weight = exponential(tops[i] - base);
    total += weight * totals[i];
    room.weight[i][head] = weight;
  }
  float unit = exp2f(Format::RAISED) / LIFT * (a.k_scale ? __ldg(a.k_scale) : 1.0f);
  room.share[head] = top == INFINITY ? NAN : unit / (total == 0.0f ? 1.0f : total);
  if (part == 0 && a.returns_lse && first_head + head < a.heads)
    a.lse[row * a.lse_row + first_head + head] = top == INFINITY ? total : base + log2f(total) * LN2;
}

// Add the parts of the cluster's blocks; each block writes its share of the numbers.
template <typename Format>
__device__ __forceinline__ void merge(Room<Format>& room, const Attention& a, long long row, int first_head, int part) {
  if (threadIdx.x < HEADS) weigh(room, a, row, first_head, part);
  __syncthreads();
  const float* mine = reinterpret_cast<const float*>(room.keys);
  constexpr int FOURS = LATENT / 4;
  int heads = min(HEADS, a.heads - first_head);
  for (int at = part * THREADS + threadIdx.x; at < heads * FOURS; at += a.parts * THREADS) {
    int head = at / FOURS, latent = at % FOURS * 4;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i) {
      float weight = room.weight[i][head];
      float4 v = remote_four(mine + head * OUT_STRIDE + latent, i);
      sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
    }
    float share = room.share[head];
    sum.x *= share, sum.y *= share, sum.z *= share, sum.w *= share;
    store_four(a.out + row * a.out_row + (first_head + head) * a.out_head + latent, sum);
  }
}

template <typename Format>
__device__ __forceinline__ void attend(const Attention& a) {
  extern __shared__ __align__(128) unsigned char memory[];
  Room<Format>& room = *reinterpret_cast<Room<Format>*>(memory);
  int blocks = (a.heads + HEADS - 1) / HEADS, part = blockIdx.x % a.parts;
  int first_head = blockIdx.x / a.parts % blocks * HEADS;
  long long row = blockIdx.x / a.parts / blocks;
  bool fetches = lane() < KEYS / WARPS;

  int end = a.width;
  if (a.index_len) end = min(end, __ldg(a.index_len + row * a.len_stride));
  const int* table = a.table;
  if (a.space != SLOT) {
    int request = end > 0 ? __ldg(a.row_req + row * a.req_stride) : -1;
    bool known = request >= 0 && request < a.requests;
    end = known ? end : 0;
    table = a.table + (known ? request * a.table_row : 0);
  }
  int begin = part * a.each * KEYS;  // whole tiles, as many for any row of a plan
  end = min(end, begin + a.each * KEYS);
  int tiles = end > begin ? (end - begin + KEYS - 1) / KEYS : 0;

  const int* indices = a.indices + row * a.index_row;
  auto index_of = [&](int tile) {
    int at = begin + tile * KEYS + static_cast<int>(8 * warp() + lane());
    return fetches && at < end ? __ldg(indices + at) : -1;
  };
  int next = index_of(0), after = index_of(1);
  if (threadIdx.x < AHEAD)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&room.arrivals[threadIdx.x])), "r"(KEYS)
                 : "memory");
  __syncthreads();
  const unsigned char* here = fetches ? located<Format>(a, table, next) : nullptr;
  if (fetches && tiles) fetch<Format>(room, 0, here);
  here = fetches ? located<Format>(a, table, after) : nullptr;
  next = index_of(2);
  take_queries<Format>(room, a, row, first_head);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

  Part mine;
#pragma unroll
  for (int i = 0; i < 8; ++i) mine.o[i][0] = mine.o[i][1] = mine.o[i][2] = mine.o[i][3] = 0.0f;
#pragma unroll
  for (int c = 0; c < 2; ++c) mine.top[c] = -INFINITY, mine.total[c] = 0.0f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    __syncthreads();  // the tile before has been read by all
    if (fetches && tile + 1 < tiles) fetch<Format>(room, tile + 1, here);
    here = fetches ? located<Format>(a, table, next) : nullptr;
    next = index_of(tile + 3);
    arrived<Format>(room, tile);
    add_tile<Format>(mine, room, tile);
  }
  finish<Format>(mine, room);
  cluster_sync();
  merge<Format>(room, a, row, first_head, part);
  cluster_sync();  // no block ends while another reads its part
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) fp8(const __grid_constant__ Attention a) { attend<Fp8>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) nvfp4(const __grid_constant__ Attention a) { attend<Nvfp4>(a); }

static_assert(sizeof(Room<Fp8>) == 104048 && sizeof(Room<Nvfp4>) == 71280, "what the launches ask for");
static_assert(sizeof(Attention) == 224, "what the launches pass");
