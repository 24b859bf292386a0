// topk_select of longer rows: a row belongs to a cluster of blocks, or to one, each with a slice of its columns.
//
// Every block samples the same scores of the row and so finds the same threshold, which at least k of its keys are very
// likely to reach, and not many more. One pass over the slice lists the keys that reach it, and the k-th best is chosen
// among those of all blocks. Winners become bits of a map of the slice, so that they stand in order without being
// sorted. Where too few or too many keys reach the threshold, all keys are counted for another one; where too many
// are alike for that, all keys take the place of those listed.
#pragma once
#include "together.cuh"

constexpr int LIKES = 512;  // keys of one bin that are exchanged
// Keys that a thread looks at between two looks at its list, and keys that may stand in it before.
constexpr int STEP = 8, LEFT = 2;

template <int THREADS, int LISTED, int WORDS, bool CLUSTERED>
struct Room {
  union {
    u32 own[STEP + LEFT][2][THREADS];  // each thread's keys: score bits, and position
    uint4 map[WORDS / 4];              // winners by position
  };
  uint2 found[LISTED];  // of the block
  Exchange<CLUSTERED, LIKES, false> exchange;
};

// Bin of one score.
__device__ __forceinline__ u32 bin_of(float x) { return (pair_of_bins(x, x) & 0xffff) / 4; }

// What the choice asks of keys; `each` of Keys calls back with every one of this thread's, score and position.
template <typename Keys>
struct Asked {
  static constexpr bool PLAIN = false;
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    static_cast<const Keys*>(this)->each(f);
  }
  __device__ __forceinline__ void count_all(Tally& t) const {
    each([&](float x, u32) { count(t, bin_of(x)); });
  }
  __device__ __forceinline__ u32 above(u32 bin) const {
    u32 some = 0;
    each([&](float x, u32) { some += bin_of(x) > bin; });
    return some;
  }
  template <typename F>
  __device__ __forceinline__ void each_of(u32 bin, F f) const {
    each([&](float x, u32 place) {
      if (bin_of(x) == bin) f(strict(ordinal(x), place));
    });
  }
  template <typename F>
  __device__ __forceinline__ void each_winner(const Cut& cut, F f) const {
    each([&](float x, u32 place) {
      u32 bin = bin_of(x);
      if (bin > cut.bin || (bin == cut.bin && strict(ordinal(x), place) >= cut.cut)) f(place);
    });
  }
};

// The keys that a block has listed.
template <int THREADS>
struct Listed : Asked<Listed<THREADS>> {
  const uint2* found;
  u32 size;

  __device__ __forceinline__ Listed(const uint2* found, u32 size) : found(found), size(size) {}
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < size; i += THREADS) f(__uint_as_float(found[i].x), found[i].y);
  }
};

// All keys of a slice, read again at every question.
template <typename Row, int THREADS>
struct Unlisted : Asked<Unlisted<Row, THREADS>> {
  const Row& row;
  int from, to;

  __device__ __forceinline__ Unlisted(const Row& row, int from, int to) : row(row), from(from), to(to) {}
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    constexpr int AHEAD = 4;  // under way
#pragma unroll 1
    for (int first = from + static_cast<int>(threadIdx.x); first < to; first += AHEAD * THREADS) {
      float x[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) x[a] = row.score_at(min(first + a * THREADS, to - 1));
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        if (first + a * THREADS < to) f(x[a], static_cast<u32>(first + a * THREADS));
      }
    }
  }
};

// KEYS are under way in a thread.
template <typename Score, bool ROUND, int THREADS, int LISTED, int WORDS, bool CLUSTERED, int KEYS>
struct Slices {
  using This = Row<Score, ROUND, THREADS, CLUSTERED>;
  static constexpr int WIDTH = This::WIDTH;
  static constexpr int AHEAD = KEYS / WIDTH;    // vectors under way
  static constexpr int SAMPLED = 16 / WIDTH;    // of a thread

  const Selection& p;
  const This& row;
  Room<THREADS, LISTED, WORDS, CLUSTERED>& m;
  Tally& t;
  Together<This, THREADS, CLUSTERED, LIKES, false>& together;
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

