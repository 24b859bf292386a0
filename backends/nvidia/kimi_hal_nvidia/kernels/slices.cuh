// topk_select of longer rows: a row belongs to a cluster of blocks, or to one, each with a slice of its columns.
//
// Every block of a cluster samples the same keys and so finds the same threshold, which at least k of the row's keys
// are very likely to reach, and not many more. One pass over the slices collects the keys that reach it; the blocks
// exchange them, and each finds the k-th best of all and the winners of its own slice. Winners become bits of a map
// of the slice, so that they stand in order without being sorted. Where too few or too many keys reach the threshold,
// the k-th best is found by digits over the whole slice.
#pragma once
#include "selection.cuh"

template <int CAP, int WORDS, bool EXCHANGED>
struct Room {
  uint2 all[CAP];                          // candidates of the row: score bits and position
  uint2 own[EXCHANGED ? CAP : 1];          // of this slice
  u32 above_map[WORDS], equal_map[WORDS];  // winners by position
  Tally tally;
};

template <typename Score, bool ROUND, int THREADS, int CAP, int WORDS, bool EXCHANGED>
struct Slices {
  using This = Row<Score, ROUND, THREADS>;
  static constexpr int WIDTH = This::WIDTH;
  static constexpr int AHEAD = (EXCHANGED ? 32 : 16) / WIDTH;  // vectors under way, and of a sample at most

  const Selection& p;
  const This& row;
  Room<CAP, WORDS, EXCHANGED>& m;
  Tally& t;
  int vectors, share;  // of the row, of a slice
  u32 turn;

  // First position of a slice.
  __device__ __forceinline__ int position(int who) const {
    return max(0, min(min(who * share, vectors) * WIDTH - row.skew, row.n));
  }

  __device__ __forceinline__ u32 before(u32 value, u32& total) {
    return block_before<THREADS>(value, t.sums[turn ^= 1], total);
  }
  __device__ __forceinline__ void find(u32 needed) { ::find<THREADS>(t, needed, turn ^= 1); }

  __device__ __forceinline__ void load(Vector<Score>& v, int i) const {
    v.load(row.base + static_cast<long long>(i) * WIDTH);
  }

