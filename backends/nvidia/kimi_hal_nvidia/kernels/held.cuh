// topk_select of rows that the registers of a block, or of a cluster of blocks, hold.
#pragma once
#include "together.cuh"

// Where this lane's ones of each field of `counts` stand among all of the block's, which it returns; a field is a
// vector's, of BITS, and a warp has 32 vectors of a field beside each other, behind those of its fields before.
template <int THREADS, int BITS, int WORDS, int FIELDS>
__device__ __forceinline__ u32 places_of(const u32 (&counts)[WORDS], u32* room, u32 (&places)[FIELDS]) {
  constexpr int EACH = 32 / BITS;
  constexpr u32 MASK = (1ull << BITS) - 1;
  u32 total = 0;
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    u32 within = warp_inclusive(counts[w]), all = __shfl_sync(EVERY, within, 31);
#pragma unroll
    for (int i = 0; i < EACH && w * EACH + i < FIELDS; i++) {
      places[w * EACH + i] = total + ((within - counts[w]) >> i * BITS & MASK);
      total += all >> i * BITS & MASK;
    }
  }
  if (lane() == 0) room[warp()] = total;
  __syncthreads();
  u32 sums = lane() < THREADS / 32 ? room[lane()] : 0;
  u32 before = __reduce_add_sync(EVERY, lane() < warp() ? sums : 0);
#pragma unroll
  for (int i = 0; i < FIELDS; i++) places[i] += before;
  return __reduce_add_sync(EVERY, sums);
}

// The first one's place in a set that has one.
__device__ __forceinline__ u32 first_of(u32 set) { return static_cast<u32>(__ffs(set)) - 1; }

template <typename Score, bool RAW>
struct KeptAs {
  using Type = float;
};
template <typename Score>
struct KeptAs<Score, true> {
  using Type = Score;
};

// The keys of a thread, in sets of bits. Their scores stand in shared memory: RAW as they came, which they did by
// themselves, else trimmed and rounded.
template <typename Score, bool ROUND, int THREADS, bool RAW, int KEYS>
struct Held {
  using Kept = typename KeptAs<Score, RAW>::Type;
  static constexpr int WIDTH = Vector<Score>::WIDTH, VECTORS = KEYS / WIDTH, PAIRS = KEYS / 2;
  static constexpr int BITS = 2 * WIDTH;  // of a count of a warp's keys of one vector each
  static constexpr int WORDS = (VECTORS * BITS + 31) / 32;
  static constexpr int FIRST = 16 - PAIRS;                                         // bit of a set's first key
  static constexpr u32 OF_VECTOR = 0x00010001u * ((1 << WIDTH / 2) - 1) << FIRST;  // a vector's bits in a set of keys

  int first;         // position of this lane's first key
  Kept* scores;      // the block's, each thread's own
  u32 pair[PAIRS];   // bins

  __device__ __forceinline__ float score_of_bit(u32 bit) const {
    u32 i = bit % PAIRS * 2 + bit / 16;
    float x = as_float(scores[(i / WIDTH * THREADS + threadIdx.x) * WIDTH + i % WIDTH]);
    return RAW && ROUND ? rounded(x) : x;
  }

  // Position of a key by its bit in a set: keys 2 j and 2 j + 1 have bits FIRST + j and FIRST + 16 + j.
  __device__ __forceinline__ u32 place_of(u32 bit) const {
    u32 i = bit % PAIRS * 2 + bit / 16;
    return first + i / WIDTH * 32 * WIDTH + i % WIDTH;
  }

  // Takes scores; those outside of [from, to) count as NaN.
  __device__ __forceinline__ void take(Vector<Score> (&v)[VECTORS], int from, int to) {
    if (seldom(first < from || first + (VECTORS - 1) * 32 * WIDTH + WIDTH > to)) {
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        int place = first + i / WIDTH * 32 * WIDTH + i % WIDTH;
        if (place < from || place >= to) v[i / WIDTH].x[i % WIDTH] = __uint_as_float(0x7fffffffu);
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
#pragma unroll
      for (int j = 0; ROUND && j < WIDTH; j++) v[i].x[j] = rounded(v[i].x[j]);
#pragma unroll
      for (int j = 0; j < WIDTH; j += 2) pair[(i * WIDTH + j) / 2] = pair_of_bins(v[i].x[j], v[i].x[j + 1]);
#pragma unroll
      for (int j = 0; !RAW && j < WIDTH; j += 4) {
        *reinterpret_cast<float4*>(&scores[(i * THREADS + threadIdx.x) * WIDTH + j]) =
            make_float4(v[i].x[j], v[i].x[j + 1], v[i].x[j + 2], v[i].x[j + 3]);
      }
    }
  }

