// indexer_logits: S[t, j] = Σ_h w[t, h] · relu(q[t, h] · k_j), keys as the tall operand of a matrix product.
//
// All rows' keys are counted in pages, and every block takes an equal share of them, whoever has them. A producer warp
// copies pages into a ring; warpgroups take them in turn, decode a page's 64 keys to float16, which holds every element
// exactly, multiply them with the heads of one or more rows of a request, and add up in float32. FP8 instructions are
// not used: they add with fewer bits than the contract asks for. A score's bits depend on its row and its key alone.
#pragma once
#include <cuda_bf16.h>

#include "copies.cuh"
#include "elements.cuh"
#include "products.cuh"
#include "shards.cuh"

struct Scoring {
  const unsigned char* q;
  const unsigned char* q_scale;
  const void* weights;
  const unsigned char* cache;
  const int* table;
  const int* row_req;
  const int* row_len;
  void* out;
  long long q_row, q_head, q_scale_row, q_scale_head, weights_row, cache_page, table_row, req_stride, len_stride,
      out_row;
  int rows, requests, pages, room, heads;
  Shard shard;
  int weights_bf16, out_bf16, e8m0;
};

constexpr int PAGE = 64;

struct Unit {
  int row, first, page;  // the first row of its request in its block; position of the page's first key; −1: no page
};

template <typename Element, int N, int GROUPS, int STAGES>
struct Ring {
  static constexpr int PAGE_BYTES = PAGE * (Element::BYTES + 4);
  static constexpr int STAGE_BYTES = (PAGE_BYTES + 127) / 128 * 128;
  static constexpr bool FP4 = Element::BYTES == 64;
  unsigned char columns[GROUPS][N * (FP4 ? 128 : 256)];  // at whole 1,024 bytes
  unsigned char stage[STAGES][STAGE_BYTES];
  float weights[GROUPS][N];
  float4 scales[FP4 ? GROUPS * 4 : 1][FP4 ? 16 : 1];  // of the keys of each warp
  int keys[GROUPS][8];
  u64 full[STAGES], empty[STAGES];
  Unit unit[STAGES];
  u32 sums[2][32];
  int first_row, first_unit, first_pages;
};

// Twice the rectified number; NaN stays. The adder is faster than a comparison, and no product is infinite.
__device__ __forceinline__ float rectified_twice(float x) {
  return x + fabsf(x);
}

