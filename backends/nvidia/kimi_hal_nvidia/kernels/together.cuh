// The k-th best of the keys that a block, or a cluster of blocks, has: counted by coarse bins, whose counts a cluster
// adds up, until few enough keys are left to be exchanged and compared with each other.
#pragma once
#include "copies.cuh"
#include "halves.cuh"
#include "selection.cuh"

constexpr u32 RANKED = 160;  // keys that are compared all with all

// A key's place in the strict order: the higher score, then the lower position. No two keys have the same.
__device__ __forceinline__ u64 strict(u32 key, u32 place) { return static_cast<u64>(key) << 32 | ~place; }

// Calls back once with each of these keys, and how many of them are greater. A warp compares some of them with all at
// once, two counts to a word.
template <int THREADS, typename F>
__device__ __forceinline__ void compare(const u64* keys, u32 size, F f) {
  constexpr u32 WARPS = THREADS / 32, EACH = WARPS > 16 ? 2 : 4;
#pragma unroll 1
  for (u32 first = warp(); first < size; first += WARPS * EACH) {
    u64 mine[EACH];
    u32 greater[EACH / 2] = {};
#pragma unroll
    for (u32 e = 0; e < EACH; e++) mine[e] = keys[min(first + e * WARPS, size - 1)];
#pragma unroll 1
    for (u32 j = lane(); j < size; j += 32) {
      u64 one = keys[j];
#pragma unroll
      for (u32 e = 0; e < EACH; e++) greater[e / 2] += static_cast<u32>(one > mine[e]) << e % 2 * 16;
    }
    u32 counts = 0, which = first + lane() * WARPS;
#pragma unroll
    for (u32 e = 0; e < EACH / 2; e++) {
      u32 sum = __reduce_add_sync(EVERY, greater[e]);
      counts = lane() / 2 == e ? sum : counts;
    }
    if (lane() < EACH && which < size) f(keys[which], counts >> lane() % 2 * 16 & 0xffff);
  }
}

constexpr int CLUSTER = 16;  // blocks at most
constexpr int FEW = 4;       // blocks that give each other all of their bins, once

// Blocks of a cluster talk by sending, each value with a word to a barrier of the receiver, which waits for bytes:
// barriers of a cluster would wait for all memory.
template <bool CLUSTERED, int LIKES, bool GIVEN>
struct Exchange {
  Tally tally;
  uint4 parts[CLUSTERED ? BINS / 4 : 1];     // all blocks' bins of the part that this block adds up
  uint4 part[CLUSTERED ? BINS / 4 : 1];      // their sums
  uint4 all_bins[CLUSTERED ? BINS / 4 : 1];  // of the cluster
  uint4 given[GIVEN ? FEW * BINS / 4 : 1];   // all bins of few blocks
  u64 own[LIKES], list[LIKES];
  u64 all[CLUSTERED ? LIKES : 1];  // the blocks' keys, some room for each
  u64 counts[CLUSTER];             // of each block: keys in the bin, and winners for certain << 32
  u64 notes[CLUSTER];              // of each block, at its own
  u64 last;
  u64 heard[5];  // barriers: of parts, of all bins, of counts, of keys, of notes
  u32 told[2];   // of this block, as counts
};
enum { PARTS, ALL_BINS, COUNTS, KEYS_OF_BIN, NOTES };

// Where the k-th best stands: winners are the keys of higher bins, and of its bin those from `cut` on.
struct Cut {
  u32 bin, above;  // winners of the blocks before this one
  u64 cut;
};

template <typename Row, int THREADS, bool CLUSTERED, int LIKES, bool GIVEN>
struct Together {
  const Selection& p;
  const Row& row;
  Exchange<CLUSTERED, LIKES, GIVEN>& m;
  Tally& t;
  u32 turn;
  u32 round;  // how often bins were added up

  // Whether blocks give each other all of their bins the first time, instead of adding up a part each.
  __device__ __forceinline__ bool few() const { return GIVEN && p.blocks <= FEW; }
  // Divided by the number of blocks, which is a power of two.
  __device__ __forceinline__ u32 per_block(u32 number) const { return number >> (31 - __clz(p.blocks)); }
  __device__ __forceinline__ u32 slots() const { return per_block(LIKES); }  // of exchanged keys