  __device__ __forceinline__ void count_all(Tally& t) const {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      count_at(t, pair[j] & 0x1ffc);
      count_at(t, pair[j] >> 16);
    }
  }

  // Keys whose bin is at least `bin`.
  __device__ __forceinline__ u32 from_bin(u32 bin) const {
    u32 set = 0, less = 0x80008000u - bin * 0x00040004u;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) set |= (pair[j] + less & 0x80008000u) >> (PAIRS - 1 - j);
    return set;
  }

  // Keys of a set whose positions are in [from, to).
  __device__ __forceinline__ u32 inside(u32 set, int from, int to) const {
    u32 some = 0;
#pragma unroll 1
    for (; set; set &= set - 1) {
      int place = place_of(first_of(set));
      if (place >= from && place < to) some |= set & -set;
    }
    return some;
  }

  // How many keys of each vector are in a set.
  __device__ __forceinline__ void counts_of(u32 set, u32 (&counts)[WORDS]) const {
    constexpr int EACH = 32 / BITS;
#pragma unroll
    for (int w = 0; w < WORDS; w++) counts[w] = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) counts[i / EACH] |= __popc(set & OF_VECTOR << i * WIDTH / 2) << i % EACH * BITS;
  }

  // Writes the positions of the keys of a set, in order, to shared or to global memory.
  __device__ __forceinline__ void put(int* staged, u32 set, const u32 (&places)[VECTORS]) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int* to = staged + places[i];
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
        int bit = FIRST + (i * WIDTH + j) / 2 + j % 2 * 16;
        bool mine = set & 1u << bit;
        if (mine) *to = place_of(bit);
        to += mine;
      }
    }
  }
};

// What the choice asks of the keys that a block holds.
template <typename Row, typename Keys>
struct HeldOf {
  const Row& row;
  const Keys& keys;
  int from, to;  // positions of the slice

  __device__ __forceinline__ void count_all(Tally& t) const { keys.count_all(t); }
  __device__ __forceinline__ u32 above(u32 bin) const { return __popc(keys.from_bin(bin + 1)); }
  __device__ __forceinline__ u64 strict_of(u32 set) const {
    u32 bit = first_of(set);
    return strict(ordinal(keys.score_of_bit(bit)), keys.place_of(bit));
  }
  __device__ __forceinline__ u32 of_bin(u32 bin) const {
    u32 set = keys.from_bin(bin) & ~keys.from_bin(bin + 1);
    return seldom(bin == 0) ? keys.inside(set, from, to) : set;  // bin 0 has also what is no key
  }
  template <typename F>
  __device__ __forceinline__ void each_of(u32 bin, F f) const {
#pragma unroll 1
    for (u32 set = of_bin(bin); set; set &= set - 1) f(strict_of(set));
  }
};

constexpr int LIKES = 1024;  // keys of one bin that are exchanged

template <int THREADS, bool CLUSTERED, int KEYS>
struct HeldRoom {
  Exchange<CLUSTERED, LIKES, CLUSTERED> exchange;
  float scores[KEYS * THREADS];
};