__device__ __forceinline__ float rectified(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Asks for a line of memory to be brought near.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The keys of a row; none where its request does not exist.
__device__ __forceinline__ int keys_of(const Scoring& p, int row, int& request) {
  request = -1;
  if (row >= p.rows) return 0;
  int length = p.row_len[row * p.len_stride], its = p.row_req[row * p.req_stride];  // both under way together
  int keys = min(local_length(length, p.shard), p.room);
  if (keys <= 0 || its < 0 || its >= p.requests) return 0;
  request = its;
  return keys;
}

// Pages that a row brings in: those of all rows of its block with its request, if it is the first of them.
template <int ROWS>
__device__ __forceinline__ int pages_of(const Scoring& p, int row) {
  int request, keys = keys_of(p, row, request);
  if (keys == 0) return 0;
#pragma unroll 1
  for (int other = row / ROWS * ROWS; ROWS > 1 && other < row / ROWS * ROWS + ROWS; other++) {
    int its, more = keys_of(p, other, its);
    if (more == 0 || its != request) continue;
    if (other < row) return 0;
    keys = max(keys, more);
  }
  return (keys + PAGE - 1) / PAGE;
}

template <typename Element, int N, int HEADS, int GROUPS, int STAGES>
struct Scorer {
  static constexpr bool LARGE = N == 256 && Element::BYTES == 128;  // accumulators need the producer's registers
  static constexpr int ROWS = N / HEADS, THREADS = GROUPS * 128 + (LARGE ? 128 : 32);
  using Memory = Ring<Element, N, GROUPS, STAGES>;
  static constexpr bool FP4 = Element::BYTES == 64;
  static constexpr bool HELD = N <= 64;  // weights stay in registers

  const Scoring& p;
  Memory& m;

  // The units of this block: how many, from which row and which unit of it.
  __device__ __forceinline__ int share() {
    int total = 0, now = 0, count = 0;
    u32 sum, turn = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
      u32 before = 0;
#pragma unroll 1
      for (int base = 0; base < p.rows; base += THREADS) {
        int row = base + threadIdx.x, pages = row < p.rows ? pages_of<ROWS>(p, row) : 0;
        int begin = before + block_before<THREADS>(pages, m.sums[turn ^= 1], sum);
        before += sum;
        if (pass == 0 && p.rows <= THREADS) {  // one look is enough
          total = sum;
          divide(total, now, count);
        }
        if ((pass == 1 || p.rows <= THREADS) && count > 0 && begin <= now && now < begin + pages) {
          m.first_row = row;
          m.first_unit = now - begin;
          m.first_pages = pages;
        }
      }
      if (p.rows <= THREADS) break;
      total = before;
      divide(total, now, count);
    }
    __syncthreads();
    return count;
  }

  // The same of up to 32 rows, by each warp for itself.
  __device__ __forceinline__ int share_few(int& row, int& first, int& all) {
    int mine = lane(), pages = 0;
    if constexpr (ROWS == 1) {
      int length = 0, its = -1;
      if (mine < p.rows) {
        length = p.row_len[mine * p.len_stride];
        its = p.row_req[mine * p.req_stride];
      }
      prefetch_all();  // while these are under way
      int keys = min(local_length(length, p.shard), p.room);
      if (its >= 0 && its < p.requests) pages = (max(keys, 0) + PAGE - 1) / PAGE;
    } else {
      prefetch_all();
      if (mine < p.rows) pages = pages_of<ROWS>(p, mine);
    }
    int until = warp_inclusive(pages), total = __shfl_sync(EVERY, until, 31), now, count;
    divide(total, now, count);
    u32 who = __ballot_sync(EVERY, until - pages <= now && now < until);
    row = who ? __ffs(who) - 1 : 0;
    first = now - __shfl_sync(EVERY, until - pages, row);
    all = __shfl_sync(EVERY, pages, row);
    return count;
  }

  __device__ __forceinline__ void divide(int total, int& now, int& count) const {
    int each = (total + gridDim.x - 1) / gridDim.x;
    now = blockIdx.x * each;
    count = max(0, min(each, total - now));
  }

  // Keeps the ring filled, some pages at a time, each by a lane of its own.
  __device__ __forceinline__ void produce(int count) {
    constexpr int TOGETHER = STAGES / 2 < 32 ? STAGES / 2 : 32;
    int row = m.first_row, from = m.first_unit, pages = m.first_pages, done = 0;
#pragma unroll 1
    while (done < count) {
      int some = min(pages - from, count - done);
      if (some > 0) {
        const int* table = p.table + p.row_req[row * p.req_stride] * p.table_row + from;
        bool mine = static_cast<int>(lane()) < TOGETHER;
        int next = mine && static_cast<int>(lane()) < some ? table[lane()] : -1;
#pragma unroll 1
        for (int i = lane(); i - static_cast<int>(lane()) < some; i += TOGETHER) {
          int page = next, number = done + i, slot = number % STAGES;
          next = mine && i + TOGETHER < some ? table[i + TOGETHER] : -1;
          if (mine && i < some) {
            if (number >= STAGES) barrier_wait(&m.empty[slot], (number / STAGES - 1) & 1);
            bool present = page >= 0 && page < p.pages;
            m.unit[slot] = Unit{row, (from + i) * PAGE, present ? page : -1};
            if (present) {
              barrier_expect(&m.full[slot], Memory::PAGE_BYTES);
              copy_bulk(m.stage[slot], p.cache + page * p.cache_page, Memory::PAGE_BYTES, &m.full[slot]);
            } else {
              barrier_arrive(&m.full[slot]);
            }
          }
          __syncwarp();
        }
        done += some;
      }
      row++;
      from = 0;
      if (done < count) pages = pages_of<ROWS>(p, row);
    }
  }

  // Decodes the queries of a block of rows into this warpgroup's columns; true where float16 does not hold them, or
  // float32 what they weigh.
  __device__ __forceinline__ bool load_queries(int group, int row, float (&held)[N / 4]) {
    int block = row / ROWS * ROWS, thread = threadIdx.x % 128, its = -1, keys = 0, request = 0;
    bool held_all = true;
    if (thread < ROWS) {
      keys = keys_of(p, block + thread, its);
      request = p.row_req[row * p.req_stride];
    }
    meet(group);
#pragma unroll 1
    for (int item = thread; item < N * 4; item += 128) {
      int n = item / 4, c = item % 4, mine = block + n / HEADS, head = n % HEADS;
      bool live = mine < p.rows && head < p.heads;
      float w = live ? weight(mine, head) : 0.0f;  // every load is under way before one is waited for
      u32 codes = 0x7f7f7f7fu;
      if constexpr (FP4) {
        uint4 all = make_uint4(0, 0, 0, 0);
        if (live) {
          load_bytes<1>(&all, p.q + mine * p.q_row + head * p.q_head, c);
          codes = scales_of(mine, head);
        }
        held_all = put_group(m.columns[group], n, c, all, codes) && held_all;
      } else {
        Element e{};
        u32 piece[8][2];
        if (live) load_bytes<2>(&e.low, p.q + mine * p.q_row + head * p.q_head, c);
        e.decode(piece);
#pragma unroll
        for (int s = 0; s < 8; s++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 at = column_offset(n, 16 * s + 8 * half + 2 * c, N);
            *reinterpret_cast<u32*>(m.columns[group] + at) = piece[s][half];
          }
        }
      }
      if constexpr (FP4) {
        float unit = w * power(Fp4::largest(codes));
        // Else it has no bits left, or its sums none above, that a key's scale brings back.
        held_all = held_all && (w == 0.0f || (fabsf(unit) > 0x1p-100f && fabsf(unit) < 0x1p100f));
        w = unit;
      }
      if (c == 0) m.weights[group][n] = w;
    }
    if (thread < ROWS) m.keys[group][thread] = its == request ? keys : 0;
    publish();
    bool odd = false;
    if constexpr (FP4) {
      u32 told;
      asm volatile(
          "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
          : "=r"(told)
          : "r"(static_cast<u32>(!held_all)), "r"(group + 1)
          : "memory");
      odd = told;
    } else {
      meet(group);
    }
    if constexpr (HELD) {
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        float2 pair = weight_pair(group, j);
        held[2 * j] = pair.x;
        held[2 * j + 1] = pair.y;
      }
    }
    return odd;
  }

  // Group `g` of a query as e4m3, times 2^6 and its scale relative to the query's largest; false where that is not exact.
  static __device__ __forceinline__ bool put_group(unsigned char* columns, int n, int g, const uint4& all, u32 codes) {
    u32 below = Fp4::largest(codes) - (codes >> 8 * g & 255);
    u32 factor = (27 - min(below, 14u)) * 0x04000400u;  // 2^12 / 2^below
    u32 word[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 at = byte_offset(n, 32 * g + 4 * i);
      *reinterpret_cast<u32*>(columns + at) = Fp4::scaled(Fp4::even(word[i]), factor);
      at = byte_offset(n, 32 * g + 16 + 4 * i);
      *reinterpret_cast<u32*>(columns + at) = Fp4::scaled(Fp4::odd(word[i]), factor);
    }
    return below <= 14 || !((all.x | all.y | all.z | all.w) & 0x77777777u);
  }

  // Loads a lane's vectors of a query, 64 bytes from each other; queries may stand at any byte.
  template <int VECTORS>
  __device__ __forceinline__ void load_bytes(uint4* to, const unsigned char* at, int c) const {
    if (reinterpret_cast<u64>(at) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) to[i] = *reinterpret_cast<const uint4*>(at + 64 * i + 16 * c);
      return;
    }
    __align__(16) unsigned char copy[VECTORS * 16];