  // Of all threads, before anything else.
  __device__ __forceinline__ void clear() {
    clear_bins<THREADS>(t);
    if (threadIdx.x == 0) {
      t.listed = m.told[0] = m.told[1] = 0;
      if constexpr (CLUSTERED) {
#pragma unroll
        for (int i = 0; i < 5; i++) barrier_init(&m.heard[i], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(&m.heard[PARTS], BINS * 4 * (few() ? p.blocks : 1));
        barrier_expect(&m.heard[ALL_BINS], BINS * 4);
        barrier_expect(&m.heard[COUNTS], p.blocks * 8);
        barrier_expect(&m.heard[NOTES], p.blocks * 8);
      }
    }
    if constexpr (CLUSTERED) {
      __syncthreads();
      cluster_arrive();
    }
  }

  // Behind this, the other blocks listen.
  __device__ __forceinline__ void meet_blocks() const {
    if constexpr (CLUSTERED) cluster_wait();
  }

  // Waits for a barrier's bytes, and lets it expect as many again.
  __device__ __forceinline__ void hear(int which, u32 turn, u32 again) const {
    barrier_wait(&m.heard[which], turn & 1);
    if (threadIdx.x == 0 && again) barrier_expect(&m.heard[which], again);
  }

  // Finds the bin with the needed-th key, of all blocks' bins.
  __device__ __forceinline__ void find_together(u32 needed) {
    __syncthreads();
    if constexpr (!CLUSTERED) {
      find<THREADS>(t, t.bins, needed, turn ^= 1);
      return;
    }
    if (few() && round == 0) {
      give(needed);
      return;
    }
    if (few() && round == 1) cluster_sync();  // else a block might hear of this round before it has heard all of the last
    u32 each = per_block(BINS / 4), quad = threadIdx.x & (each - 1), who = threadIdx.x >> (31 - __clz(each));
    bool live = who < static_cast<u32>(p.blocks);
    if (live) {  // a block adds up a part of the bins
      uint4 some = t.bins[threadIdx.x];
      t.bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
      send(&m.parts[row.rank * each + quad], who, some, &m.heard[PARTS]);
    }
    hear(PARTS, round, BINS * 4);
    u32 *from = reinterpret_cast<u32*>(m.parts), *to = reinterpret_cast<u32*>(m.part), words = each * 4;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < words; i += THREADS) {
      u32 sum = 0;
#pragma unroll 4
      for (u32 j = 0; j < static_cast<u32>(p.blocks); j++) sum += from[j * words + i];
      to[i] = sum;
    }
    __syncthreads();
    if (live) send(&m.all_bins[row.rank * each + quad], who, m.part[quad], &m.heard[ALL_BINS]);
    hear(ALL_BINS, few() ? round - 1 : round, BINS * 4);
    round++;
    find<THREADS>(t, m.all_bins, needed, turn ^= 1);
  }

