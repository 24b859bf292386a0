// topk_select of longer rows: a row belongs to a cluster of blocks, or to one, each with a slice of its columns.
//
// Every block samples the same scores of the row and so finds the same threshold, which at least k of its keys are very
// likely to reach, and not many more. One pass over the slice lists the keys that reach it, and the k-th best is chosen
// among those of all blocks. Winners become bits of a map of the slice, so that they stand in order without being
// sorted. Where too few or too many keys reach the threshold, all keys take the place of those listed.
#pragma once
#include "together.cuh"

constexpr int LIKES = 512;  // keys of one bin that are exchanged

template <int WARPS, int CAP, int WORDS, bool CLUSTERED>
struct Room {
  uint2 found[WARPS][CAP];  // each warp's: score bits and position
  u32 map[WORDS];           // winners by position
  Exchange<CLUSTERED, LIKES> exchange;
};

// Bin of one score.
__device__ __forceinline__ u32 bin_of(float x) { return (pair_of_bins(x, x) & 0xffff) / 4; }

// What the choice asks of the keys that a warp has listed.
template <typename Row>
struct Listed {
  const Row& row;
  const uint2* found;
  u32 size;

  __device__ __forceinline__ float score(u32 i) const { return __uint_as_float(found[i].x); }
  __device__ __forceinline__ u64 strict_of(u32 i) const { return strict(ordinal(score(i)), found[i].y); }
  __device__ __forceinline__ void count_all(Tally& t) const {
#pragma unroll 1
    for (u32 i = lane(); i < size; i += 32) count(t, bin_of(score(i)));
  }
  __device__ __forceinline__ u32 above(u32 bin) const {
    u32 some = 0;
#pragma unroll 1
    for (u32 i = lane(); i < size; i += 32) some += bin_of(score(i)) > bin;
    return some;
  }
  template <typename F>
  __device__ __forceinline__ void each_of(u32 bin, F f) const {
#pragma unroll 1
    for (u32 i = lane(); i < size; i += 32) {
      if (bin_of(score(i)) == bin) f(strict_of(i));
    }
  }
  // Calls back with the position of each winner.
  template <typename F>
  __device__ __forceinline__ void each_winner(const Cut& cut, F f) const {
#pragma unroll 1
    for (u32 i = lane(); i < size; i += 32) {
      u32 bin = bin_of(score(i));
      if (bin > cut.bin || (bin == cut.bin && strict_of(i) >= cut.cut)) f(found[i].y);
    }
  }
};

// The same of all keys of a slice, read again at every question.
template <typename Row, int THREADS>
struct Unlisted {
  const Row& row;
  int from, to;

  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (int i = from + static_cast<int>(threadIdx.x); i < to; i += THREADS) f(row.score_at(i), i);
  }
  __device__ __forceinline__ void count_all(Tally& t) const {
    each([&](float x, int) { count(t, bin_of(x)); });
  }
  __device__ __forceinline__ u32 above(u32 bin) const {
    u32 some = 0;
    each([&](float x, int) { some += bin_of(x) > bin; });
    return some;
  }
  template <typename F>
  __device__ __forceinline__ void each_of(u32 bin, F f) const {
    each([&](float x, int i) {
      if (bin_of(x) == bin) f(strict(ordinal(x), i));
    });
  }
  template <typename F>
  __device__ __forceinline__ void each_winner(const Cut& cut, F f) const {
    each([&](float x, int i) {
      u32 bin = bin_of(x);
      if (bin > cut.bin || (bin == cut.bin && strict(ordinal(x), i) >= cut.cut)) f(static_cast<u32>(i));
    });
  }
};

template <typename Score, bool ROUND, int THREADS, int CAP, int WORDS, bool CLUSTERED>
struct Slices {
  using This = Row<Score, ROUND, THREADS, CLUSTERED>;
  static constexpr int WIDTH = This::WIDTH, WARPS = THREADS / 32;
  static constexpr int AHEAD = (CLUSTERED ? 32 : 16) / WIDTH;  // vectors under way
  static constexpr int SAMPLED = 16 / WIDTH;                   // of a thread

  const Selection& p;
  const This& row;
  Room<WARPS, CAP, WORDS, CLUSTERED>& m;
  Tally& t;
  Together<This, THREADS, CLUSTERED, LIKES>& together;
  int vectors, share;  // of the row, of a slice

  // First position of a slice.
  __device__ __forceinline__ int position(int who) const {
    return max(0, min(min(who * share, vectors) * WIDTH - row.skew, row.n));
  }