  // Scores of a vector that are none of the row's become NaN, all of them behind vector `last`.
  __device__ __forceinline__ void trim(Vector<Score>& v, int i, int last) const {
    int place = i < last ? i * WIDTH - row.skew : row.n;
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
      trim(v[i], sample(i), vectors);
#pragma unroll
      for (int j = 0; j < WIDTH; j += 2) count_pair(v[i].x[j], v[i].x[j + 1]);
    }
    __syncthreads();
    int size = min(SAMPLED * THREADS * WIDTH, row.n);
    float mean = static_cast<float>(p.k) * size / row.n;
    u32 target = size == row.n ? p.k : min(size - 2 * WIDTH, static_cast<int>(mean + 4.5f * sqrtf(mean)) + 4);
    find<THREADS>(t, t.bins, target, together.turn ^= 1);
    u32 bin = t.found.x, above = t.found.y, reached = above + t.found.z;
    if (bin == 0) return 0;
    u32 low = least_of_bin(bin);
    float room = 0.75f * LISTED * p.blocks;
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
    return low + (t.found.x << shift);
  }

  // Lists every key of the slice, as far as there is room.
  __device__ __forceinline__ void collect_all() {
    int begin = position(row.rank), end = position(row.rank + 1);
#pragma unroll 1
    for (int i = begin + static_cast<int>(threadIdx.x); i < min(end, begin + LISTED); i += THREADS) {
      m.found[i - begin] = make_uint2(__float_as_uint(row.score_at(i)), i);
    }
    if (threadIdx.x == 0) t.collected = end - begin;
  }

  // Moves what the threads of a warp have listed, from `start` up to `to`, to the block's list.
  __device__ __forceinline__ void hand_over(u32 start, u32& to) {
    u32 mine = (to - start) / (THREADS * 8), until = warp_inclusive(mine), at = 0;
    if (lane() == 31) at = atomicAdd(&t.collected, until);
    at = __shfl_sync(EVERY, at, 31) + until - mine;
#pragma unroll 1
    for (u32 i = 0; i < mine && at + i < LISTED; i++) {
      m.found[at + i] = make_uint2(m.own[i][0][threadIdx.x], m.own[i][1][threadIdx.x]);
    }
    to = start;
  }

  // Lists every key of vectors [first, last) that reaches the threshold. A branch for each would keep loads apart.
  __device__ __forceinline__ void collect(u32 threshold, int first, int last) {
    constexpr int VECTORS = STEP / WIDTH;
    float least = threshold <= MINUS_INFINITY ? -INFINITY : score_of(threshold);
    u32 start = shared_address(&m.own[0][0][threadIdx.x]), to = start;
    int whole = min(last, (row.n + row.skew) / WIDTH), mine = first + static_cast<int>(threadIdx.x);
    Vector<Score> v[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      if (mine + a * THREADS < last) load(v[a], mine + a * THREADS);
    }
#pragma unroll 1
    for (int base = first + static_cast<int>(warp()) * 32; base < last; base += THREADS * AHEAD) {
      mine = base + static_cast<int>(lane());
      if (base + (AHEAD - 1) * THREADS + 32 > whole || (row.skew && base == 0)) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) trim(v[a], mine + a * THREADS, last);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a += VECTORS) {
#pragma unroll
        for (int j = 0; j < STEP; j++) {
          int place = (mine + (a + j / WIDTH) * THREADS) * WIDTH - row.skew + j % WIDTH;
          asm volatile(
              "{\n.reg .pred hit;\nsetp.ge.f32 hit, %1, %2;\n@hit st.shared.f32 [%0], %1;\n"
              "@hit st.shared.u32 [%0 + %4], %3;\n@hit add.u32 %0, %0, %5;\n}"
              : "+r"(to)
              : "f"(v[a + j / WIDTH].x[j % WIDTH]), "f"(least), "r"(place), "n"(THREADS * 4), "n"(THREADS * 8)
              : "memory");
        }
        if (__any_sync(EVERY, to > start + LEFT * THREADS * 8)) hand_over(start, to);
#pragma unroll
        for (int b = a; b < a + VECTORS; b++) {  // those of the next round are on their way meanwhile
          int next = mine + (AHEAD + b) * THREADS;
          if (next < last) load(v[b], next);
        }
      }
    }
    hand_over(start, to);
  }

  // Writes the winners of this slice in order, or the slots of those that are `present`.
  template <typename Keys>
  __device__ __forceinline__ void emit(const Keys& keys, const Cut& cut, bool present) {
    int begin = position(row.rank), end = position(row.rank + 1);
    u32 to = cut.above, *words = reinterpret_cast<u32*>(m.map);
#pragma unroll 1
    for (int from = begin; from < end; from += WORDS * 32) {
      int quads = (min(end - from, WORDS * 32) + 127) / 128, each = (quads + THREADS - 1) / THREADS;
#pragma unroll 1
      for (int i = threadIdx.x; i < quads; i += THREADS) m.map[i] = make_uint4(0, 0, 0, 0);
      __syncthreads();
      keys.each_winner(cut, [&](u32 place) {
        u32 at = place - from;
        if (at < WORDS * 32) atomicOr(&words[at / 32], 1u << at % 32);
      });
      __syncthreads();
      int first = threadIdx.x * each, last = min(first + each, quads);
      u32 mine = 0, total;
#pragma unroll 1
      for (int i = first; i < last; i++) {
        uint4 four = m.map[i];
        mine += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
      }
      u32 at = block_before<THREADS>(mine, t.sums[together.turn ^= 1], total);
#pragma unroll 1
      for (int i = first * 4; i < last * 4 && mine; i++) {
#pragma unroll 1
        for (u32 bits = words[i]; bits; bits &= bits - 1, mine--) stage(t)[at++] = from + i * 32 + __ffs(bits) - 1;
      }
      __syncthreads();
      row.write(stage(t), to, total, present);
      to += total;
    }
  }

  // Counts every key of vectors [first, last) by its bin, and what is none with NaN.
  __device__ __forceinline__ void count_all(int first, int last) {
    constexpr int AT_ONCE = 16 / WIDTH;
#pragma unroll 1
    for (int base = first + static_cast<int>(threadIdx.x); base < last; base += THREADS * AT_ONCE) {
      Vector<Score> v[AT_ONCE];
#pragma unroll
      for (int a = 0; a < AT_ONCE; a++) {
        if (base + a * THREADS < last) load(v[a], base + a * THREADS);
      }
#pragma unroll
      for (int a = 0; a < AT_ONCE; a++) {
        trim(v[a], base + a * THREADS, last);
#pragma unroll
        for (int j = 0; j < WIDTH; j += 2) count_pair(v[a].x[j], v[a].x[j + 1]);
      }
    }
  }

  __device__ __forceinline__ void count_pair(float first, float second) {
    u32 pair = pair_of_bins(first, second);
    count(t, (pair & 0xffff) / 4);
    count(t, (pair >> 16) / 4);
  }

  // Tells whether all blocks have room for what they listed, and together at least k keys.
  __device__ __forceinline__ bool told(u32 turn) {
    __syncthreads();
    u32 size = t.collected, every = min(size, LISTED), full = size > LISTED;
    if constexpr (CLUSTERED) {
      together.note(m.exchange.notes, static_cast<u64>(full) << 32 | every, NOTES);
      together.hear(NOTES, turn, p.blocks * 8);
      u64 both = lane() < static_cast<u32>(p.blocks) ? m.exchange.notes[lane()] : 0;
      every = __reduce_add_sync(EVERY, static_cast<u32>(both));
      full = __reduce_or_sync(EVERY, static_cast<u32>(both >> 32));
    }
    return every >= static_cast<u32>(p.k) && !full;
  }

  // Selects, and tells whether what was written is final.
  __device__ __forceinline__ bool run() {
    u32 threshold = row.n <= LISTED / 2 ? 0 : sampled();
    int first = min(row.rank * share, vectors), last = min(first + share, vectors);
    bool enough = false;
#pragma unroll 1
    for (u32 turn = 0; turn < 2; turn++) {
      if (turn) {  // the sample was none: count all
        count_all(first, last);
        together.find_together(p.k);
        if (t.found.x == 0 || t.found.y + t.found.z > static_cast<u32>(LISTED * p.blocks)) break;
        threshold = least_of_bin(t.found.x);
        if (threadIdx.x == 0) t.collected = 0;
        __syncthreads();
      }
      if (threshold) collect(threshold, first, last);
      else collect_all();
      enough = told(turn);
      if (enough || threshold == 0) break;
    }
    if (enough) return choose(Listed<THREADS>(m.found, t.collected));
    return choose(Unlisted<This, THREADS>(row, position(row.rank), position(row.rank + 1)));
  }

  template <typename Keys>
  __device__ __forceinline__ bool choose(const Keys& keys) {
    together.find_bin(keys);
    bool present = together.plain(LIKES);
    emit(keys, together.settle(keys), present);
    return present;
  }
};