#pragma unroll
    for (int i = 0; i < VECTORS * 16; i++) copy[i] = at[i / 16 * 64 + 16 * c + i % 16];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) to[i] = reinterpret_cast<uint4*>(copy)[i];
  }

  __device__ __forceinline__ u32 scales_of(int row, int head) const {
    const unsigned char* at = p.q_scale + row * p.q_scale_row + head * p.q_scale_head;
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24;
  }

  __device__ __forceinline__ float2 weight_pair(int group, int j) const {
    return *reinterpret_cast<const float2*>(&m.weights[group][8 * j + lane() % 4 * 2]);
  }

  __device__ __forceinline__ void consume(int group, int count) {
    u32 c = lane() % 4;
    int token = warp() % 4 * 16 + lane() / 4, row = -1, next = m.first_row, number = group;
    bool odd = false;
    float held[N / 4];
#pragma unroll 1
    while (number < count) {
      if (next != row) {  // for the first row before its first page has come
        row = next;
        odd = load_queries(group, row, held);
      }
      int slot = number % STAGES;
      barrier_wait(&m.full[slot], number / STAGES & 1);
      Unit unit = m.unit[slot];
      next = unit.row;
      if (next != row) continue;
      number += GROUPS;
      float scale[2], sum[ROWS][2];
      if constexpr (FP4) {
        score_groups(group, slot, held, sum, scale);
        if (odd && unit.page >= 0) {
          store_plainly(group, unit, token);
          continue;
        }
      } else {
        score_page(group, slot, token, held, sum, scale);
      }
      store(group, unit, token, sum, scale);
    }
  }

  // FP8: a page's keys as float16, times all heads.
  __device__ __forceinline__ void score_page(int group, int slot, int token, float (&held)[N / 4],
                                             float (&sum)[ROWS][2], float (&scale)[2]) const {
    const unsigned char* stage = m.stage[slot];
    u32 a[8][4], c = lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Element e;
      u32 piece[8][2];
      e.load(stage + (token + 8 * half) * Element::BYTES, c);
      u32 code = reinterpret_cast<const u32*>(stage + PAGE * Element::BYTES)[token + 8 * half];
      e.decode(piece);
      scale[half] = p.e8m0 ? power(code & 255) : __uint_as_float(code);
#pragma unroll
      for (int s = 0; s < 8; s++) {
        a[s][half] = piece[s][0];
        a[s][2 + half] = piece[s][1];
      }
    }
    release(slot);
    if constexpr (LARGE) {  // rows are added up while those behind them are still multiplied
      float low[N / 16][4], high[N / 16][4];
      multiply<N / 2, N>(low, a, m.columns[group], 0);
      multiply<N / 2, N>(high, a, m.columns[group], N / 2);
      multiplied<1>();
      weigh<0, ROWS / 2>(group, low, held, sum);
      multiplied<0>();
      weigh<ROWS / 2, ROWS>(group, high, held, sum);
    } else {
      float d[N / 8][4];
      multiply<N, N>(d, a, m.columns[group], 0);
      multiplied<0>();
      weigh<0, ROWS>(group, d, held, sum);
    }
  }

  // This warp has read the page.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(&m.empty[slot]);
  }

  // MXFP4: each group of 32 numbers by itself, in e4m3, times 32 heads; groups are added up by their scales.
  __device__ __forceinline__ void score_groups(int group, int slot, float (&held)[N / 4], float (&sum)[ROWS][2],
                                               float (&scale)[2]) const {
    const unsigned char* stage = m.stage[slot];
    u32 a[4][4], first = warp() % 4 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 word[4];
      load_matrices(word, stage + (first + 8 * half + lane() % 8) * Element::BYTES + lane() / 8 * 16);
#pragma unroll
      for (int g = 0; g < 4; g++) {
        a[g][half] = Fp4::even(word[g]);
        a[g][2 + half] = Fp4::odd(word[g]);
      }
    }
    // A lane has two of a key's four exponents, which count from the largest.
    u32 codes = reinterpret_cast<const unsigned short*>(stage + PAGE * Element::BYTES)[first * 2 + lane()];
    u32 top = max(codes & 255, codes >> 8);
    top = max(top, __shfl_xor_sync(EVERY, top, 1));
    reinterpret_cast<float2*>(m.scales[warp()])[lane()] =
        make_float2(power_below(top - (codes & 255)), power_below(top - (codes >> 8)));
    scale[0] = power(__shfl_sync(EVERY, top, lane() / 4 * 2));
    scale[1] = power(__shfl_sync(EVERY, top, lane() / 4 * 2 + 16));
    release(slot);
    float4 low = m.scales[warp()][lane() / 4], high = m.scales[warp()][lane() / 4 + 8];
    float of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = 0.0f;