  // The same, once: every block gets all bins, and adds up what it looks at.
  __device__ __forceinline__ void give(u32 needed) {
    constexpr u32 ALL = BINS / 4;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ALL; i += THREADS) {
      uint4 some = t.bins[i];
      t.bins[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (u32 who = 0; who < static_cast<u32>(p.blocks); who++) {
        send(&m.given[row.rank * ALL + i], who, some, &m.heard[PARTS]);
      }
    }
    hear(PARTS, round++, BINS * 4);
    find<THREADS>(t, needed, turn ^= 1, [&](int quad) {
      uint4 sum = m.given[quad];
#pragma unroll
      for (int i = 1; i < FEW; i++) {
        uint4 more = i < p.blocks ? m.given[i * ALL + quad] : make_uint4(0, 0, 0, 0);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      return sum;
    });
  }

  // Sends a value of this block to all, which get it at `to[rank]`.
  __device__ __forceinline__ void note(u64* to, u64 value, int which) const {
    if (warp() == 0 && lane() < static_cast<u32>(p.blocks)) send(&to[row.rank], lane(), value, &m.heard[which]);
  }

  // Sends this block's keys and counts to all blocks, and waits for theirs, which then stand one behind the other in
  // `list`: how many there are, where those of blocks before this one end, and the winners of those blocks.
  __device__ __forceinline__ u32 exchange(u32& above, u32& before) {
    __syncthreads();
    above = before = 0;
    if constexpr (!CLUSTERED) return m.told[0];
    u32 mine = m.told[0], who = warp() & (p.blocks - 1), team = per_block(THREADS / 32);
    u32 begin = per_block(warp()) < team ? per_block(warp()) * 32 + lane() : LIKES;  // of a warp's keys from or for a block
    note(m.counts, static_cast<u64>(m.told[1]) << 32 | mine, COUNTS);
#pragma unroll 1
    for (u32 i = begin; i < min(mine, slots()); i += team * 32) {
      send(&m.all[row.rank * slots() + i], who, m.own[i], &m.heard[KEYS_OF_BIN]);
    }
    hear(COUNTS, 0, 0);
    u64 both = lane() < static_cast<u32>(p.blocks) ? m.counts[lane()] : 0;
    u32 count = static_cast<u32>(both), wins = static_cast<u32>(both >> 32), until = warp_inclusive(count);
    u32 sent = __reduce_add_sync(EVERY, min(count, slots()));
    if (threadIdx.x == 0) barrier_expect(&m.heard[KEYS_OF_BIN], 8 * sent);
    u32 first = __shfl_sync(EVERY, until - count, who), its = __shfl_sync(EVERY, count, who);
    before = __shfl_sync(EVERY, until - count, row.rank);
    above = __reduce_add_sync(EVERY, lane() < static_cast<u32>(row.rank) ? wins : 0);
    hear(KEYS_OF_BIN, 0, 0);
    if (seldom(__reduce_max_sync(EVERY, count) > slots())) {  // a block has more than its room
      gather(who, first, begin, its, team * 32);
    } else {
#pragma unroll 1
      for (u32 i = begin; i < its; i += team * 32) m.list[first + i] = m.all[who * slots() + i];
      __syncthreads();
    }
    return __shfl_sync(EVERY, until, 31);
  }

  // Fetches keys of a block, `begin` and every `step`-th from there of `size`, to `list` from `first` on.
  __device__ __forceinline__ void gather(u32 who, u32 first, u32 begin, u32 size, u32 step) {
    cluster_sync();
#pragma unroll 1
    for (u32 i = begin; i < size; i += step) {
      uint2 one = remote(reinterpret_cast<const uint2*>(&m.own[i]), who);
      m.list[first + i] = static_cast<u64>(one.y) << 32 | one.x;
    }
    cluster_sync();  // nobody reads here any more
  }

  static __device__ __forceinline__ int shift_of(u64 low, u64 high) {
    return max(0, 64 - __clzll(static_cast<long long>(high - low)) - DIGIT);
  }

  // The needed-th best of the keys, all of which are from `low` to `high`.
  __device__ __forceinline__ void kth(u32 size, u32 needed, u64 low, u64 high) {
    const u64* from = CLUSTERED ? m.list : m.own;
    if (seldom(size > RANKED)) {  // only those of the digit that the one sought has
      int shift = shift_of(low, high);
      u64* to = CLUSTERED ? m.all : m.list;
#pragma unroll 1
      for (u32 i = threadIdx.x; i < size; i += THREADS) count(t, static_cast<u32>((from[i] - low) >> shift));
      __syncthreads();
      find<THREADS>(t, t.bins, needed, turn ^= 1);
      u32 digit = t.found.x;
#pragma unroll 1
      for (u32 i = threadIdx.x; i < size; i += THREADS) {
        u64 one = from[i];
        if (static_cast<u32>((one - low) >> shift) == digit) to[atomicAdd(&t.listed, 1u)] = one;
      }
      __syncthreads();
      needed -= t.found.y;
      size = t.found.z;
      from = to;
    }
    compare<THREADS>(from, size, [&](u64 one, u32 greater) {
      if (greater == needed - 1) m.last = one;
    });
    __syncthreads();
  }

  // What the strict keys of a bin are from and to.
  static __device__ __forceinline__ void bounds(u32 bin, u64& low, u64& high) {
    low = static_cast<u64>(bin ? least_of_bin(bin) : NAN_ORDINAL) << 32;
    high = static_cast<u64>(bin ? most_of_bin(bin) : NAN_ORDINAL) << 32 | 0xffffffffu;
  }

  // Finds the bin of the k-th best. `keys` counts its keys by bins, counts those of higher bins than one, and calls back
  // with each key of one bin.
  template <typename Keys>
  __device__ __forceinline__ void find_bin(const Keys& keys) {
    keys.count_all(t);
    find_together(p.k);
  }

  // Whether that bin has real scores, and no more than `most`.
  __device__ __forceinline__ bool plain(u32 most) const { return (t.found.x > MINUS_INFINITY_BIN) & (t.found.z <= most); }

  // Finds the k-th best in its bin. Keys are PLAIN where `plain` said so.
  template <typename Keys>
  __device__ __forceinline__ Cut settle(const Keys& keys) {
    constexpr bool PLAIN = Keys::PLAIN;
    u32 bin = t.found.x, needed = p.k - t.found.y, same = t.found.z;
    u64 low = 0, high = ~0ull;  // of the bin's keys those that are in question, once there are bounds
    bool open = PLAIN || same > needed || bin == 0;  // bin 0 may have been counted for what is no key
    if constexpr (!PLAIN) {
      if (open && same > LIKES) bounds(bin, low, high);
#pragma unroll 1
      while (open && same > LIKES) {
        int shift = shift_of(low, high);
        keys.each_of(bin, [&](u64 one) {
          if (one >= low && one <= high) count(t, static_cast<u32>((one - low) >> shift));
        });
        find_together(needed);
        low += static_cast<u64>(t.found.x) << shift;
        high = low + ((1ull << shift) - 1);
        needed -= t.found.y;
        same = t.found.z;
        open = same > needed;
      }
    }
    u32 wins = keys.above(bin);
    keys.each_of(bin, [&](u64 one) {
      if (!PLAIN && (one > high || (!open && one >= low))) wins++;
      else if (PLAIN || one >= low) m.own[atomicAdd(&m.told[0], 1u)] = one;
    });
    if constexpr (CLUSTERED) {
      wins = __reduce_add_sync(EVERY, wins);
      if (lane() == 0 && wins) atomicAdd(&m.told[1], wins);
    }
    u32 before;
    Cut found{bin, 0, low};
    u32 size = exchange(found.above, before);
    if (open) {
      if (seldom(size > RANKED) && low == 0) bounds(bin, low, high);
      kth(size, needed, low, high);
      found.cut = m.last;
      if constexpr (CLUSTERED) {
        u32 winners = 0;
#pragma unroll 1
        for (u32 i = lane(); i < before; i += 32) winners += m.list[i] >= found.cut;
        found.above += __reduce_add_sync(EVERY, winners);
      }
    }
    return found;
  }
};