  __device__ __forceinline__ void load(Vector<Score>& v, int i) const {
    v.load(row.base + static_cast<long long>(i) * WIDTH);
    if constexpr (ROUND) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++) v.x[j] = rounded(v.x[j]);
    }
  }

  // Scores of a vector that are none of the row's become NaN.
  __device__ __forceinline__ void trim(Vector<Score>& v, int i) const {
    int place = i * WIDTH - row.skew;
    if (place >= 0 && place + WIDTH <= row.n) return;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      if (static_cast<u32>(place + j) >= static_cast<u32>(row.n)) v.x[j] = __uint_as_float(0x7fffffffu);
    }
  }

  // A vector of the sample, which is spread evenly over the row by lines of eight vectors.
  __device__ __forceinline__ int sample(int i) const {
    constexpr int ALL = SAMPLED * THREADS;
    int which = i * THREADS + static_cast<int>(threadIdx.x);
    if (vectors <= ALL) return which;
    return (static_cast<int>(static_cast<u64>(which / 8) * vectors / (ALL / 8)) & ~7) + which % 8;
  }

  // A threshold, the same in all blocks, that at least k keys are likely to reach; 0 where all have to be taken.
  __device__ __forceinline__ u32 sampled() {
    Vector<Score> v[SAMPLED];
#pragma unroll
    for (int i = 0; i < SAMPLED; i++) {
      if (int which = sample(i); which < vectors) load(v[i], which);
    }
#pragma unroll
    for (int i = 0; i < SAMPLED; i++) {
      trim(v[i], sample(i));  // also what is behind the row
#pragma unroll
      for (int j = 0; j < WIDTH; j += 2) {
        u32 pair = pair_of_bins(v[i].x[j], v[i].x[j + 1]);
        count(t, (pair & 0xffff) / 4);
        count(t, (pair >> 16) / 4);
      }
    }
    __syncthreads();
    int size = min(SAMPLED * THREADS * WIDTH, row.n);
    float mean = static_cast<float>(p.k) * size / row.n;
    u32 target = size == row.n ? p.k : min(size - 2 * WIDTH, static_cast<int>(mean + 4.5f * sqrtf(mean)) + 4);
    find<THREADS>(t, t.bins, target, together.turn ^= 1);
    u32 bin = t.found[0], above = t.found[1], reached = above + t.found[2];
    if (bin == 0) return 0;
    u32 low = least_of_bin(bin);
    float room = 0.7f * CAP * WARPS * p.blocks;
    if (static_cast<float>(reached) * row.n < room * size) return low;
    int shift = max(0, 32 - __clz(most_of_bin(bin) - low) - DIGIT);
#pragma unroll
    for (int i = 0; i < SAMPLED; i++) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
        if (bin_of(v[i].x[j]) == bin) count(t, ordinal(v[i].x[j]) - low >> shift);
      }
    }
    __syncthreads();
    find<THREADS>(t, t.bins, target - above, together.turn ^= 1);
    return low + (t.found[0] << shift);
  }

  // Lists every key of vectors [first, last) that reaches the threshold; returns how many a warp has.
  __device__ __forceinline__ u32 collect(u32 threshold, int first, int last) {
    bool all = threshold == 0;
    float least = all ? 0.0f : threshold <= MINUS_INFINITY ? -INFINITY : score_of(threshold);
    uint2* to = m.found[warp()];
    u32 size = 0;
#pragma unroll 1
    for (int base = first + static_cast<int>(warp()) * 32; base < last; base += THREADS * AHEAD) {
      Vector<Score> v[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        int which = base + a * THREADS + static_cast<int>(lane());
        if (which < last) load(v[a], which);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        int which = base + a * THREADS + static_cast<int>(lane()), place = which * WIDTH - row.skew;
        if (__any_sync(EVERY, which >= last || place < 0 || place + WIDTH > row.n)) {
          if (which >= last) place = row.n;
#pragma unroll
          for (int j = 0; j < WIDTH; j++) {
            if (static_cast<u32>(place + j) >= static_cast<u32>(row.n)) v[a].x[j] = __uint_as_float(0x7fffffffu);
          }
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
          bool hit = v[a].x[j] >= least || (all && static_cast<u32>(place + j) < static_cast<u32>(row.n));
          u32 hits = __ballot_sync(EVERY, hit);
          if (hits) {
            u32 slot = size + __popc(hits & lanes_below());
            if (hit && slot < CAP) to[slot] = make_uint2(__float_as_uint(v[a].x[j]), place + j);
            size += __popc(hits);
          }
        }
      }
    }
    return size;
  }

  // Writes the winners of this slice in order.
  template <typename Keys>
  __device__ __forceinline__ void emit(const Keys& keys, const Cut& cut) {
    constexpr int EACH = (WORDS + THREADS - 1) / THREADS;
    int begin = position(row.rank), end = position(row.rank + 1);
    u32 to = cut.above;
#pragma unroll 1
    for (int from = begin; from < end; from += WORDS * 32) {
      int words = (min(end - from, WORDS * 32) + 31) / 32, each = (words + THREADS - 1) / THREADS;
#pragma unroll 1
      for (int i = threadIdx.x; i < words; i += THREADS) m.map[i] = 0;
      __syncthreads();
      keys.each_winner(cut, [&](u32 place) {
        u32 at = place - from;
        if (at < WORDS * 32) atomicOr(&m.map[at / 32], 1u << at % 32);
      });
      __syncthreads();
      u32 mine = 0, total;
#pragma unroll 1
      for (int i = 0; i < each; i++) {
        int word = threadIdx.x * each + i;
        mine += word < words ? __popc(m.map[word]) : 0;
      }
      u32 at = block_before<THREADS>(mine, t.sums[together.turn ^= 1], total);
#pragma unroll 1
      for (int i = 0; i < each && mine; i++) {
        int word = threadIdx.x * each + i;
        if (word >= words) break;
#pragma unroll 1
        for (u32 bits = m.map[word]; bits; bits &= bits - 1) stage(t)[at++] = from + word * 32 + __ffs(bits) - 1;
      }
      __syncthreads();
      row.write(stage(t), to, total);
      to += total;
    }
    static_assert(EACH > 0);
  }

  __device__ __forceinline__ void run() {
    u32 threshold = row.n <= CAP * WARPS / 2 ? 0 : sampled();
    int first = min(row.rank * share, vectors), last = min(first + share, vectors);
    u32 size = collect(threshold, first, last);
    // All blocks have to have room for what they found, and together at least k keys.
    if (lane() == 0) {
      atomicAdd(&t.collected, min(size, static_cast<u32>(CAP)));
      if (size > CAP) t.listed = 1;
    }
    __syncthreads();
    u32 every = t.collected, full = t.listed;
    if constexpr (CLUSTERED) {
      together.note(m.exchange.notes, static_cast<u64>(full) << 32 | every, NOTES);
      together.hear(NOTES, 0, 0);
      u64 both = lane() < static_cast<u32>(p.blocks) ? m.exchange.notes[lane()] : 0;
      every = __reduce_add_sync(EVERY, static_cast<u32>(both));
      full = __reduce_or_sync(EVERY, static_cast<u32>(both >> 32));
    }
    bool told = every >= static_cast<u32>(p.k) && !full;
    if (told) {
      Listed<This> keys{row, m.found[warp()], size};
      choose(keys);
    } else {
      __syncthreads();
      if (threadIdx.x == 0) t.listed = 0;
      __syncthreads();
      Unlisted<This, THREADS> keys{row, position(row.rank), position(row.rank + 1)};
      choose(keys);
    }
  }

  template <typename Keys>
  __device__ __forceinline__ void choose(const Keys& keys) {
    Cut cut = together.choose(keys);
    emit(keys, cut);
  }
};

template <typename Score, bool ROUND, int THREADS, int CAP, int WORDS, bool CLUSTERED>
__device__ __forceinline__ void select_slices(const Selection& p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& m = *reinterpret_cast<Room<THREADS / 32, CAP, WORDS, CLUSTERED>*>(memory);
  using This = Row<Score, ROUND, THREADS, CLUSTERED>;
  This row(p);
  Tally& t = m.exchange.tally;
  Together<This, THREADS, CLUSTERED, LIKES> together{p, row, m.exchange, t, 0, 0, false};
  together.clear();
  if (threadIdx.x == 0) t.collected = 0;
  row.measure();
  __syncthreads();
  together.meet_blocks();
  constexpr int WIDTH = This::WIDTH;
  int vectors = (row.n + row.skew + WIDTH - 1) / WIDTH, share = (vectors + p.blocks - 1) / p.blocks;
  Slices<Score, ROUND, THREADS, CAP, WORDS, CLUSTERED> slices{p, row, m, t, together, vectors, share};
  if (row.n <= p.k) row.take_all();
  else slices.run();
  if (p.slots) {
    if constexpr (CLUSTERED) cluster_sync();
    else __syncthreads();
    row.to_slots(t, together.turn ^ 1);
  }
}
