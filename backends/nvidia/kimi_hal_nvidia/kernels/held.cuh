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

  // The thread of the key at this number from the first thread's first key on, and the key's bit in its sets.
  static __device__ __forceinline__ u32 bit_of(u32 number, u32& thread) {
    u32 vector = number / WIDTH, i = vector / 32 % VECTORS * WIDTH + number % WIDTH;
    thread = vector / (32 * VECTORS) * 32 + vector % 32;
    return bit_of_key(i);
  }
  static __device__ __forceinline__ u32 bit_of_key(u32 i) { return FIRST + i / 2 + i % 2 * 16; }

  // Whether this thread has places that are none of [from, to).
  __device__ __forceinline__ bool beyond(int from, int to) const {
    return first < from || first + (VECTORS - 1) * 32 * WIDTH + WIDTH > to;
  }

  // Scores outside of [from, to) become NaN where they stand.
  __device__ __forceinline__ void trim(int from, int to) const {
    static_assert(RAW, "scores stand there before they are taken");
    if (!beyond(from, to)) return;
#pragma unroll 1
    for (int i = 0; i < KEYS; i++) {
      int place = first + i / WIDTH * 32 * WIDTH + i % WIDTH;
      if (place >= from && place < to) continue;
      scores[(i / WIDTH * THREADS + threadIdx.x) * WIDTH + i % WIDTH] = Score(__uint_as_float(0x7fffffffu));
    }
  }

  // Takes scores; those outside of [from, to) count as NaN.
  __device__ __forceinline__ void take(Vector<Score> (&v)[VECTORS], int from, int to) {
    if (!RAW && seldom(beyond(from, to))) {
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
  static __device__ __forceinline__ void counts_of(u32 set, u32 (&counts)[WORDS]) {
    constexpr int EACH = 32 / BITS;
#pragma unroll
    for (int w = 0; w < WORDS; w++) counts[w] = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) counts[i / EACH] |= __popc(set & OF_VECTOR << i * WIDTH / 2) << i % EACH * BITS;
  }

  // Writes the positions of the keys of a set, in order, to shared memory.
  __device__ __forceinline__ void put(int* staged, u32 set, const u32 (&places)[VECTORS]) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      u32 to = shared_address(staged + places[i]);
#pragma unroll
      for (int j = 0; j < WIDTH; j++) {
        u32 bit = bit_of_key(i * WIDTH + j);
        asm volatile(
            "{\n.reg .pred mine;\nsetp.ne.u32 mine, %1, 0;\n@mine st.shared.u32 [%0], %2;\n@mine add.u32 %0, %0, 4;\n}"
            : "+r"(to)
            : "r"(set & 1u << bit), "r"(place_of(bit))
            : "memory");
      }
    }
  }
};

// What the choice asks of the keys that a block holds. PLAIN: of bins of real scores alone.
template <bool PLAIN_BINS, typename Row, typename Keys>
struct HeldOf {
  static constexpr bool PLAIN = PLAIN_BINS;
  using Kept = Keys;

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
    return !PLAIN && bin == 0 ? keys.inside(set, from, to) : set;  // bin 0 has also what is no key
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
  u32 won[CLUSTERED ? 4 : THREADS];  // of each thread, keys of the bin of the k-th that are among the best
  float scores[KEYS * THREADS];
};