template <typename Score, bool ROUND, int THREADS, int LISTED, int WORDS, bool CLUSTERED, int KEYS>
__device__ __forceinline__ void select_slices(const Selection& p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& m = *reinterpret_cast<Room<THREADS, LISTED, WORDS, CLUSTERED>*>(memory);
  using This = Row<Score, ROUND, THREADS, CLUSTERED>;
  This row(p);
  wait_for_leader();
  let_followers_start();
  Tally& t = m.exchange.tally;
  Together<This, THREADS, CLUSTERED, LIKES, false> together{p, row, m.exchange, t, 0, 0};
  together.clear();
  if (threadIdx.x == 0) t.collected = 0;
  row.measure();
  __syncthreads();
  together.meet_blocks();
  constexpr int WIDTH = This::WIDTH;
  int vectors = (row.n + row.skew + WIDTH - 1) / WIDTH, share = (vectors + p.blocks - 1) / p.blocks;
  Slices<Score, ROUND, THREADS, LISTED, WORDS, CLUSTERED, KEYS> slices{p, row, m, t, together, vectors, share};
  bool present = false;
  if (row.n <= p.k) row.take_all();
  else present = slices.run();
  if (p.slots && !present) {
    if constexpr (CLUSTERED) cluster_sync();
    else __syncthreads();
    row.to_slots(t, together.turn ^ 1);
  }
}