// Copies 16 bytes; whoever asked for them waits for them.
__device__ __forceinline__ void copy_vector(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void await_vectors() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What is computed of a number from here on is computed from here on: not before, and not in several places again.
__device__ __forceinline__ void keep_here(u32& number) { asm volatile("" : "+r"(number)); }
template <typename T>
__device__ __forceinline__ void keep_here(const T*& address) {
  asm volatile("" : "+l"(address));
}

// Chooses among the keys of a block, or of a cluster, and writes the winners.
template <bool DIRECT, typename This, typename Keys, typename Chooser, int THREADS>
__device__ __forceinline__ void select_from(const This& row, const Keys& keys, Chooser& together, Tally& t, int from,
                                            int to) {
  HeldOf<This, Keys> held{row, keys, from, to};
  Cut cut = together.choose(held);
  u32 won = keys.from_bin(cut.bin + 1), counts[Keys::WORDS], places[Keys::VECTORS];
#pragma unroll 1
  for (u32 set = held.of_bin(cut.bin); set; set &= set - 1) {
    if (held.strict_of(set) >= cut.cut) won |= set & -set;
  }
  keys.counts_of(won, counts);
  u32 mine = places_of<THREADS, Keys::BITS>(counts, t.sums[together.turn ^= 1], places);
  if (DIRECT && !row.p.selected) {
    keys.put(row.p.out + row.row * row.p.out_row + cut.above, won, places);
  } else {
    keys.put(stage(t), won, places);
    __syncthreads();
    row.write(stage(t), cut.above, mine);
  }
}

// A row of a cluster of blocks.
template <typename Score, bool ROUND, int THREADS, int KEYS>
__device__ __forceinline__ void select_together(const Selection& p) {
  using Keys = Held<Score, ROUND, THREADS, false, KEYS>;
  using This = Row<Score, ROUND, THREADS, true>;
  using Chooser = Together<This, THREADS, true, LIKES, true>;
  constexpr int WIDTH = Keys::WIDTH;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& room = *reinterpret_cast<HeldRoom<THREADS, true, KEYS>*>(memory);
  Tally& t = room.exchange.tally;
  This row(p);
  wait_for_leader();
  let_followers_start();
  Chooser together{p, row, room.exchange, t, 0, 0};
  Keys keys;
  keys.scores = room.scores;
  Vector<Score> v[Keys::VECTORS];
  row.measure();
  int vectors = (row.n + row.skew + WIDTH - 1) / WIDTH, share = together.per_block(vectors + p.blocks - 1);
  int begin = row.rank * share * WIDTH - row.skew, end = min(row.n, begin + share * WIDTH);
  keys.first = (warp() * Keys::VECTORS * 32 + lane()) * WIDTH + begin;
#pragma unroll
  for (int i = 0; i < Keys::VECTORS; i++) {
    int place = keys.first + i * 32 * WIDTH;
    if (place < end) v[i].load(row.at + place);
  }
  together.clear();
  __syncthreads();
  together.meet_blocks();
  if (row.n <= p.k) {
    row.take_all();
  } else {
    keys.take(v, max(0, begin), end);
    select_from<true, This, Keys, Chooser, THREADS>(row, keys, together, t, max(0, begin), end);
  }
  if (p.slots) {
    cluster_sync();
    row.to_slots(t, together.turn ^ 1);
  }
}

// A row of one block, whose keys come before its length is known.
template <typename Score, bool ROUND, int THREADS, int KEYS>
__device__ __forceinline__ void select_alone(const Selection& p) {
  using Keys = Held<Score, ROUND, THREADS, true, KEYS>;
  using This = Row<Score, ROUND, THREADS, false>;
  using Chooser = Together<This, THREADS, false, LIKES, false>;
  constexpr int WIDTH = Keys::WIDTH, VECTORS = Keys::VECTORS;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& room = *reinterpret_cast<HeldRoom<THREADS, false, KEYS>*>(memory);
  Tally& t = room.exchange.tally;
  This row(p);
  wait_for_leader();
  let_followers_start();
  Chooser together{p, row, room.exchange, t, 0, 0};
  Keys keys;
  keys.scores = reinterpret_cast<Score*>(room.scores);
  keys.first = (warp() * VECTORS * 32 + lane()) * WIDTH - row.skew;
  const Score* from = row.at + keys.first;
  u32 to = shared_address(keys.scores + threadIdx.x * WIDTH);
  int left = p.width - row.start - keys.first;
  keep_here(from), keep_here(to);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (i * 32 * WIDTH < left) copy_vector(to + i * THREADS * 16, from + i * 32 * WIDTH);
  }
  together.clear();
  __syncthreads();
  await_vectors();
  row.length += t.listed;  // which is 0: the compiler would wait for the length before all copies are under way
  row.measure();
  if (seldom(row.n <= p.k)) {
    row.take_all();
  } else {
    Vector<Score> v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      v[i].take(*reinterpret_cast<const uint4*>(keys.scores + (i * THREADS + threadIdx.x) * WIDTH));
    }
    keys.take(v, 0, row.n);
    select_from<true, This, Keys, Chooser, THREADS>(row, keys, together, t, 0, row.n);
  }
  if (p.slots) {
    __syncthreads();
    row.to_slots(t, together.turn ^ 1);
  }
}
