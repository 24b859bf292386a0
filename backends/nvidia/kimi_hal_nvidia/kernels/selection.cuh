// Selection of the k best scores of a row: what every form of it needs.
//
// Rows are read in whole vectors of 16 bytes: what stands beside a row in its first and last one is loaded and dropped.
#pragma once
#include "order.cuh"
#include "shards.cuh"

struct Selection {
  const void* scores;
  const int* row_len;
  const int* row_start;
  int* out;
  void* scores_out;
  const int* table;
  const int* row_req;
  long long scores_row, out_row, scores_out_row, table_row, len_stride, start_stride, req_stride;
  int width, k, blocks;
  Shard shard;
  int requests, pages, page;
  int selected, slots, selected_bf16;
};

// A condition whose code stands before what is done else.
__device__ __forceinline__ bool often(bool condition) { return __builtin_expect(condition, true); }

constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int MOST_K = 2048;

struct Tally {
  uint4 bins[BINS / 4];
  u32 sums[2][32];
  uint4 found;  // see `find`
  u32 listed, collected;
};

template <typename Score>
struct Vector;
template <>
struct Vector<float> {
  static constexpr int WIDTH = 4;
  float x[4];
  __device__ __forceinline__ void take(uint4 v) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  }
  __device__ __forceinline__ void load(const float* at) { take(__ldg(reinterpret_cast<const uint4*>(at))); }
};
template <>
struct Vector<__nv_bfloat16> {
  static constexpr int WIDTH = 8;
  float x[8];
  __device__ __forceinline__ void load(const __nv_bfloat16* at) { take(__ldg(reinterpret_cast<const uint4*>(at))); }
  __device__ __forceinline__ void take(uint4 v) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = __uint_as_float(w[i] << 16);
      x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The bins, once they are of no more use, as room for positions.
__device__ __forceinline__ int* stage(Tally& t) { return reinterpret_cast<int*>(t.bins); }

__device__ __forceinline__ u32* bins(Tally& t) { return reinterpret_cast<u32*>(t.bins); }
__device__ __forceinline__ void count(Tally& t, u32 bin) { atomicAdd(bins(t) + bin, 1u); }
// The same of a bin's first byte.
__device__ __forceinline__ void count_at(Tally& t, u32 byte) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(shared_address(t.bins) + byte) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void clear_bins(Tally& t) {
  constexpr int EACH = THREADS < BINS / 4 ? BINS / 4 / THREADS : 1;
  if (THREADS > BINS / 4 && threadIdx.x >= BINS / 4) return;
#pragma unroll
  for (int i = 0; i < EACH; i++) t.bins[i * THREADS + threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Finds the largest bin that, with all above it, holds `needed`: found = {bin, keys above it, keys in it}. `take` gives
// four bins. Callers have filled them and synchronised; `turn` alternates between the rooms for sums.
template <int THREADS, typename Take>
__device__ __forceinline__ void find(Tally& t, u32 needed, u32 turn, Take take) {
  constexpr int QUADS = THREADS < BINS / 4 ? BINS / 4 / THREADS : 1, EACH = QUADS * 4;  // bins a thread, from the last down
  u32 mine[EACH] = {}, sum = 0;
  if (THREADS <= BINS / 4 || threadIdx.x < BINS / 4) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      uint4 four = take(BINS / 4 - 1 - (threadIdx.x * QUADS + i));
      mine[4 * i] = four.w, mine[4 * i + 1] = four.z, mine[4 * i + 2] = four.y, mine[4 * i + 3] = four.x;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += mine[i];
  u32 until = warp_inclusive(sum);
  if (lane() == 31) t.sums[turn][warp()] = until;
  __syncthreads();
  u32 sums = lane() < warp() ? t.sums[turn][lane()] : 0;
  u32 over = __reduce_add_sync(EVERY, sums) + until - sum;
  if (over < needed && needed <= over + sum) {
    uint4 found = make_uint4(BINS - 1 - threadIdx.x * EACH, over, mine[0], 0);
#pragma unroll
    for (int i = 1; i < EACH; i++) {
      over += mine[i - 1];
      if (over < needed) found.x--, found.y = over, found.z = mine[i];
    }
    t.found = found;
  }
  __syncthreads();
}

// The same of bins that are zero behind it.
template <int THREADS>
__device__ __forceinline__ void find(Tally& t, uint4* bins, u32 needed, u32 turn) {
  find<THREADS>(t, needed, turn, [&](int quad) {
    uint4 four = bins[quad];
    bins[quad] = make_uint4(0, 0, 0, 0);
    return four;
  });
}

// One row: where it is and where its winners go. It belongs to a block, or to a cluster of blocks. The leader may have
// written the scores, and nothing else that the constructor reads.
template <typename Score, bool ROUND, int THREADS, bool CLUSTERED>
struct Row {
  static constexpr int WIDTH = Vector<Score>::WIDTH;
  const Selection& p;
  long long row;
  const Score* at;   // its first key
  const Score* base; // the whole vector that holds it
  int start, skew;   // first column; columns of that vector before it
  int n, rank;       // keys; this block's number in the cluster
  int length, request;

  __device__ __forceinline__ Row(const Selection& p) : p(p) {
    u32 cluster = blockIdx.x, block = 0;
    if constexpr (CLUSTERED) {
      asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    }
    row = cluster;
    rank = block;
    length = p.row_len[row * p.len_stride];
    request = p.row_req ? p.row_req[row * p.req_stride] : 0;
    start = p.row_start ? min(max(p.row_start[row * p.start_stride], 0), p.width) : 0;
    at = static_cast<const Score*>(p.scores) + row * p.scores_row + start;
    skew = static_cast<int>(reinterpret_cast<u64>(at) % 16 / sizeof(Score));
    base = at - skew;
  }

  __device__ __forceinline__ void measure() {
    n = min(local_length(length, p.shard), p.width - start);
    if (p.row_req && (request < 0 || request >= p.requests)) n = min(n, 0);
  }

  __device__ __forceinline__ u32 key_of(float x) const { return ordinal(ROUND ? rounded(x) : x); }
  __device__ __forceinline__ float score_at(int place) const {
    return ROUND ? rounded(as_float(at[place])) : as_float(at[place]);
  }
  __device__ __forceinline__ u32 key_at(int place) const { return ordinal(score_at(place)); }

  __device__ __forceinline__ void select(u32 to, float x) const {
    long long where = row * p.scores_out_row + to;
    if (p.selected_bf16) static_cast<__nv_bfloat16*>(p.scores_out)[where] = __float2bfloat16_rn(x);
    else static_cast<float*>(p.scores_out)[where] = x;
  }

  // Writes staged positions as winners `to` and on, or the slots of positions whose pages are all `present`.
  __device__ __forceinline__ void write(const int* staged, u32 to, u32 winners, bool present) const {
    constexpr int EACH = MOST_K / THREADS;
    int place[EACH], what[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      u32 from = i * THREADS + threadIdx.x;
      place[i] = what[i] = from < winners ? staged[from] : 0;
    }
    if (present && p.slots) {
      const int* table = p.table + request * p.table_row;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        u32 size = p.page, page = static_cast<u32>(place[i]) / size;
        what[i] = table[page] * size + (place[i] - page * size);
      }
    }
    to += threadIdx.x;
    int* out = p.out + row * p.out_row + to;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (i * THREADS + threadIdx.x < winners) out[i * THREADS] = what[i];
    }
    if (p.selected) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < winners; i += THREADS, to += THREADS) select(to, as_float(at[staged[i]]));
    }
  }

  // A row with no more keys than are wanted.
  __device__ __forceinline__ void take_all() const {
#pragma unroll 1
    for (int i = rank * THREADS + threadIdx.x; i < p.k; i += p.blocks * THREADS) {
      p.out[row * p.out_row + i] = i < n ? i : -1;
      if (p.selected) select(i, i < n ? as_float(at[i]) : -INFINITY);
    }
  }

  // Turns positions into slots, in place; those on a page that is none are left out.
  __device__ __forceinline__ void to_slots(Tally& t, u32 turn) const {
    if (rank) return;
    constexpr int EACH = MOST_K / THREADS;
    int* out = p.out + row * p.out_row;
    const int* table = p.table + (n > 0 ? request : 0) * p.table_row;
    int slot[EACH];
    float score[EACH];
    u32 mine = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int from = threadIdx.x * EACH + i;
      int place = from < min(n, p.k) ? reinterpret_cast<volatile int*>(out)[from] : -1;
      int page = place < 0 ? -1 : table[place / p.page];
      slot[i] = page < 0 || page >= p.pages ? -1 : page * p.page + place % p.page;
      score[i] = slot[i] >= 0 && p.selected ? as_float(at[place]) : 0.0f;
      mine += slot[i] >= 0;
    }
    u32 to = block_before<THREADS>(mine, t.sums[turn], total);  // synchronises behind the reads
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (slot[i] < 0) continue;
      out[to] = slot[i];
      if (p.selected) select(to, score[i]);
      to++;
    }
#pragma unroll 1
    for (u32 i = total + threadIdx.x; i < static_cast<u32>(p.k); i += THREADS) {
      out[i] = -1;
      if (p.selected) select(i, -INFINITY);
    }
  }
};

// The three forms that scores come in: float32, float32 rounded to bfloat16 first, bfloat16.
#define EVERY_FORM(KERNEL)      \
  KERNEL(float32, float, false) \
  KERNEL(rounded, float, true)  \
  KERNEL(bfloat16, __nv_bfloat16, false)
