// topk_select of rows of up to 8,192 columns: a block holds a row in registers.
#include "selection.cuh"

// Where this lane's ones of each field of `counts` stand among all of the block's; a field is a vector's, and a warp
// has 32 vectors of a field beside each other, behind those of its fields before.
template <int THREADS, int FIELDS>
__device__ __forceinline__ void places_of(u32 counts, u32* room, u32 (&places)[FIELDS]) {
  constexpr int BITS = 32 / FIELDS;
  constexpr u32 MASK = (1ull << BITS) - 1;
  u32 within = warp_inclusive(counts), all = __shfl_sync(EVERY, within, 31), total = 0;
#pragma unroll
  for (int i = 0; i < FIELDS; i++) {
    places[i] = total + ((within - counts) >> i * BITS & MASK);
    total += all >> i * BITS & MASK;
  }
  if (lane() == 0) room[warp()] = total;
  __syncthreads();
  u32 before = __reduce_add_sync(EVERY, lane() < warp() ? room[lane()] : 0);
#pragma unroll
  for (int i = 0; i < FIELDS; i++) places[i] += before;
}

template <typename Score, bool ROUND, int THREADS, int VECTORS>
__device__ __forceinline__ void select_short(const Selection& p) {
  using This = Row<Score, ROUND, THREADS>;
  constexpr int WIDTH = This::WIDTH, KEYS = VECTORS * WIDTH, BITS = 32 / VECTORS;
  extern __shared__ __align__(16) unsigned char memory[];
  Tally& t = *reinterpret_cast<Tally*>(memory);
  This row(p);
  int first = (warp() * VECTORS * 32 + lane()) * WIDTH - row.skew;  // position of this lane's first vector
  Vector<Score> v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {  // before the row's length is known
    int place = first + i * 32 * WIDTH;
    if (place < p.width - row.start) v[i].load(row.at + place);
  }
  row.measure();
  clear_bins<THREADS>(t);
  if (threadIdx.x == 0) t.listed = 0;
  __syncthreads();
  u32 turn = 0;
  if (row.n <= p.k) {
    row.take_all();
  } else {
    u32 needed = p.k, same = 0, last = 0, key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      u32 place = first + i / WIDTH * 32 * WIDTH + i % WIDTH;
      u32 found = row.key_of(v[i / WIDTH].x[i % WIDTH]);
      key[i] = place < static_cast<u32>(row.n) ? found : 0;
    }
    int shift = 32;
#pragma unroll 1
    do {  // digit by digit; `last` holds those found
      int done = shift;
      shift = max(0, shift - DIGIT);
      u32 low = last << (done - shift), range = 1u << (done - shift);
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        u32 digit = (key[i] >> shift) - low;
        if (digit < range && key[i]) count(t, digit);
      }
      __syncthreads();
      find<THREADS>(t, needed, turn ^= 1);
      last = low | t.found[0];
      needed -= t.found[1];
      same = t.found[2];
    } while (shift && same > LIST);
    if (shift) {
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        if (key[i] && key[i] >> shift == last) t.list[atomicAdd(&t.listed, 1u)] = key[i];
      }
      __syncthreads();
      last = rank_list<THREADS>(t, same, needed);
    }
    // Winners are the keys from `last` on, but for some of those equal to it.
    u32 won = 0, places[VECTORS], counts = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) won |= static_cast<u32>(key[i] >= last) << i;
    if (same > needed) {
      u32 equal = 0;
#pragma unroll
      for (int i = 0; i < KEYS; i++) equal |= static_cast<u32>(key[i] == last) << i;
#pragma unroll
      for (int i = 0; i < VECTORS; i++) counts |= __popc(equal >> i * WIDTH & ((1 << WIDTH) - 1)) << i * BITS;
      places_of<THREADS>(counts, t.sums[turn ^= 1], places);
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        if (equal >> i & 1 && places[i / WIDTH]++ >= needed) won &= ~(1u << i);
      }
    }
    counts = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) counts |= __popc(won >> i * WIDTH & ((1 << WIDTH) - 1)) << i * BITS;
    places_of<THREADS>(counts, t.sums[turn ^= 1], places);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      if (won >> i & 1) stage(t)[places[i / WIDTH]++] = first + i / WIDTH * 32 * WIDTH + i % WIDTH;
    }
    __syncthreads();
    row.write(stage(t), 0, p.k);
  }
  if (p.slots) {
    __syncthreads();
    row.to_slots(t, turn ^ 1);
  }
}

#define SHORT(NAME, SCORE, ROUND)                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 2) short_##NAME(const __grid_constant__ Selection p) { \
    select_short<SCORE, ROUND, 512, 16 / Vector<SCORE>::WIDTH>(p);                                         \
  }
EVERY_FORM(SHORT)
