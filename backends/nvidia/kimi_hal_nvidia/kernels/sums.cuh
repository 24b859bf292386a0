// indexer_logits over FP8 keys as they stand: S[t, j] = scale_j · Σ_h w[t, h] · relu(q[t, h] · k_j), by products of e4m3,
// which Hopper adds with 13 fraction bits of the largest. For many rows of a request.
//
// A block of ROWS rows of one request is multiplied with a page of its keys at a time; pages of all blocks of rows are
// counted, and every block of threads takes an equal share of them. Four warps copy pages into a ring, 16 bytes of a key at
// a time to where the matrix unit looks for them; each of the other warpgroups takes every page for rows of its own. Keys
// are the tall operand, so that a thread adds up most heads by itself. While one warpgroup's page is multiplied, others add.
#pragma once
#include <cstddef>

#include "copies.cuh"
#include "elements.cuh"
#include "products.cuh"
#include "scoring.cuh"

namespace sums {

constexpr int KEY = 128, COPIERS = 4, ENTRIES = 1024, WIDE = 128;
// What is said of a page beside its first key: it has other rows than the one before; it is missing; it is behind the
// last; one of these.
constexpr u32 NEW = 1, MISSING = 2, END = 4, UNUSUAL = 1u << 31;

// A page in the ring.
struct alignas(32) Slot {
  u64 full, empty;
  u32 what;
  int row;  // the first of its request in its block
};

template <int GROUPS, int STAGES>
struct Memory {
  unsigned char columns[GROUPS][WIDE * KEY];  // at whole 1,024 bytes, as the pages
  unsigned char keys[STAGES][PAGE * KEY];
  u32 scales[STAGES][PAGE];
  float weights[GROUPS][WIDE];
  u32 pages[ENTRIES];
  int lengths[GROUPS][8];
  Slot slot[STAGES];
};

// What a product is told of a block of shared memory, but for its high half, which says 1,024 bytes for eight columns and
// the swizzle: steps are added to it, so that a product costs one addition.
constexpr u32 LAYOUT = 0x40000040;
__device__ __forceinline__ u32 block_at(u32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }

// The same value, which the compiler then keeps instead of making it again.
__device__ __forceinline__ u32 kept(u32 value) {
  u32 same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// d (+)= 64 keys · 128 columns, a step of 32 numbers; both in shared memory.
template <int STEP>
__device__ __forceinline__ void product_of_stored(float (&d)[16][4], u32 keys, u32 columns) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{\n.reg .pred p;\n.reg .b64 k, c;\nsetp.ne.b32 p, %66, 0;\n"
               "mov.b64 k, {%64, %67};\nmov.b64 c, {%65, %67};\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NUMBERS_64 "}, k, c, p, 1, 1;\n}"
               : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)
               : "r"(keys + 2 * STEP), "r"(columns + 2 * STEP), "n"(STEP), "n"(LAYOUT));
#endif
}

__device__ __forceinline__ u32 load_word(u32 at) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}
// Waits for, and arrives at, a barrier `offset` bytes behind an address.
template <int OFFSET>
__device__ __forceinline__ void wait_at(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0+%2], %1;\n"
      "@!done bra again;\n}" ::"r"(at),
      "r"(parity), "n"(OFFSET)
      : "memory");
}
template <int OFFSET>
__device__ __forceinline__ void arrive_at(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0+%1];" ::"r"(at), "n"(OFFSET) : "memory");
}
// A store if `live`.
__device__ __forceinline__ void store_if(bool live, float* to, float score) {
  u32 said = live;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.f32 [%1], %2;\n}" ::"r"(said), "l"(to), "f"(score)
               : "memory");
}
__device__ __forceinline__ void store_if(bool live, __nv_bfloat16* to, float score) {
  if (live) *to = __float2bfloat16_rn(score);
}

// Nothing that reads or writes these numbers goes past this place.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
  for (int j = 0; j < N; j++) asm volatile("" : FOUR(d, j)::"memory");
#endif
}

// Copies 16 bytes, some bytes behind both addresses.
template <int TO, int FROM>
__device__ __forceinline__ void copy_sixteen(u32 to, const unsigned char* from) {
  asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}