#pragma unroll
    for (int part = 0; part < N / 32; part++) {
      float d[2][4][4], all[4][4];
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        multiply_group(d[0], a[2 * pair], m.columns[group], 32 * part, 2 * pair);
        multiply_group(d[1], a[2 * pair + 1], m.columns[group], 32 * part, 2 * pair + 1);
        multiplied<1>();
        add_group(all, d[0], of_low[2 * pair], of_high[2 * pair], pair == 0);
        multiplied<0>();
        add_group(all, d[1], of_low[2 * pair + 1], of_high[2 * pair + 1], false);
      }
      weigh_part(group, part, all, held, sum[part * 32 / HEADS]);
    }
  }

  // 2^-below; 0 where a float32 beside the largest is not moved by it.
  static __device__ __forceinline__ float power_below(u32 below) {
    return __uint_as_float(static_cast<u32>(max(127 - static_cast<int>(below), 0)) << 23);
  }

  static __device__ __forceinline__ void add_group(float (&all)[4][4], const float (&d)[4][4], float low, float high,
                                                   bool first) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float by = i < 2 ? low : high;
        all[j][i] = first ? d[j][i] * by : fmaf(d[j][i], by, all[j][i]);
      }
    }
  }

  // Rectifies, weighs and adds up 32 columns.
  __device__ __forceinline__ void weigh_part(int group, int part, const float (&all)[4][4], float (&held)[N / 4],
                                             float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int j = part * 4 + i;
      float2 w = HELD ? make_float2(held[2 * j], held[2 * j + 1]) : weight_pair(group, j);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sum[half] = fmaf(rectified_twice(all[i][2 * half]), w.x, sum[half]);
        sum[half] = fmaf(rectified_twice(all[i][2 * half + 1]), w.y, sum[half]);
      }
    }
  }

  // Rectifies, weighs and adds up the heads that this lane holds of rows FIRST to LAST, for two keys.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void weigh(int group, float (&d)[(LAST - FIRST) * HEADS / 8][4], float (&held)[N / 4],
                                        float (&sum)[ROWS][2]) const {
#pragma unroll
    for (int r = FIRST; r < LAST; r++) {
      sum[r][0] = sum[r][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < HEADS / 8; i++) {
        int j = r * (HEADS / 8) + i, k = j - FIRST * (HEADS / 8);
        float2 w = HELD ? make_float2(held[2 * j], held[2 * j + 1]) : weight_pair(group, j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          sum[r][half] = fmaf(rectified_twice(d[k][2 * half]), w.x, sum[r][half]);
          sum[r][half] = fmaf(rectified_twice(d[k][2 * half + 1]), w.y, sum[r][half]);
        }
      }
    }
  }

  // This lane's heads of a row for one key, number by number: for keys and queries that float16 does not hold.
  __device__ __forceinline__ float add_plainly(const unsigned char* page, int token, int row) const {
    const unsigned char* key = page + token * Element::BYTES;
    const unsigned char* codes = page + PAGE * Element::BYTES + token * 4;
    float sum = 0.0f;
#pragma unroll 1
    for (int head = lane() % 4; head < p.heads && row < p.rows; head += 4) {
      const unsigned char* query = p.q + row * p.q_row + head * p.q_head;
      u32 scales = scales_of(row, head);
      float dot = 0.0f;
#pragma unroll 1
      for (int g = 0; g < 4; g++) {
        float part = 0.0f;
#pragma unroll 1
        for (int i = 32 * g; i < 32 * g + 32; i++) part += Fp4::element(key, i) * Fp4::element(query, i);
        dot += part * power(codes[g]) * power(scales >> 8 * g & 255);
      }
      sum += rectified(dot) * weight(row, head) * 2.0f;  // as products are
    }
    return sum;
  }

  __device__ __forceinline__ float weight(int row, int head) const {
    long long where = row * p.weights_row + head;
    return p.weights_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[where])
                          : static_cast<const float*>(p.weights)[where];
  }

  // Adds up the four lanes of each key; lane c then has key c % 2 of every second row, and stores it.
  __device__ __forceinline__ void store(int group, const Unit& unit, int token, float (&sum)[ROWS][2],
                                        float (&scale)[2]) {
    u32 half = lane() % 2, odd = lane() / 2 % 2;
    int place = unit.first + token + 8 * half, block = unit.row / ROWS * ROWS;
    float factor = half ? scale[1] : scale[0];
    float one[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      one[r] = half ? sum[r][1] : sum[r][0];
      one[r] += __shfl_xor_sync(EVERY, half ? sum[r][0] : sum[r][1], 1);
    }
    if constexpr (ROWS == 1) {
      float score = (one[0] + __shfl_xor_sync(EVERY, one[0], 2)) * 0.5f * factor;
      if (!odd) put(unit, block, place, score, m.keys[group][0]);
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r += 2) {
        float mine = odd ? one[r + 1] : one[r];
        mine += __shfl_xor_sync(EVERY, odd ? one[r] : one[r + 1], 2);
        put(unit, block + r + odd, place, mine * 0.5f * factor, m.keys[group][r + odd]);
      }
    }
  }

  __device__ __forceinline__ void store_plainly(int group, const Unit& unit, int token) const {
    const unsigned char* page = p.cache + unit.page * p.cache_page;
#pragma unroll 1
    for (int i = 0; i < 2 * ROWS; i++) {
      int row = unit.row / ROWS * ROWS + i / 2, key = token + i % 2 * 8;
      float sum = add_plainly(page, key, row);
      sum += __shfl_xor_sync(EVERY, sum, 1);
      sum += __shfl_xor_sync(EVERY, sum, 2);
      if (lane() % 4 == 0) put(unit, row, unit.first + key, sum * 0.5f, m.keys[group][i / 2]);
    }
  }

  __device__ __forceinline__ void put(const Unit& unit, int row, int place, float score, int keys) const {
    if (place >= keys) return;
    if (unit.page < 0) score = -INFINITY;
    long long at = row * p.out_row + place;
    if (p.out_bf16) static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(score);
    else static_cast<float*>(p.out)[at] = score;
  }

  // Page numbers and queries come near while the lengths are still under way.
  __device__ __forceinline__ void prefetch_all() const {
    constexpr int LINES = 8192;
    if (p.room <= 0) return;
    int line = blockIdx.x * THREADS + threadIdx.x;
    long long table = (p.requests - 1) * p.table_row + (p.room + PAGE - 1) / PAGE;
    if (table <= LINES * 32 && line * 32 < table) prefetch(p.table + line * 32);
    long long queries = (p.rows - 1) * p.q_row + p.heads * p.q_head;
    if (queries <= LINES * 128 && line * 128 < queries) prefetch(p.q + line * 128);
  }

  __device__ __forceinline__ void run() {
    let_followers_start();
    if (threadIdx.x < STAGES) {
      barrier_init(&m.full[threadIdx.x], 1);
      barrier_init(&m.empty[threadIdx.x], 4);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      publish();
    }
    int count;
    if (p.rows <= 32) {
      int row = 0, first = 0, all = 0;
      count = share_few(row, first, all);
      if (threadIdx.x == 0) {
        m.first_row = row;
        m.first_unit = first;
        m.first_pages = all;
      }
      __syncthreads();
    } else {
      prefetch_all();
      count = share();  // synchronises
    }
    if (count == 0) return;
    int group = __shfl_sync(EVERY, warp() / 4, 0);  // known to be the same in all lanes
    if (group == GROUPS) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      if constexpr (LARGE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
      if (warp() == GROUPS * 4) produce(count);
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      if constexpr (LARGE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
      consume(group, count);
    }
  }
};

// N columns of heads padded to HEADS; warpgroups; pages in the ring.
#define SCORES(NAME, ELEMENT, N, HEADS, GROUPS, STAGES)                                                            \
  extern "C" __global__ void __launch_bounds__(Scorer<ELEMENT, N, HEADS, GROUPS, STAGES>::THREADS, 1) NAME(const __grid_constant__ Scoring p) {     \
    extern __shared__ __align__(1024) unsigned char memory[];                                                      \
    using This = Scorer<ELEMENT, N, HEADS, GROUPS, STAGES>;                                                        \
    This{p, *reinterpret_cast<This::Memory*>(memory)}.run();                                                       \
  }                                                                                                                \
  static_assert(sizeof(Ring<ELEMENT, N, GROUPS, STAGES>) <= 232448, "no block has so much shared memory");           \
  static_assert(STAGES % GROUPS == 0, "a warpgroup that is ahead would take the page before for the one it waits for");