// Copies 16 bytes; whoever asked for them waits for them.
__device__ __forceinline__ void copy_vector(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void await_vectors() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same shared memory, whose address is not computed again wherever it is used.
__device__ __forceinline__ void* held_here(void* shared) {
  u32 at = shared_address(shared);
  asm volatile("" : "+r"(at));
  return __cvta_shared_to_generic(at);
}

// What is computed of a number from here on is computed from here on: not before, and not in several places again.
__device__ __forceinline__ void keep_here(u32& number) { asm volatile("" : "+r"(number)); }
template <typename T>
__device__ __forceinline__ void keep_here(const T*& address) {
  asm volatile("" : "+l"(address));
}

// The winners of a row of one block where the k-th stands in a bin of real scores with few others: they are compared with
// each other, and a key that is among the best becomes a bit of its thread.
template <int THREADS, typename Held, typename Room>
__device__ __forceinline__ u32 winners_of_few(const Held& held, Room& room, u32 k) {
  using Keys = typename Held::Kept;
  Tally& t = room.exchange.tally;
  u64* list = room.exchange.own;
  u32 bin = t.found.x, needed = k - t.found.y, size = t.found.z;
  u32 sure = held.keys.from_bin(bin + 1);
#pragma unroll 1
  for (u32 set = held.of_bin(bin); set; set &= set - 1) {
    list[atomicAdd(&room.exchange.told[0], 1u)] = held.strict_of(set);
  }
  __syncthreads();
  compare<THREADS>(list, size, [&](u64 one, u32 greater) {
    if (greater >= needed) return;
    u32 at = ~static_cast<u32>(one) + held.row.skew, thread, bit = Keys::bit_of(at, thread);
    atomicOr(&room.won[thread], 1u << bit);
  });
  __syncthreads();
  return sure | room.won[threadIdx.x];
}

// The winners of a block, by the k-th best of all blocks.
template <typename Held, typename Chooser>
__device__ __forceinline__ u32 winners_of(const Held& held, Chooser& together, Cut& cut) {
  cut = together.settle(held);
  u32 won = held.keys.from_bin(cut.bin + 1);
#pragma unroll 1
  for (u32 set = held.of_bin(cut.bin); set; set &= set - 1) {
    if (held.strict_of(set) >= cut.cut) won |= set & -set;
  }
  return won;
}

// Stages the winners of a block in order and returns how many there are.
template <int THREADS, typename Keys, typename Chooser>
__device__ __forceinline__ u32 stage_all(const Keys& keys, Chooser& together, Tally& t, u32 won) {
  u32 counts[Keys::WORDS], places[Keys::VECTORS];
  keys.counts_of(won, counts);
  u32 mine = places_of<THREADS, Keys::BITS>(counts, t.sums[together.turn ^= 1], places);
  keys.put(stage(t), won, places);
  __syncthreads();
  return mine;
}

// A row of a cluster of blocks.
template <typename Score, bool ROUND, int THREADS, int KEYS>
__device__ __forceinline__ void select_together(const Selection& p) {
  using Keys = Held<Score, ROUND, THREADS, false, KEYS>;
  using This = Row<Score, ROUND, THREADS, true>;
  using Chooser = Together<This, THREADS, true, LIKES, true>;
  constexpr int WIDTH = Keys::WIDTH;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& room = *static_cast<HeldRoom<THREADS, true, KEYS>*>(held_here(memory));
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
  if (often(row.n > p.k)) {
    keys.take(v, max(0, begin), end);
    HeldOf<true, This, Keys> held{row, keys, max(0, begin), end};
    together.find_bin(held);
    Cut cut;
    if (often(together.plain(LIKES))) {
      u32 won = winners_of(held, together, cut);
      row.write(stage(t), cut.above, stage_all<THREADS>(keys, together, t, won), true);
      return;
    }
    u32 won = winners_of(HeldOf<false, This, Keys>{row, keys, max(0, begin), end}, together, cut);
    row.write(stage(t), cut.above, stage_all<THREADS>(keys, together, t, won), false);
  } else {
    row.take_all();
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
  auto& room = *static_cast<HeldRoom<THREADS, false, KEYS>*>(held_here(memory));
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
  room.won[threadIdx.x] = 0;
  __syncthreads();
  row.length += t.listed;  // which is 0: the compiler would wait for the length before all copies are under way
  row.measure();
  if (often(row.n > p.k)) {  // what comes next is fetched while the scores are still on their way
    await_vectors();
    keys.trim(0, row.n);
    Vector<Score> v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      v[i].take(*reinterpret_cast<const uint4*>(keys.scores + (i * THREADS + threadIdx.x) * WIDTH));
    }
    keys.take(v, 0, row.n);
    HeldOf<true, This, Keys> held{row, keys, 0, row.n};
    together.find_bin(held);
    if (often(together.plain(RANKED))) {
      u32 won = winners_of_few<THREADS>(held, room, p.k);
      row.write(stage(t), 0, stage_all<THREADS>(keys, together, t, won), true);
      return;
    }
    Cut cut;
    u32 won = winners_of(HeldOf<false, This, Keys>{row, keys, 0, row.n}, together, cut);
    row.write(stage(t), 0, stage_all<THREADS>(keys, together, t, won), false);
  } else {
    await_vectors();
    row.take_all();
  }
  if (p.slots) {
    __syncthreads();
    row.to_slots(t, together.turn ^ 1);
  }
}