template <int I>
__device__ __forceinline__ void copy_keys(u32 even, u32 odd, const unsigned char* from) {
  if constexpr (I < 8) {
    copy_sixteen<I * 1024, I * 1024>(even, from);
    copy_sixteen<I * 1024, I * 1024 + 512>(odd, from);
    copy_keys<I + 1>(even, odd, from);
  }
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_done() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Numbers are rectified by the adder, which makes twice as much of them, but for some of each eight columns of a lane: a
// comparison is made by another unit, half as fast. Weights are halved for the others. NaN stays in both.
__host__ __device__ constexpr bool compared(int j, int i) { return (2 * j + i) % 8 < 2; }
__device__ __forceinline__ float rectified(float x, bool by_comparison) {
  if (!by_comparison) return x + fabsf(x);
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

template <typename Out, int HEADS, int GROUPS, int STAGES>
struct Scorer {
  static constexpr int OWN = WIDE / HEADS;     // rows of a warpgroup
  static constexpr int ROWS = OWN * GROUPS;    // of a block
  static constexpr int THREADS = GROUPS * 128 + COPIERS * 32;
  // Registers of a thread of those that copy, at the start, and of the others, which get what those give back.
  static constexpr int FEW = 32, EACH = 65536 / THREADS / 8 * 8,
                       MOST = (EACH * THREADS - FEW * COPIERS * 32) / (GROUPS * 128) / 8 * 8;
  static constexpr bool FITS = STAGES <= 32 && STAGES > 2 * COPIERS && STAGES % COPIERS == 0;
  using Shared = Memory<GROUPS, STAGES>;

  const Scoring& p;
  Shared& m;

  // ---- which pages

  // Rows that an entry of the count stands for.
  __device__ __forceinline__ int span() const { return (p.rows + 32 * ENTRIES - 1) / (32 * ENTRIES); }

  // Pages that a lane's row brings in: those of all rows of its block with its request, if it is the first of them that
  // has keys. Lanes have 32 rows that follow each other.
  static __device__ __forceinline__ int pages_brought(int keys, int request) {
    u32 peers = __match_any_sync(EVERY, keys > 0 ? request : -1 - static_cast<int>(lane()));
    if constexpr (ROWS < 32) peers &= ((1u << ROWS % 32) - 1) << lane() / ROWS * ROWS;
    u32 firsts = __ballot_sync(EVERY, keys > 0 && !(peers & lanes_below()));
    int pages = 0;
#pragma unroll 1
    while (firsts) {
      int at = __ffs(firsts) - 1;
      firsts &= firsts - 1;
      u32 those = __shfl_sync(EVERY, peers, at);
      int longest = __reduce_max_sync(EVERY, those >> lane() & 1 ? keys : 0);
      if (static_cast<int>(lane()) == at) pages = pages_in(longest);
    }
    return pages;
  }

  __device__ __forceinline__ int pages_of(int row, int& request) const {
    int keys = keys_of(p, said_of(p, row), request);
    return pages_brought(keys, request);
  }

  // Counts all pages; every warp counts some rows.
  __device__ __forceinline__ void count_pages() const {
    constexpr int AHEAD = 4, WARPS = THREADS / 32;
    int each = span(), entries = (p.rows + 32 * each - 1) / (32 * each);
#pragma unroll 1
    for (int e = warp() * AHEAD; e < entries; e += WARPS * AHEAD) {
      u32 sum[AHEAD] = {};
#pragma unroll 1
      for (int s = 0; s < each; s++) {
        Said said[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) said[i] = said_of(p, ((e + i) * each + s) * 32 + lane());
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          int request, keys = keys_of(p, said[i], request);
          sum[i] += pages_brought(keys, request);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        u32 all = __reduce_add_sync(EVERY, sum[i]);
        if (lane() == 0 && e + i < ENTRIES) m.pages[e + i] = all;
      }
    }
  }

  // This block's share.
  __device__ __forceinline__ Share share() const {
    int each = span(), entries = (p.rows + 32 * each - 1) / (32 * each), now, count;
    u32 sum = 0;
#pragma unroll 1
    for (int e = lane(); e < entries; e += 32) sum += m.pages[e];
    divide(__reduce_add_sync(EVERY, sum), now, count);
    if (count == 0) return Share{0, 0, count};
    int before = 0, base = 0;
#pragma unroll 1
    for (int e = 0; e < entries; e += 32) {
      int mine = e + lane() < entries ? m.pages[e + lane()] : 0;
      int until = before + static_cast<int>(warp_inclusive(mine));
      u32 who = __ballot_sync(EVERY, now < until);
      if (who) {
        int at = __ffs(who) - 1;
        before = __shfl_sync(EVERY, until - mine, at);
        base = (e + at) * each * 32;
        break;
      }
      before = __shfl_sync(EVERY, until, 31);
    }
#pragma unroll 1
    for (;; base += 32) {
      int request, pages = pages_of(base + lane(), request);
      int until = before + static_cast<int>(warp_inclusive(pages));
      u32 who = __ballot_sync(EVERY, now < until);
      if (who) {
        int at = __ffs(who) - 1;
        return Share{base + at, now - __shfl_sync(EVERY, until - pages, at), count};
      }
      before = __shfl_sync(EVERY, until, 31);
    }
  }

  // ---- copying

  // A warp's pages, every fourth of the block's. What it begins it tells of when the next has begun.
  __device__ __forceinline__ void produce(int copier, Share mine) {
    int base = mine.row / 32 * 32, begin = -mine.first, end = begin, row = 0, slot = copier, told = -1, request = -1;
    int pages = mine.count ? pages_of(base + lane(), request) : 0;
    u32 waiting = __ballot_sync(EVERY, pages > 0) & EVERY << mine.row % 32, parity = 1;
    const int* table = p.table;
#pragma unroll 1
    for (int number = copier; number <= mine.count; number += COPIERS) {
      bool last = number == mine.count;  // no page any more
#pragma unroll 1
      while (!last && number >= end) {  // the rows of this page come later
        if (!waiting) {
          base += 32;
          pages = pages_of(base + lane(), request);
          waiting = __ballot_sync(EVERY, pages > 0);
          continue;
        }
        int at = __ffs(waiting) - 1;
        waiting &= waiting - 1;
        row = base + at;
        begin = end;
        end += __shfl_sync(EVERY, pages, at);
        table = p.table + __shfl_sync(EVERY, request, at) * p.table_row;
      }
      int page = last ? -1 : table[number - begin];
      barrier_wait(&m.slot[slot].empty, parity);  // the first time round at once
      bool present = page >= 0 && page < p.pages;
      if (lane() == 0) {
        u32 flags = (number == max(begin, 0) ? NEW : 0) | (present ? 0 : MISSING) | (last ? END : 0);
        m.slot[slot].what = (number - begin) * PAGE | flags | (flags ? UNUSUAL : 0);
        m.slot[slot].row = row;
      }
      if (present) copy_page(slot, p.cache + page * p.cache_page);
      copies_commit();
      if (told >= 0) tell<1>(told);
      told = slot;
      slot += COPIERS;
      if (slot >= STAGES) {
        slot -= STAGES;
        parity ^= 1;
      }
    }
    if (told >= 0) tell<0>(told);
  }

  __device__ __forceinline__ void copy_page(int slot, const unsigned char* from) const {
    u32 key = lane() / 8, piece = lane() % 8, even = shared_address(m.keys[slot]) + key * KEY + (piece ^ key) * 16;
    copy_keys<0>(even, (even ^ 64) + 512, from + lane() * 16);
    if (lane() < 16) copy_sixteen<0, PAGE * KEY>(shared_address(m.scales[slot]) + lane() * 16, from + lane() * 16);
  }

  template <int PENDING>
  __device__ __forceinline__ void tell(int slot) const {
    copies_done<PENDING>();
    publish();
    __syncwarp();
    if (lane() == 0) barrier_arrive(&m.slot[slot].full);
  }

  // ---- scoring

  // A block of rows, as a lane sees it: the longest of this warpgroup's, and of the rows whose scores the lane stores
  // where its score of a page's first key is, and how many keys there are from there on.
  struct Rows {
    int longest;
    int left[(OWN + 1) / 2];
    Out* at[(OWN + 1) / 2];
  };

  __device__ __forceinline__ float weight(int row, int head) const {
    long long where = row * p.weights_row + head;
    return p.weights_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[where])
                          : static_cast<const float*>(p.weights)[where];
  }

  // The key of a lane's two whose scores it stores.
  static __device__ __forceinline__ int token() { return warp() % 4 * 16 + lane() / 4 + lane() % 2 * 8; }

  __device__ __forceinline__ void load_queries(int group, int row, Rows& rows, float (&held)[16][2]) {
    int thread = threadIdx.x % 128, first = row / ROWS * ROWS + group * OWN, request = p.row_req[row * p.req_stride];
    bool whole = (reinterpret_cast<u64>(p.q) | p.q_row | p.q_head) % 16 == 0;
    meet(group);
#pragma unroll 4
    for (int item = thread; item < WIDE * 8; item += 128) {
      int n = item / 8, piece = item % 8, mine = first + n / HEADS, head = n % HEADS;
      uint4 all = make_uint4(0, 0, 0, 0);
      if (mine < p.rows && head < p.heads) {
        const unsigned char* at = p.q + mine * p.q_row + head * p.q_head + piece * 16;
        if (whole) {
          all = *reinterpret_cast<const uint4*>(at);
        } else {
          u32 word[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            word[i] = at[4 * i] | at[4 * i + 1] << 8 | at[4 * i + 2] << 16 | static_cast<u32>(at[4 * i + 3]) << 24;
          }
          all = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
      *reinterpret_cast<uint4*>(m.columns[group] + n * KEY + (piece ^ n % 8) * 16) = all;
    }
    int mine = first + thread / HEADS, head = thread % HEADS;
    m.weights[group][thread] = mine < p.rows && head < p.heads ? weight(mine, head) : 0.0f;
    if (thread < 8) {
      int its = -1, keys = thread < OWN ? keys_of(p, said_of(p, first + thread), its) : 0;
      m.lengths[group][thread] = its == request ? keys : 0;
    }
    publish();
    meet(group);
    u32 c = lane() % 4;
    rows.longest = 0;
#pragma unroll
    for (int r = 0; r < OWN; r++) rows.longest = max(rows.longest, m.lengths[group][r]);
    rows.longest = __shfl_sync(EVERY, rows.longest, 0);
#pragma unroll
    for (int i = 0; i < (OWN + 1) / 2; i++) {
      int r = OWN == 1 ? 0 : 2 * i + c / 2;
      rows.left[i] = m.lengths[group][r] - token();
      rows.at[i] = static_cast<Out*>(p.out) + (first + r) * p.out_row + token();
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
      for (int i = 0; i < 2; i++) held[j][i] = m.weights[group][8 * j + 2 * c + i] * (compared(j, i) ? 1.0f : 0.5f);
    }
  }

  // Begins the product of a page and a warpgroup's columns.
  static __device__ __forceinline__ void begin(float (&d)[16][4], u32 keys, u32 columns) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    hold(d);
    products_begin();
    product_of_stored<0>(d, keys, columns);
    product_of_stored<1>(d, keys, columns);
    product_of_stored<2>(d, keys, columns);
    product_of_stored<3>(d, keys, columns);
    products_commit();
#endif
  }

  // Rectifies, weighs and adds up what a lane holds of two keys; adds up the four lanes of each; lane c then has key
  // c % 2 of every second row, and stores it.
  static __device__ __forceinline__ void finish(const float (&d)[16][4], const float (&held)[16][2], const Rows& rows,
                                                int first, float scale, bool half, bool odd) {
    constexpr int EACH_ROW = HEADS / 8;
    float one[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = r * EACH_ROW; j < (r + 1) * EACH_ROW; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int k = 0; k < 2; k++) sum[k] = fmaf(rectified(d[j][2 * k + i], compared(j, i)), held[j][i], sum[k]);
        }
      }
      one[r] = half ? sum[1] : sum[0];
      one[r] += __shfl_xor_sync(EVERY, half ? sum[0] : sum[1], 1);
    }
    if constexpr (OWN == 1) {
      store_if(first < rows.left[0] && !odd, rows.at[0] + first, (one[0] + __shfl_xor_sync(EVERY, one[0], 2)) * scale);
    } else {
#pragma unroll
      for (int r = 0; r < OWN; r += 2) {
        float mine = odd ? one[r + 1] : one[r];
        mine += __shfl_xor_sync(EVERY, odd ? one[r] : one[r + 1], 2);
        store_if(first < rows.left[r / 2], rows.at[r / 2] + first, mine * scale);
      }
    }
  }

  static __device__ __forceinline__ void store_missing(const Rows& rows, int first) {
#pragma unroll
    for (int i = 0; i < (OWN + 1) / 2; i++) store_if(first < rows.left[i], rows.at[i] + first, -INFINITY);
  }

  __device__ __forceinline__ float scale_of(u32 code) const { return p.e8m0 ? power(code & 255) : __uint_as_float(code); }

  // Scores the pages of the ring, of this warpgroup's rows. What is known of a page is read while the one before is
  // multiplied.
  __device__ __forceinline__ void consume(int group) {
    constexpr int LANE = 20, EMPTY = offsetof(Slot, empty), WHAT = offsetof(Slot, what);
    u32 base = kept(shared_address(&m)), columns = kept(block_at(base + group * WIDE * KEY));
    u32 keys = kept(block_at(base + static_cast<u32>(offsetof(Shared, keys))));
    u32 ring = kept(base + static_cast<u32>(offsetof(Shared, slot)));
    // Where a lane's scale of the first page is, and which lane it is: in one register, made once.
    u32 mine = __shfl_sync(EVERY, base + static_cast<u32>(offsetof(Shared, scales)) + token() * 4 | lane() << LANE, lane());
    int slot = 0;
    u32 parity = 0;
    float held[16][2], d[16][4];
    Rows rows;
    rows.longest = 0;
    wait_at<0>(ring, parity);
    u32 what = load_word(ring + WHAT);
    auto go_on = [&] {  // to the next page, once it has come
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
      wait_at<0>(ring + slot * sizeof(Slot), parity);
      what = load_word(ring + slot * sizeof(Slot) + WHAT);
    };
#pragma unroll 1
    while (true) {
      u32 now = ring + slot * sizeof(Slot);
      if (what >= static_cast<u32>(rows.longest)) {
        if (what & END) return;
        if (what & NEW) load_queries(group, m.slot[slot].row, rows, held);
        bool missing = what & MISSING;
        what &= ~(UNUSUAL | NEW | MISSING);
        if (missing || what >= static_cast<u32>(rows.longest)) {
          if (missing) store_missing(rows, what);
          if (!(mine >> LANE)) arrive_at<EMPTY>(now);
          go_on();
          continue;
        }
      }
      int first = what;
      begin(d, keys + slot * (PAGE * KEY >> 4), columns);
      u32 code = load_word((mine & (1u << LANE) - 1) + slot * (PAGE * 4));
      go_on();
      float scale = scale_of(code);
      asm volatile("" : "+f"(scale));  // here, where there is time
      multiplied<0>();
      hold(d);
      if (!(mine >> LANE)) arrive_at<EMPTY>(now);
      finish(d, held, rows, first, scale, mine >> LANE & 1, mine >> LANE & 2);
    }
  }

  __device__ __forceinline__ void run() {
    let_followers_start();
    int group = __shfl_sync(EVERY, warp() / 4, 0);
    if (warp() == 0 && lane() < STAGES) {
      barrier_init(&m.slot[lane()].full, 1);
      barrier_init(&m.slot[lane()].empty, GROUPS * 4);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      publish();
    }
    count_pages();
    __syncthreads();
    if (group == GROUPS) {
      Share mine = share();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
#endif
      produce(warp() - GROUPS * 4, mine);
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST));
#endif
      consume(group);
    }
  }
};

}  // namespace sums

// Scores as OUT; heads padded to HEADS; warpgroups, each with 128 columns; pages in the ring.
#define FP8_SUMS(NAME, ...)                                                                                    \
  extern "C" __global__ void __launch_bounds__(sums::Scorer<__VA_ARGS__>::THREADS, 1)                          \
      NAME(const __grid_constant__ Scoring p) {                                                                \
    extern __shared__ __align__(1024) unsigned char memory[];                                                  \
    using This = sums::Scorer<__VA_ARGS__>;                                                                    \
    This{p, *reinterpret_cast<This::Shared*>(memory)}.run();                                                   \
  }                                                                                                            \
  static_assert(sizeof(sums::Scorer<__VA_ARGS__>::Shared) <= 232448, "no block has so much shared memory");    \
  static_assert(sums::Scorer<__VA_ARGS__>::FITS, "a page would wait for one that is told of after it");