  // A threshold, the same in all blocks, that more than k keys are likely to reach.
  __device__ __forceinline__ u32 sampled() {
    int each = max(1, 4096 / WIDTH / THREADS);
    while (each < AHEAD && row.n > each * THREADS * WIDTH * (EXCHANGED ? 64 : 16)) each *= 2;
    int groups = each * THREADS, stride = vectors / groups;
    Vector<Score> v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (i < each) load(v[i], (i * THREADS + static_cast<int>(threadIdx.x)) * stride);
    }
    float* sample = reinterpret_cast<float*>(m.all) + threadIdx.x;  // each thread's own
#pragma unroll
    for (int i = 0; i < AHEAD * WIDTH; i++) {
      if (i / WIDTH < each) sample[i * THREADS] = v[i / WIDTH].x[i % WIDTH];
    }
#pragma unroll 2
    for (int i = 0; i < each * WIDTH; i++) {
      u32 place = (i / WIDTH * THREADS + threadIdx.x) * stride * WIDTH + i % WIDTH - row.skew;
      u32 key = place < static_cast<u32>(row.n) ? row.key_of(sample[i * THREADS]) : 0;
      sample[i * THREADS] = __uint_as_float(key);
      if (key) count(t, key >> (32 - DIGIT));
    }
    __syncthreads();
    int size = groups * WIDTH - 2 * WIDTH;  // some of the first and the last vector are none of the row's
    float mean = static_cast<float>(p.k) * size / row.n;
    u32 target = min(size, static_cast<int>(mean + 4.5f * sqrtf(mean)) + 4);
    find(target);
    u32 high = t.found[0], above = t.found[1], reached = above + t.found[2];
    if (static_cast<float>(reached) * row.n < 0.8f * CAP * size) return max(high << (32 - DIGIT), NAN_ORDINAL);
#pragma unroll 2
    for (int i = 0; i < each * WIDTH; i++) {
      u32 key = __float_as_uint(sample[i * THREADS]);
      if (key && key >> (32 - DIGIT) == high) count(t, (key >> (32 - 2 * DIGIT)) & (BINS - 1));
    }
    __syncthreads();
    find(target - above);
    return max(high << (32 - DIGIT) | t.found[0] << (32 - 2 * DIGIT), NAN_ORDINAL);
  }

  // Collects every key of vectors [first, last) that reaches the threshold.
  __device__ __forceinline__ void collect(u32 threshold, int first, int last, uint2* to) {
    bool all = threshold == NAN_ORDINAL;
    float least = threshold <= MINUS_INFINITY ? -INFINITY : score_of(threshold);
#pragma unroll 1
    for (int base = first + static_cast<int>(threadIdx.x); base < last; base += THREADS * AHEAD) {
      Vector<Score> v[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        if (base + a * THREADS < last) load(v[a], base + a * THREADS);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        bool hit[WIDTH], near = false;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
          if constexpr (ROUND) v[a].x[j] = rounded(v[a].x[j]);
          hit[j] = all || v[a].x[j] >= least;
          near |= hit[j];
        }
        if (near && base + a * THREADS < last) {
          int place = (base + a * THREADS) * WIDTH - row.skew;
          u32 hits = 0;
#pragma unroll
          for (int j = 0; j < WIDTH; j++) {
            hits |= static_cast<u32>(hit[j] && static_cast<u32>(place + j) < static_cast<u32>(row.n)) << j;
          }
          u32 slot = atomicAdd(&t.collected, static_cast<u32>(__popc(hits)));
#pragma unroll
          for (int j = 0; j < WIDTH; j++) {
            if (hits >> j & 1) {
              if (slot < CAP) to[slot] = make_uint2(__float_as_uint(v[a].x[j]), place + j);
              slot++;
            }
          }
        }
      }
    }
  }

  // Copies all blocks' candidates here; false where they are more than there is room for.
  __device__ __forceinline__ bool gather(u32& size) {
    u32 count = lane() < p.blocks ? remote(&t.collected, lane()) : 0;
    u32 until = warp_inclusive(count);
    size = __shfl_sync(EVERY, until, 31);
    if (size > CAP) return false;
    u32 who = warp() % p.blocks, team = THREADS / 32 / p.blocks;
    u32 first = __shfl_sync(EVERY, until - count, who);
    count = __shfl_sync(EVERY, count, who);
    constexpr int AT_ONCE = 4;
#pragma unroll 1
    for (u32 i = warp() / p.blocks * 32 + lane(); i < count; i += team * 32 * AT_ONCE) {
      uint2 some[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) some[j] = remote(&m.own[min(i + j * team * 32, count - 1)], who);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (i + j * team * 32 < count) m.all[first + i + j * team * 32] = some[j];
      }
    }
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ u32 key_of(u32 candidate) const { return ordinal(__uint_as_float(m.all[candidate].x)); }

  // The k-th best of the candidates; `needed` of those equal to it are winners.
  __device__ __forceinline__ u32 kth(u32 size, u32 threshold, u32& needed) {
    u32 base = threshold, range = 0xffffffffu - threshold;
    int shift = threshold > NAN_ORDINAL ? DIGIT : 32 - DIGIT;
    needed = p.k;
#pragma unroll 1
    while (true) {
#pragma unroll 2
      for (u32 i = threadIdx.x; i < size; i += THREADS) {
        u32 offset = key_of(i) - base;  // wraps beyond the range for keys below the base
        if (offset <= range) count(t, min(offset >> shift, static_cast<u32>(BINS - 1)));
      }
      __syncthreads();
      find(needed);
      u32 bin = t.found[0], same = t.found[2];
      bool open = bin == BINS - 1 && range >> shift > BINS - 1;  // the last bin holds all that is beyond it
      base += bin << shift;
      needed -= t.found[1];
      range = open ? range - (bin << shift) : (1u << shift) - 1;
      if (!open && shift == 0) return base;
      if (same <= LIST) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < size; i += THREADS) {
          if (key_of(i) - base <= range) t.list[atomicAdd(&t.listed, 1u)] = key_of(i);
        }
        __syncthreads();
        return rank_list<THREADS>(t, same, needed);
      }
      shift = open ? max(0, 32 - __clz(range) - DIGIT) : max(0, shift - DIGIT);
    }
  }

  // The k-th best by digits over all slices, where candidates do not tell.
  __device__ __forceinline__ u32 digits(u32& needed) {
    int first = position(row.rank), last = position(row.rank + 1);
    u32 found = 0;
    needed = p.k;
#pragma unroll 1
    for (int done = 32; done > 0;) {
      int shift = max(0, done - DIGIT);
#pragma unroll 1
      for (int base = first; base < last; base += THREADS) {
        int i = base + static_cast<int>(threadIdx.x);
        u32 key = i < last ? row.key_at(i) : 0;
        bool live = i < last && (done == 32 || key >> done == found);
        u32 bin = (key >> shift) & ((1u << (done - shift)) - 1);
        u32 lowest = __shfl_sync(EVERY, bin, 0);
        if (__all_sync(EVERY, live && bin == lowest)) {
          if (lane() == 0) atomicAdd(&t.bins[bin].x, 32u);  // a row of equal scores
        } else if (live) {
          count(t, bin);
        }
      }
      __syncthreads();
      if constexpr (EXCHANGED) share_bins();
      find(needed);
      found = found << (done - shift) | t.found[0];
      needed -= t.found[1];
      done = shift;
    }
    return found;
  }

  // Adds up the bins of all blocks, in each of them.
  __device__ __forceinline__ void share_bins() {
    constexpr int EACH = BINS / THREADS;
    uint4 sum[EACH];
    cluster_sync();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      sum[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int who = 0; who < p.blocks; who++) {
        const u32* bin = reinterpret_cast<const u32*>(&t.bins[threadIdx.x + i * THREADS]);
        sum[i].x += remote(bin, who) + remote(bin + 1, who) + remote(bin + 2, who) + remote(bin + 3, who);
      }
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < EACH; i++) t.bins[threadIdx.x + i * THREADS] = sum[i];
    __syncthreads();
  }

  // Marks the winners, and the keys equal to the k-th, of positions [from, to); counts those before `begin`.
  __device__ __forceinline__ void mark(u32 size, u32 last, int from, int to, int begin) {
    u32 ups = 0, likes = 0;
#pragma unroll 1
    for (int i = (size ? 0 : from) + static_cast<int>(threadIdx.x); i < (size ? static_cast<int>(size) : to);
         i += THREADS) {
      u32 key = size ? key_of(i) : row.key_at(i);
      int place = size ? static_cast<int>(m.all[i].y) : i;
      if (key < last) continue;
      ups += place < begin && key > last;
      likes += place < begin && key == last;
      if (place >= from && place < to) {
        atomicOr(&(key > last ? m.above_map : m.equal_map)[(place - from) >> 5], 1u << ((place - from) & 31));
      }
    }
    if (begin && size) {
      ups = __reduce_add_sync(EVERY, ups);
      likes = __reduce_add_sync(EVERY, likes);
      if (lane() == 0 && (ups | likes)) {
        atomicAdd(&t.above, ups);
        atomicAdd(&t.equal, likes);
      }
    }
  }

  // Without candidates: winners and equal keys in the slices before this one.
  __device__ __forceinline__ void count_slices(u32 last) {
    u32 ups = 0, likes = 0;
#pragma unroll 1
    for (int i = position(row.rank) + threadIdx.x; i < position(row.rank + 1); i += THREADS) {
      u32 key = row.key_at(i);
      ups += key > last;
      likes += key == last;
    }
    atomicAdd(&t.above, ups);
    atomicAdd(&t.equal, likes);
    __syncthreads();
    cluster_sync();
    ups = likes = 0;
#pragma unroll 1
    for (int who = 0; who < row.rank; who++) {
      ups += remote(&t.above, who);
      likes += remote(&t.equal, who);
    }
    cluster_sync();
    if (threadIdx.x == 0) {
      t.above = ups;
      t.equal = likes;
    }
    __syncthreads();
  }

  // Writes the winners of this slice in order. `size` candidates hold all of them; 0: they are looked for in the slice.
  __device__ __forceinline__ void emit(u32 size, u32 last, u32 needed) {
    int begin = position(row.rank), end = position(row.rank + 1);
    int window = min(WORDS * 32, size ? WORDS * 32 : 32768);  // equal keys are counted in 16 bits
    u32 above = 0, equal = 0;
#pragma unroll 1
    for (int from = begin; from < end; from += window) {
      int to = min(end, from + window), words = (to - from + 31) / 32;
#pragma unroll 1
      for (int i = threadIdx.x; i < words; i += THREADS) m.above_map[i] = m.equal_map[i] = 0;
      __syncthreads();
      mark(size, last, from, to, from == begin ? begin : 0);
      __syncthreads();
      if (from == begin) {
        above = t.above;
        equal = t.equal;
      }
      int each = (words + THREADS - 1) / THREADS;
      u32 mine = 0, total;
#pragma unroll 1
      for (int i = threadIdx.x * each; i < min(words, static_cast<int>(threadIdx.x + 1) * each); i++) {
        mine += __popc(m.above_map[i]) | __popc(m.equal_map[i]) << 16;
      }
      u32 over = before(mine, total);
      u32 wins = above + (over & 0xffff), like = equal + (over >> 16), first = above + min(equal, needed);
#pragma unroll 1
      for (int i = threadIdx.x * each; i < min(words, static_cast<int>(threadIdx.x + 1) * each); i++) {
        u32 up = m.above_map[i];
#pragma unroll 1
        for (u32 both = up | m.equal_map[i]; both; both &= both - 1) {
          u32 bit = both & -both;
          bool greater = up & bit;
          if (greater || like < needed) stage(t)[wins + min(like, needed) - first] = from + i * 32 + __ffs(bit) - 1;
          wins += greater;
          like += !greater;
        }
      }
      above += total & 0xffff;
      equal += total >> 16;
      __syncthreads();
      row.write(stage(t), first, above + min(equal, needed) - first);
    }
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) t.collected = t.listed = t.above = t.equal = 0;
    clear_bins<THREADS>(t);
    __syncthreads();
    bool whole = row.n <= CAP;  // every block holds all keys
    bool told = true;
    u32 threshold = whole ? NAN_ORDINAL : sampled(), needed, last;
    int first = whole ? 0 : min(row.rank * share, vectors), behind = whole ? vectors : min(first + share, vectors);
    collect(threshold, first, behind, EXCHANGED && !whole ? m.own : m.all);
    __syncthreads();
    u32 size = t.collected;
    if (!whole) {
      if constexpr (EXCHANGED) {
        cluster_sync();
        told = gather(size);
      } else {
        told = size <= CAP;
      }
      told = told && size >= static_cast<u32>(p.k);
    }
    if (told) {
      last = kth(size, threshold, needed);
    } else {
      last = digits(needed);
      size = 0;
      if constexpr (EXCHANGED) count_slices(last);
    }
    emit(size, last, needed);
    if constexpr (EXCHANGED) {
      if (!whole) cluster_sync();  // nobody may still read here
    }
  }
};

template <typename Score, bool ROUND, int THREADS, int CAP, int WORDS, bool EXCHANGED>
__device__ __forceinline__ void select_slices(const Selection& p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& m = *reinterpret_cast<Room<CAP, WORDS, EXCHANGED>*>(memory);
  Row<Score, ROUND, THREADS> row(p);
  row.measure();
  constexpr int WIDTH = Row<Score, ROUND, THREADS>::WIDTH;
  int vectors = (row.n + row.skew + WIDTH - 1) / WIDTH, share = (vectors + p.blocks - 1) / p.blocks;
  Slices<Score, ROUND, THREADS, CAP, WORDS, EXCHANGED> slices{p, row, m, m.tally, vectors, share, 0};
  if (row.n <= p.k) row.take_all();
  else slices.run();
  if (p.slots) {
    if constexpr (EXCHANGED) cluster_sync();
    else __syncthreads();
    row.to_slots(m.tally, slices.turn ^ 1);
  }
}
