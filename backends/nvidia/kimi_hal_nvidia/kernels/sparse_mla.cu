// sparse_mla: attention from one row's heads to the latents that its indices name.
//
// A row and block of 16, 32 or 48 heads belongs to a cluster of blocks, each with a part of the row's keys. Latents come
// as they are into a ring in shared memory by one copy a row, asked for by warps that do nothing else. A warpgroup takes a
// tile of 64 keys by itself, or of 48 heads three do each a part of the work (relay.cuh): keys are the tall operand of
// S = K Qt and latents that of O^T = V^T Pt, both decoded from the same bytes straight to float16 in registers, where every
// code times its scale is exact. Softmax subtracts a reference that only follows the maximum where that has grown by
// 2^SLACK, so that mostly one meeting a tile is enough. Warpgroups and blocks of a cluster add their parts through shared
// memory; or parts meet in memory (meeting.cuh), and blocks take equal ranges of all rows' parts.
#include <cuda_bf16.h>

#include "copies.cuh"
#include "latents.cuh"
#include "tall.cuh"

// A division of numbers below 2^31 by one that a launch is told: a product, of which `shift` bits go away.
struct Divisor {
  u32 by, factor, shift;
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(static_cast<u64>(static_cast<u32>(n)) * factor >> shift);
  }
};

struct Attention {
  const void* q;
  const unsigned char* cache;
  const int* indices;
  const float* k_scale;
  const float* q_scale;
  const int* index_len;
  const int* table;
  const int* row_req;
  __nv_bfloat16* out;
  float* lse;
  unsigned char* partials;  // what parts leave in memory for each other; null: they meet in a cluster
  u64* arrived;         // of an item, a byte for each warp: parts that it has left. 0 before a launch, and behind it
  long long q_row, q_head, page_stride, index_row, len_stride, table_row, req_stride, out_row, out_head, lse_row;
  int width, pages, requests, columns, rows, heads, parts, each, space, rank, q_fp8, returns_lse;
  Divisor page, run, turn;  // of a shard's runs of positions, and of all ranks' runs
  Divisor blocks;  // of a row's heads
  Divisor cuts;    // of an item: its parts
  int share, longer;  // parts that a block takes, where they meet in memory, and blocks that have one more
  float softmax_scale;

  __device__ __forceinline__ bool clustered() const { return parts > 1 && !partials; }
};

enum Space { SLOT, POSITION, LOCAL };

constexpr int KEYS = 64;  // of a tile
constexpr int MOST_PARTS = 16;  // of a row: blocks of a cluster
constexpr int MOST_RELAYED = 8;  // of many heads
constexpr int MOST_PARTIALS = 8;  // of a row, where they meet in memory
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Exponentials beside the reference are at most e^SLACK, 2^4, and the largest so far is at least 1: float16 holds what
// counts of them. Sums are of float32, and the reference is a logit: one key's LSE is that logit to the bit.
constexpr float SLACK = 4 * LN2;

// How a kernel is laid out: heads of a block, warpgroups that compute, tiles in shared memory. Of many heads the outputs
// of all latents leave a warpgroup no registers for anything else: then there is a relay of three. Where KEPT, the values
// that S decodes stay in shared memory as float16, and O takes them from there.
template <typename Format_, int HEADS_, int GROUPS_, int DEPTH_, bool KEPT_ = false>
struct Shape {
  using Format = Format_;
  static constexpr bool KEPT = KEPT_;
  static constexpr int HEADS = HEADS_, GROUPS = GROUPS_, FETCHERS = 4, DEPTH = DEPTH_;
  static constexpr bool RELAYED = HEADS > 32;
  static_assert(!RELAYED || GROUPS == 3, "one scores, one adds, one weighs");
  static constexpr int WORKERS = 128 * GROUPS, THREADS = WORKERS + 32 * FETCHERS;
  static constexpr int BLOCKS_THERE = GROUPS == 1 ? 2 : 1;  // of a multiprocessor
  // Registers of a thread that computes and of one that fetches.
  static constexpr int MANY = GROUPS == 2 ? 232 : 208, FEW = GROUPS == 1 ? 48 : 40;
  static constexpr int SCORING = 112, ADDING = 248, WEIGHING = 112;  // of a relay
  static constexpr bool PASSING = GROUPS == 2 && HEADS == 16;  // of few rows, which share no keys
  static constexpr bool APART = GROUPS == 2;  // each warpgroup has references and outputs of its own
  static constexpr bool LEAVES = GROUPS > 1;  // parts may meet in memory
  static constexpr int TALL = 8;  // of a warpgroup's outputs, tiles of 64 latents
  static constexpr int STEPS = HEADS == 16 ? 4 : 2;  // of products that are begun together
  static constexpr int PAIRS = HEADS / 4;  // heads of a thread: 8 j + 2 t + (0, 1)
};

extern __shared__ __align__(1024) unsigned char memory[];

template <bool, typename A, typename B>
struct Either { using type = A; };
template <typename A, typename B>
struct Either<false, A, B> { using type = B; };

template <typename S, bool RELAYED = S::RELAYED>
struct Room {
  __align__(1024) unsigned char q[BLOCKS][S::HEADS * 128];
  unsigned char p[S::GROUPS][2][S::HEADS * 128];
  unsigned char more[S::APART && !S::KEPT ? sizeof p : 0];  // beside `p`, where outputs are exchanged
  __align__(1024) unsigned char kept[S::GROUPS][S::KEPT ? LATENT / 64 * KEYS * 128 : 0];
  __align__(128) unsigned char keys[S::DEPTH][KEYS * S::Format::STRIDE];
  float factor[S::HEADS];
  float most[S::GROUPS][4][S::HEADS];
  float4 total[S::GROUPS][S::HEADS];  // of four warps
  float top[S::GROUPS][S::HEADS];
  u64 full[S::DEPTH], empty[S::DEPTH], given;
  u32 exceeded[2][S::GROUPS];
  unsigned short live[S::DEPTH][4];  // which keys of a tile there are, a bit each
};
// Of a cut row the tiles' place afterwards takes what the cluster's blocks give to this one.

// Logits stay in base e: a large one would not be a float32 in base 2.
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2E));
  return y;
}

// What all lanes hold alike, in a register that a warp shares: there the matrix unit reads it, and from any other it would
// be brought there anew for each product.
__device__ __forceinline__ u32 alike(u32 x) { return __reduce_or_sync(EVERY, x); }

// The larger; NaN if one is.
__device__ __forceinline__ float larger(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < INFINITY; }

// Those who compute meet, without those who fetch.
template <typename S>
__device__ __forceinline__ void workers_meet() {
  asm volatile("bar.sync 15, %0;" ::"n"(S::WORKERS) : "memory");
}

// Where an index's latent stands in the cache; null where it names none.
template <typename Format, bool SLOTS = false>
__device__ __forceinline__ const unsigned char* located(const Attention& a, const int* table, int index) {
  bool live = index >= 0;
  if (!SLOTS && a.space == POSITION) {
    int turn = a.turn.quotient(index), within = index - turn * a.turn.by, owner = a.run.quotient(within);
    live = live && owner == a.rank;
    index = turn * a.run.by + within - owner * a.run.by;
  }
  int page = a.page.quotient(index), inside = index - page * a.page.by;
  if (!SLOTS && a.space != SLOT) {
    live = live && page < a.columns;
    page = live ? __ldg(table + page) : -1;
    live = live && page >= 0;
  }
  if (!live || page >= a.pages) return nullptr;
  return a.cache + page * a.page_stride + static_cast<long long>(inside) * Format::BYTES;
}

// The parts that a block takes, of all items' one behind the other: of uncut rows every so many, those that meet in memory
// one after the other, and in a cluster one.
struct Walk {
  int begin, end, step;

  __device__ __forceinline__ Walk(const Attention& a)  // the blocks of a cluster stand one behind the other
      : begin(blockIdx.x), end(a.rows * a.blocks.by * a.parts), step(gridDim.x) {
    if (!a.partials) return;
    begin = blockIdx.x * a.share + min(static_cast<int>(blockIdx.x), a.longer);
    end = begin + a.share + (blockIdx.x < a.longer), step = 1;
  }
};

// One of the parts of an item's keys: a row and a block of heads.
template <typename S>
struct Item {
  const int *indices, *table;
  long long row;
  int number, part, first_head, begin, end, tiles;

  __device__ __forceinline__ Item() : tiles(0) {}
  __device__ __forceinline__ Item(const Attention& a, int at) {
    number = a.cuts.quotient(at), part = at - number * a.parts;
    int of = a.blocks.quotient(number);
    row = of, first_head = (number - of * a.blocks.by) * S::HEADS;
    end = a.width;
    if (a.index_len) end = min(end, __ldg(a.index_len + row * a.len_stride));
    table = a.table;
    if (a.space != SLOT) {
      int request = end > 0 ? __ldg(a.row_req + row * a.req_stride) : -1;
      bool known = request >= 0 && request < a.requests;
      end = known ? end : 0;
      table = a.table + (known ? request * a.table_row : 0);
    }
    indices = a.indices + row * a.index_row;
    begin = part * a.each * KEYS;  // whole tiles, as many for any row of a plan
    end = min(end, begin + a.each * KEYS);
    tiles = end > begin ? (end - begin + KEYS - 1) / KEYS : 0;
  }
};

// Where the next tile that is asked for stands: goes through the tiles of all of a block's parts.
template <typename S>
struct Cursor {
  Walk walk;
  int here, tile;
  Item<S> at;

  __device__ __forceinline__ Cursor(Walk walk) : walk(walk), here(walk.begin - walk.step), tile(0) {}
  // Bring the indices of a part's keys nearer, some time before they are read.
  __device__ __forceinline__ void announce_indices(const Attention& a, long long row, int part) const {
    int me = threadIdx.x - S::WORKERS, begin = part * a.each * KEYS, end = min(a.width, begin + a.each * KEYS);
    const int* from = a.indices + row * a.index_row;
    for (int i = begin + 32 * me; i < end; i += 32 * 32 * S::FETCHERS) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
  }
  // Bring an item's queries nearer: a warp takes a head.
  __device__ __forceinline__ void announce_queries(const Attention& a, long long row, int first_head) const {
    int size = a.q_fp8 ? 1 : 2, heads = min(S::HEADS, a.heads - first_head), at = 128 * lane();
    const char* q = static_cast<const char*>(a.q) + (row * a.q_row + first_head * a.q_head) * size;
    if (at < WIDTH * size) {
#pragma unroll 1
      for (int h = warp() - S::WORKERS / 32; h < heads; h += S::FETCHERS)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + h * a.q_head * size + at));
    }
  }
  // Bring the item's row of the block table nearer, as far as a line for each thread goes.
  __device__ __forceinline__ void announce_table(const Attention& a) const {
    int line = 32 * (threadIdx.x - S::WORKERS);
    if (a.space != SLOT && at.end > 0 && line < a.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(at.table + line));
  }
  __device__ __forceinline__ bool there() const { return here < walk.end; }
  // Skip parts without tiles.
  __device__ __forceinline__ void settle(const Attention& a) {
#pragma unroll 1
    while (tile >= at.tiles) {
      here += walk.step, tile = 0;
      if (here >= walk.end) return;
      at = Item<S>(a, here);
      announce_table(a);
      announce_indices(a, at.row, at.part);
      if (!S::RELAYED && here == walk.begin && a.each > 2) announce_queries(a, at.row, at.first_head);
      int next = here + walk.step, item = a.cuts.quotient(next), row = a.blocks.quotient(item);
      if (next >= walk.end) continue;
      announce_indices(a, row, next - item * a.parts);
      if (item != at.number) announce_queries(a, row, (item - row * a.blocks.by) * S::HEADS);
    }
  }
  __device__ __forceinline__ int index(int key) const {
    int i = at.begin + tile * KEYS + key;
    return there() && i < at.end ? __ldg(at.indices + i) : -1;
  }
};

// A policy of the L2 cache: what comes by it is the first to leave, so that it need not drive out (and, where that was
// written, write back) what others left there.
__device__ __forceinline__ u64 first_to_leave() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Ask for the rows of every tile, as places in the ring come free; a row that names no key becomes zeros. A warp has 16
// rows of each tile, a lane one. Indices are read two tiles ahead, places in the cache looked up one ahead.
template <typename S>
__device__ __forceinline__ void fetch_all(Room<S>& room, const Attention& a, Cursor<S> cursor) {
  using Format = typename S::Format;
  static_assert(S::FETCHERS * 16 == KEYS, "sixteen rows a warp");
  int key = (warp() - S::WORKERS / 32) * 16 + lane(), next = -1, slot = 0;
  bool works = lane() < 16, zeroed = false, known = false, more = false;  // the tile that is asked for, and the next
  const unsigned char* here = nullptr;
  const int* table = a.table;
  u32 parity = 1;
  u64 policy = first_to_leave();
#pragma unroll 1
  do {
    if (cursor.there()) cursor.settle(a);
    if (!known && !more) wait_for_leader();  // which may have written the indices, and nothing else that is read here
    // The index after the next comes while this tile's rows are asked for.
    bool later = cursor.there();
    const int* later_table = cursor.at.table;
    int after = works ? cursor.index(key) : -1;
    if (known) {
      barrier_wait(&room.empty[slot], parity);
      u32 live = __ballot_sync(EVERY, here != nullptr);
      unsigned char* to = room.keys[slot] + key * Format::STRIDE;
      if (zeroed) publish();  // zeros of an earlier tile are overwritten by copies
      if (live != 0xffff) {
        zeroed = true;
        if (works && !here) {
#pragma unroll 1
          for (int at = 0; at < Format::BYTES; at += 16) *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
      }
      if (lane() == 0) {
        room.live[slot][key / 16] = static_cast<unsigned short>(live);
        barrier_expect(&room.full[slot], __popc(live) * Format::BYTES);
      }
      __syncwarp();
      if (here) {
        if (S::PASSING)
          copy_bulk(to, here, Format::BYTES, &room.full[slot], policy);
        else
          copy_bulk(to, here, Format::BYTES, &room.full[slot]);
      }
      if (++slot == S::DEPTH) slot = 0, parity ^= 1;
    }
    here = works && more ? located<Format>(a, table, next) : nullptr;
    known = more, more = later, table = later_table, next = after;
    ++cursor.tile;
  } while (known || more);
}

// A warp's numbers of a query, `at` the lane's first: pairs, each 64 numbers behind the one before, as they are stored.
__device__ __forceinline__ void read_query(u32 (&codes)[BLOCKS], const Attention& a, long long at) {
  const unsigned short* from = static_cast<const unsigned short*>(a.q) + at;
  const unsigned char* bytes = static_cast<const unsigned char*>(a.q) + at;
  bool paired = !((reinterpret_cast<u64>(a.q) | a.q_row * 2 | a.q_head * 2) & 3);
  if (!a.q_fp8 && paired) {
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) codes[n] = __ldg(reinterpret_cast<const u32*>(from) + 32 * n);
  } else if (a.q_fp8) {
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) codes[n] = __ldg(bytes + 64 * n) | __ldg(bytes + 64 * n + 1) << 8;
  } else {
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) codes[n] = __ldg(from + 64 * n) | __ldg(from + 64 * n + 1) << 16;
  }
}

// A pair as bfloat16, which holds what e4m3 does.
__device__ __forceinline__ u32 pair_of(u32 code, bool fp8) {
  if (!fp8) return code;
  u32 halves = halves_of(code);
  float2 two = __half22float2(*reinterpret_cast<__half2*>(&halves));
  return __float_as_uint(two.x) >> 16 | (__float_as_uint(two.y) & 0xffff0000u);
}

// The largest number of a warp's pairs that is not infinite or NaN, as bfloat16 without a sign.
__device__ __forceinline__ u32 largest_of(const u32 (&pairs)[BLOCKS]) {
  constexpr u32 INFINITE = 0x7f80;
  u32 most = 0;
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) most = __vmaxu2(most, pairs[n] & 0x7fff7fffu);
  most = __reduce_max_sync(EVERY, max(most & 0xffff, most >> 16));
  if (__builtin_expect(most < INFINITE, 1)) return most;
  most = 0;
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    u32 low = pairs[n] & 0x7fff, high = pairs[n] >> 16 & 0x7fff;
    most = max(most, max(low < INFINITE ? low : 0, high < INFINITE ? high : 0));
  }
  return __reduce_max_sync(EVERY, most);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(exponent + 127 << 23); }

// Put a head's query into shared memory as float16, raised by a power of two to where float16 is fine.
template <typename Format, int SIZE>
__device__ __forceinline__ void put_query(unsigned char (&q)[BLOCKS][SIZE], float& factor, const u32 (&pairs)[BLOCKS], int h,
                                          float unit, u32 l) {
  constexpr bool NEIGHBOURS = Format::BYTES == WIDTH;  // a pair's numbers, in the contraction of bytes as they stand
  u32 most = largest_of(pairs);
  int exponent = most ? min(119, 140 - static_cast<int>(most >> 7)) : 0;
  float raised = power_of_two(exponent);
  if (l == 0) factor = power_of_two(-exponent) * unit;
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    __half2 two = __floats2half2_rn(__uint_as_float(pairs[n] << 16) * raised,
                                    __uint_as_float(pairs[n] & 0xffff0000u) * raised);
    int like = n < BLOCKS - 1 ? n & 1 : n;  // blocks of latents are alike by two
    int at = Format::position(64 * like + 2 * l), next = Format::position(64 * like + 2 * l + 1);
    unsigned char* to = q[n - like + (at >> 6)] + place(h, at & 63);
    if (NEIGHBOURS) {
      *reinterpret_cast<__half2*>(to) = two;
    } else {
      *reinterpret_cast<__half*>(to) = two.x;
      *reinterpret_cast<__half*>(q[n - like + (next >> 6)] + place(h, next & 63)) = two.y;
    }
  }
}

// Put the block's queries into shared memory. A warp takes one head after the other, which is little code: at a kernel's
// start code comes from afar. The next head's numbers are on their way meanwhile.
template <typename S, int WARPS>
__device__ __forceinline__ void take_queries(Room<S>& room, const Attention& a, long long row, int first_head, int mine) {
  u32 l;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(l));  // anew, so that addresses made of it are not kept over tiles
  float unit = a.softmax_scale * (a.k_scale ? __ldg(a.k_scale) : 1.0f) * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
  int heads = min(S::HEADS, a.heads - first_head);
  long long begin = row * a.q_row + first_head * a.q_head + 2 * l;
  u32 codes[BLOCKS];
  read_query(codes, a, begin + min(mine, heads - 1) * a.q_head);
#pragma unroll 1
  for (int h = mine; h < S::HEADS; h += WARPS) {
    u32 pairs[BLOCKS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) pairs[n] = h < heads ? pair_of(codes[n], a.q_fp8) : 0;
    if (h + WARPS < heads) read_query(codes, a, begin + (h + WARPS) * a.q_head);
    put_query<typename S::Format>(room.q, room.factor[h], pairs, h, unit, l);
  }
}

// What a warpgroup has of its tiles: outputs, and by head a reference and the sum of this thread's keys. `o[i]` holds
// latents 16 (8 w + g) + 2 i + (0, 1) by heads 8 j + 2 t + (0, 1), w the warp; where values are kept, latents
// 128 (i / 2) + 32 (g / 2) + 16 (i mod 2) + 4 w + 2 (g mod 2) + (0, 1).
template <typename S>
struct Part {
  float o[S::TALL][S::HEADS / 8][4];
  float base[S::PAIRS], total[S::PAIRS];  // base: the reference; -inf: none yet, +inf: a logit was
};

// Keep a step of S's operand for O: of a lane's row of sixteen keys eight values, in the contraction's order.
__device__ __forceinline__ void keep_step(u32 at, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}

template <typename S>
__device__ __forceinline__ void scores(float (&s)[S::HEADS / 8][4], const unsigned char* tile, int key, Block q) {
  typename S::Format::Keys keys(tile, key);
  keys.read(0);
  constexpr int STEPS = S::STEPS;
  u32 a[2][STEPS][4];
  // Chains of their own: a matrix unit cuts each of its sums, and long chains lean to one side.
  constexpr int CHAINS = S::HEADS == 16 ? 3 : 2, LONG = (BLOCKS + CHAINS - 1) / CHAINS;
  float more[2][S::HEADS / 8][4];
#pragma unroll
  for (int n = 0; n < BLOCKS * 4 / STEPS; ++n) {
    int block = n * STEPS / 4, first = n * STEPS % 4;
    if (first == 0 && block + 1 < BLOCKS) keys.read(block + 1);
    if (n > 1) tall_done<1>();
    keys.take(a[n & 1], block, first);
    tall_begin();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      tall<S::HEADS>(block < LONG ? s : more[block / LONG - 1], a[n & 1][i], block_plus(q, block * S::HEADS * 128),
                     first + i, block % LONG + first + i > 0);
    tall_commit();
  }
  tall_done<0>();
#pragma unroll
  for (int n = 1; n < CHAINS; ++n) {
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] += more[n - 1][j][i];
    }
  }
}

// Add to outputs a block of 64 latents of the tile before, by its probabilities.
__device__ __forceinline__ void add_block(float (&o)[2][4], Block kept, Block pt) {
#pragma unroll
  for (int step = 0; step < 4; ++step) tall_kept(o, block_plus(kept, 16 * step * 128), pt, step);
  tall_commit();
}

// Products of a tile with queries, whose values are kept where those of the tile before stood. WITH_OUTPUTS that tile's
// latents are added meanwhile: the matrix unit takes two blocks of it while the next two are decoded.
template <typename S, bool WITH_OUTPUTS>
__device__ __forceinline__ void scores_kept(float (&s)[2][4], Part<S>& part, const unsigned char* tile, int key, Block q,
                                            unsigned char* kept, Block pt, int group) {
  typename S::Format::Keys keys(tile, key);
  keys.read(0);
  Block before = alike(block_at(kept));
  u32 own = shared_address(kept) + place(16 * (warp() & 3) + (lane() & 15), lane() >> 4 << 3), a[2][4][4];
  float more[2][2][4];
  auto add_two = [&](int n) {
    tall_begin();
    add_block(part.o[n], block_plus(before, n * KEYS * 128), pt);
    add_block(part.o[n + 1], block_plus(before, (n + 1) * KEYS * 128), pt);
  };
  if (WITH_OUTPUTS) add_two(0);
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    const bool first = n % 2 == 0 && n < LATENT / 64, adds = WITH_OUTPUTS && n < LATENT / 64 - 2;
    if (n + 1 < BLOCKS) keys.read(n + 1);
    // The operand that was where this block's comes is read no more; of an even block, nor is what was kept where this
    // and the next one's values come.
    if (n % 2 && adds && n > 1)
      tall_done<3>();
    else if (n > 1)
      tall_done<1>();
    keys.take(a[n & 1], n, 0);
    if (first) {
      if (n == 0) tall_done<0>();
      meet(group);
      if (adds) add_two(n + 2);
    }
    if (n < LATENT / 64) {
#pragma unroll
      for (int i = 0; i < 4; ++i) keep_step((own ^ 32 * i) + n * KEYS * 128, a[n & 1][i]);
    }
    tall_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tall<16>(n < 3 ? s : more[n / 3 - 1], a[n & 1][i], block_plus(q, n * 2048), i, n % 3 + i > 0);
    tall_commit();
  }
  tall_done<0>();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] += more[0][j][i] + more[1][j][i];
  }
}

// Write this warp's probabilities of rows g and g + 8, which are neighbours in the contraction of O.
template <typename S>
__device__ __forceinline__ void keep(unsigned char* p, const float (&x)[S::HEADS / 8][4]) {
  int t = lane() & 3, column = 16 * (warp() & 3) + 2 * (lane() >> 2);
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      *reinterpret_cast<__half2*>(p + place(8 * j + 2 * t + e, column)) = __floats2half2_rn(x[j][e], x[j][2 + e]);
  }
}

// Where values are kept, rows are in order.
__device__ __forceinline__ void keep_in_order(unsigned char* p, const float (&x)[2][4]) {
  int t = lane() & 3, row = 16 * (warp() & 3) + (lane() >> 2);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<__half*>(p + 1024 * j + place(2 * t + (i & 1), row + 8 * (i >> 1))) = __float2half_rn(x[j][i]);
  }
}

// A reference has been exceeded: take the maxima anew, and say probabilities beside them. s holds logits.
template <typename S>
__device__ __forceinline__ void raise(Part<S>& part, Room<S>& room, float (&s)[S::HEADS / 8][4], int group, int w) {
  int g = lane() >> 2, t = lane() & 3;
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float most = fmaxf(s[j][e], s[j][2 + e]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
      if (g == 0) room.most[group][w][8 * j + 2 * t + e] = most;
    }
  }
  meet(group);
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int c = 2 * j + e, head = 8 * j + 2 * t + e;
      float old = part.base[c], base = old;
#pragma unroll
      for (int i = 0; i < 4; ++i) base = fmaxf(base, room.most[group][i][head]);
      float less = finite(base) ? base : 0.0f;
      float kept = finite(base) ? exponential(old - base) : 1.0f;
      part.base[c] = base, part.total[c] *= kept;
#pragma unroll
      for (int i = 0; i < S::TALL; ++i) part.o[i][j][e] *= kept, part.o[i][j][2 + e] *= kept;
      s[j][e] = exponential(s[j][e] - less), s[j][2 + e] = exponential(s[j][2 + e] - less);
    }
  }
}

// Say the probabilities of this warpgroup's tile beside the reference, which is raised where a logit exceeds it, and keep
// them in shared memory; s holds products with queries, of which `live` says which are there.
template <typename S>
__device__ __forceinline__ void weights(Part<S>& part, Room<S>& room, const float (&factor)[S::PAIRS],
                                        const float (&s)[S::HEADS / 8][4], u32 live, int turn, int group) {
  int g = lane() >> 2, w = warp() & 3;
  bool first = live >> key_of(g) & 1, second = live >> key_of(g) + 8 & 1, again = turn == 0;
  float x[S::HEADS / 8][4];
  unsigned char* p = room.p[group][turn & 1];
  if (!again) {
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int c = 2 * j + (i & 1);
        x[j][i] = (i < 2 ? first : second) ? fmaf(s[j][i], factor[c], -part.base[c]) : -INFINITY;
        most[i] = larger(most[i], x[j][i]);
        x[j][i] = exponential(x[j][i]);
      }
    }
    bool exceeds = __any_sync(EVERY, !(larger(larger(most[0], most[1]), larger(most[2], most[3])) <= SLACK));
    if constexpr (S::KEPT) keep_in_order(p, x); else keep<S>(p, x);
    if (lane() == 0) reinterpret_cast<unsigned char*>(&room.exceeded[turn & 1][group])[w] = exceeds;
    publish();
    meet(group);
    again = room.exceeded[turn & 1][group];
  }
  if (again) {
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = (i < 2 ? first : second) ? s[j][i] * factor[2 * j + (i & 1)] : -INFINITY;
    }
    raise<S>(part, room, x, group, w);
    if constexpr (S::KEPT) keep_in_order(p, x); else keep<S>(p, x);
    publish();
    meet(group);
  }
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) part.total[c] += x[c / 2][c & 1] + x[c / 2][2 + (c & 1)];
}

// Add a tile's latents that S has kept.
template <typename S>
__device__ __forceinline__ void add_kept(Part<S>& part, const unsigned char* kept, Block pt) {
  Block at = alike(block_at(kept));
  pt = alike(pt);
  tall_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < S::TALL; ++i) tall_kept(part.o[i], block_plus(at, (i * KEYS + 16 * step) * 128), pt, step);
  }
  tall_commit();
  tall_done<0>();
}

// Add a tile's latents by its probabilities to this warpgroup's outputs.
template <typename S>
__device__ __forceinline__ void add_latents(Part<S>& part, const unsigned char* tile, Block pt, u64* empty, int group) {
  int chunk = 8 * (warp() & 3) + (lane() >> 2);
  constexpr int STEPS = S::STEPS, TALL = S::TALL;
  pt = alike(pt);
  constexpr bool AHEAD = S::HEADS != 32;  // for 32 heads registers do not suffice
  u32 a[2][STEPS][4];
  typename S::Format::template Values<2 * TALL> values[1 + AHEAD];
  if (AHEAD) values[0].read(tile, 0, chunk);
#pragma unroll
  for (int n = 0; n < 4 * TALL / STEPS; ++n) {
    int step = n * STEPS / TALL, first = n * STEPS % TALL;
    if (first == 0 && step + AHEAD < 4) values[step + 1 & AHEAD].read(tile, 16 * (step + AHEAD), chunk);
    if (n > 1) tall_done<1>();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) values[step & AHEAD].take(a[n & 1][i], first + i);
    tall_begin();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) tall<S::HEADS>(part.o[first + i], a[n & 1][i], pt, step, true);
    tall_commit();
  }
  __syncwarp();
  if (lane() == 0) barrier_arrive(empty);
  tall_done<0>();
}

template <typename S>
__device__ __forceinline__ void arrived(Room<S>& room, int tile) {
  barrier_wait(&room.full[tile % S::DEPTH], tile / S::DEPTH & 1);
}

// This warpgroup's products of a tile with the queries.
template <typename S>
__device__ __forceinline__ u32 multiply(float (&s)[S::HEADS / 8][4], Room<S>& room, int tile) {
  int w = warp() & 3;
  arrived<S>(room, tile);
  scores<S>(s, room.keys[tile % S::DEPTH], 16 * w + key_of(lane() >> 2), alike(block_at(memory)));
  return room.live[tile % S::DEPTH][w];
}

template <typename S>
__device__ __forceinline__ void add_one(Part<S>& part, Room<S>& room, const float (&factor)[S::PAIRS], int tile, int turn,
                                        int group) {
  float s[S::HEADS / 8][4];
  u32 live = multiply<S>(s, room, tile);
  weights<S>(part, room, factor, s, live, turn, group);
  int slot = tile % S::DEPTH;
  add_latents<S>(part, room.keys[slot], block_at(room.p[group][turn & 1]), &room.empty[slot], group);
}

// Of a tile whose values are kept, products and probabilities; latents of the one before are added, if there is one.
template <typename S>
__device__ __forceinline__ void add_last(Part<S>& part, Room<S>& room, const float (&factor)[S::PAIRS], int tile, int turn,
                                         int group) {
  float s[2][4];
  int w = warp() & 3, slot = tile % S::DEPTH, key = 16 * w + key_of(lane() >> 2);
  Block q = alike(block_at(memory)), pt = alike(block_at(room.p[group][turn + 1 & 1]));
  arrived<S>(room, tile);
  if (turn == 0)
    scores_kept<S, false>(s, part, room.keys[slot], key, q, room.kept[group], pt, group);
  else
    scores_kept<S, true>(s, part, room.keys[slot], key, q, room.kept[group], pt, group);
  u32 live = room.live[slot][w];
  __syncwarp();
  if (lane() == 0) barrier_arrive(&room.empty[slot]);
  weights<S>(part, room, factor, s, live, turn, group);
}

// Leave this warpgroup's references and sums in shared memory.
template <typename S>
__device__ __forceinline__ void tell(Part<S>& part, Room<S>& room, int group) {
  int g = lane() >> 2, t = lane() & 3, w = warp() & 3;
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int head = 8 * (c / 2) + 2 * t + (c & 1);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) part.total[c] += __shfl_xor_sync(EVERY, part.total[c], step);
    if (g == 0) reinterpret_cast<float*>(&room.total[group][head])[w] = part.total[c];
    if (g == 0 && w == 0) room.top[group][head] = part.base[c];
  }
}

__device__ __forceinline__ u32 mapped(const void* p, u32 rank) {
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}

// Sixteen bytes into shared memory of the cluster, of which a barrier there is told.
__device__ __forceinline__ void give_four(u32 at, u32 told, float4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(told)
               : "memory");
}

__device__ __forceinline__ u64 bits_of(float2 v) {
  return static_cast<u64>(__float_as_uint(v.y)) << 32 | __float_as_uint(v.x);
}

// The largest of references that may be infinite, as something that can be subtracted.
__device__ __forceinline__ float subtrahend(float most) { return finite(most) ? most : 0.0f; }

// The reference of a head's keys of this block, and their sum beside it.
template <typename S>
__device__ __forceinline__ float2 block_sum(const Room<S>& room, int head) {
  float most = room.top[0][head], total = 0.0f;
  if (S::APART) most = fmaxf(most, room.top[1][head]);
#pragma unroll
  for (int i = 0; i < (S::APART ? 2 : 1); ++i) {
    float4 four = room.total[i][head];
    float sum = four.x + four.y + (four.z + four.w);
    total += S::APART ? sum * exponential(room.top[i][head] - subtrahend(most)) : sum;
  }
  return make_float2(most, total);
}

// What outputs are multiplied by. Without a key they are 0, and stay so whatever the scale is.
__device__ __forceinline__ float share_of(float2 sum, float unit) {
  float reciprocal;
  asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(sum.y));
  return sum.x == INFINITY ? NAN : sum.y == 0.0f ? 1.0f : unit * reciprocal;
}

template <typename S>
__device__ __forceinline__ float share_of(const Attention& a, float2 sum) {
  return share_of(sum, a.k_scale ? __ldg(a.k_scale) : 1.0f);
}

// Of +inf the sum has what the LSE is: NaN where a logit was.
__device__ __forceinline__ float lse_of(float2 sum) {
  return sum.x == INFINITY ? sum.y : subtrahend(sum.x) + log2f(sum.y) * LN2;
}

// Multiply this warpgroup's outputs, head by head.
template <typename S>
__device__ __forceinline__ void scale(Part<S>& part, int c, float factor) {
#pragma unroll
  for (int i = 0; i < S::TALL; ++i) part.o[i][c / 2][c & 1] *= factor, part.o[i][c / 2][2 + (c & 1)] *= factor;
}

// Add the two warpgroups' outputs; each then has half of a thread's latents, `o[0]` to `o[3]`. They go through the place of
// what is read no more: of values that were kept all at once, of probabilities in two rounds.
template <typename S>
__device__ __forceinline__ void exchange(Part<S>& part, Room<S>& room, int group) {
  constexpr int J = S::HEADS / 8, ROUND = S::KEPT ? 4 : 2;
  static_assert(S::KEPT || sizeof room.p + sizeof room.more == ROUND * 2 * J * 128 * sizeof(float4));
  float4* stage = reinterpret_cast<float4*>(S::KEPT ? room.kept[0] : room.p[0][0]) + (threadIdx.x & 127);
#pragma unroll
  for (int begin = 0; begin < 4; begin += ROUND) {
#pragma unroll
    for (int i = begin; i < begin + ROUND; ++i) {
#pragma unroll
      for (int j = 0; j < J; ++j) {
        float give[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) give[n] = group ? part.o[i][j][n] : part.o[4 + i][j][n];
        stage[((2 * (i - begin) + group) * J + j) * 128] = make_float4(give[0], give[1], give[2], give[3]);
      }
    }
    workers_meet<S>();
#pragma unroll
    for (int i = begin; i < begin + ROUND; ++i) {
#pragma unroll
      for (int j = 0; j < J; ++j) {
        float4 v = stage[((2 * (i - begin) + 1 - group) * J + j) * 128];
        float more[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) part.o[i][j][n] = (group ? part.o[4 + i][j][n] : part.o[i][j][n]) + more[n];
      }
    }
    workers_meet<S>();
  }
}

// Of KEPT outputs a thread has two neighbouring latents of each of four blocks, and another lane the next two: give it four of
// every other block, in the places where others have theirs.
template <typename S>
__device__ __forceinline__ void turn(Part<S>& part) {
  bool odd = lane() & 4;
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      auto &first = part.o[i][j], &second = part.o[i + 1][j];
#pragma unroll
      for (int n = e; n < 4; n += 2) {
        float own = odd ? second[n] : first[n], other = __shfl_xor_sync(EVERY, odd ? first[n] : second[n], 4);
        first[n] = odd ? other : own, second[n] = odd ? own : other;
      }
    }
  }
}

// Where the first four neighbouring latents begin that a thread has once its block's outputs are together, and how far behind
// the next four are.
template <typename S>
constexpr int BEHIND = S::KEPT ? 128 : 4;
template <typename S>
__device__ __forceinline__ int latent_of(int group) {
  int w = warp() & 3, g = lane() >> 2;
  return S::KEPT ? 256 * group + 16 * g + 4 * w : 16 * (8 * w + g) + 8 * group;
}

// Write two fours of a head's latents, from `to` on.
template <typename S>
__device__ __forceinline__ void write_fours(const Attention& a, __nv_bfloat16* to, const __nv_bfloat162 (&pairs)[4]) {
  bool wide = !((reinterpret_cast<u64>(a.out) | a.out_row * 2 | a.out_head * 2) & (S::KEPT ? 7 : 15));
  if (wide && !S::KEPT) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
  } else if (wide) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    *reinterpret_cast<uint2*>(to + BEHIND<S>) = *reinterpret_cast<const uint2*>(pairs + 2);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2 * BEHIND<S> + 2 * (i & 1)] = pairs[i].x, to[i / 2 * BEHIND<S> + 2 * (i & 1) + 1] = pairs[i].y;
  }
}

// Write eight latents of each of this thread's heads, those of `o[FROM]` on.
template <typename S, int FROM>
__device__ __forceinline__ void write(const Part<S>& part, const Attention& a, const Item<S>& item, int latent) {
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1, head = item.first_head + 8 * j + 2 * (lane() & 3) + e;
    if (head >= a.heads) continue;
    __align__(16) __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(part.o[FROM + i][j][e], part.o[FROM + i][j][2 + e]);
    write_fours<S>(a, a.out + item.row * a.out_row + head * a.out_head + latent, pairs);
  }
}

// What a cluster's blocks give to each of them: by part, references and sums of heads, and rows of heads' outputs, as many
// latents as are the block's share, which stand where the tiles' end was. What goes to another block is put together where the
// queries were first, so that it goes there by one copy.
template <typename S>
struct Given {
  static constexpr int SUMS = MOST_PARTS * S::HEADS * 8, OUTPUTS = S::HEADS * 2640;  // bytes at most, of up to MOST_PARTS
  static_assert(offsetof(Room<S>, keys) + sizeof(Room<S>::keys) >= SUMS + 2 * OUTPUTS, "there is room for what comes and goes");
  float2* sums;
  float *outputs, *staged;
  int parts, rank, each, rows;

  __device__ __forceinline__ Given(Room<S>& room, int parts, int rank, int heads)
      : sums(reinterpret_cast<float2*>(&room.keys) + (sizeof room.keys - SUMS - OUTPUTS) / 8),
        outputs(reinterpret_cast<float*>(sums + SUMS / 8)), staged(reinterpret_cast<float*>(&room)), parts(parts), rank(rank),
        each((LATENT / 8 + parts - 1) / parts * 8), rows(heads + 1 & ~1) {}
  // Latents of a block's share, and numbers from a row to the next: eight lanes' heads are in different banks.
  __device__ __forceinline__ int size(int to) const { return max(0, min(each, LATENT - to * each)); }
  __device__ __forceinline__ int stride(int to) const { return size(to) + 4; }
  // Heads 0, 2, 4, …, then 1, 3, 5, ….
  __device__ __forceinline__ int row(int head) const { return (head & 1) * (rows >> 1) + (head >> 1); }
  // Where block `to` has what part `from` gives to it, and where that is put together.
  __device__ __forceinline__ float* of(int from, int to) const { return outputs + from * rows * stride(to); }
  __device__ __forceinline__ float* staging(int to) const { return to == rank ? of(rank, to) : staged + to * rows * (each + 4); }
  __device__ __forceinline__ u32 bytes(int to) const { return size(to) ? rows * stride(to) * 4 : 0; }
  // Bytes that come from the others.
  __device__ __forceinline__ u32 awaited() const { return (parts - 1) * (bytes(rank) + S::HEADS * 8); }
};

// Put together eight latents of each of this thread's heads, those of `o[FROM]` on.
template <typename S, int FROM>
__device__ __forceinline__ void put(const Part<S>& part, const Given<S>& given, int latent, int heads) {
  float* at = nullptr;
  int stride = 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if (i == 0 || S::KEPT) {  // else they are of one share
      int first = latent + i / 2 * BEHIND<S>, to = first / given.each;
      at = given.staging(to) + first - to * given.each, stride = given.stride(to);
    } else {
      at += BEHIND<S>;
    }
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) {
      int j = c / 2, e = c & 1, head = 8 * j + 2 * (lane() & 3) + e;
      const auto &low = part.o[FROM + i][j], &high = part.o[FROM + i + 1][j];
      if (head < heads) *reinterpret_cast<float4*>(at + given.row(head) * stride) = make_float4(low[e], low[2 + e], high[e], high[2 + e]);
    }
  }
}

// Of one thread: copy into shared memory of the cluster, and tell a barrier there.
__device__ __forceinline__ void copy_over(u32 to, const void* from, u32 bytes, u32 told) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(told)
               : "memory");
}

// Give what is put together to the others, a block a warp.
template <typename S>
__device__ __forceinline__ void give(Room<S>& room, const Given<S>& given) {
  if (lane() != 0) return;
  const float2* sums = given.sums + given.rank * S::HEADS;
#pragma unroll 1
  for (int to = warp(); to < given.parts; to += S::WORKERS / 32) {
    if (to == given.rank) continue;
    u32 told = mapped(&room.given, to), bytes = given.bytes(to);
    copy_over(mapped(sums, to), sums, S::HEADS * 8, told);
    if (bytes) copy_over(mapped(given.of(given.rank, to), to), given.staging(to), bytes, told);
  }
}

// Add what all parts have for this block, in their order: four latents a thread.
template <typename S>
__device__ __forceinline__ void add_given(const Given<S>& given, const Attention& a, const Item<S>& item, int heads) {
  int rank = given.rank, first = rank * given.each, quads = given.size(rank) / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at < heads * quads; at += S::WORKERS) {
    int head = at / quads, here = 4 * (at - head * quads);
    float2 sum = make_float2(-INFINITY, 0.0f);
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i) sum.x = fmaxf(sum.x, given.sums[i * S::HEADS + head].x);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i) {
      float2 one = given.sums[i * S::HEADS + head];
      float weight = exponential(one.x - subtrahend(sum.x));
      float4 v = *reinterpret_cast<const float4*>(given.of(i, rank) + given.row(head) * given.stride(rank) + here);
      sum.y += one.y * weight;
      o.x += v.x * weight, o.y += v.y * weight, o.z += v.z * weight, o.w += v.w * weight;
    }
    float share = share_of<S>(a, sum);
    __nv_bfloat16* to = a.out + item.row * a.out_row + (item.first_head + head) * a.out_head + first + here;
    __align__(8) __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(o.x * share, o.y * share),
                                            __floats2bfloat162_rn(o.z * share, o.w * share)};
    if (!((reinterpret_cast<u64>(a.out) | a.out_row * 2 | a.out_head * 2) & 7))
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(pairs);
    else
      to[0] = pairs[0].x, to[1] = pairs[0].y, to[2] = pairs[1].x, to[3] = pairs[1].y;
    if (rank == 0 && here == 0 && a.returns_lse) a.lse[item.row * a.lse_row + item.first_head + head] = lse_of(sum);
  }
}

// Bring the outputs of this block's warpgroups together, which are read no more tiles for.
template <typename S>
__device__ __forceinline__ void join(Part<S>& part, Room<S>& room, int group) {
  tell<S>(part, room, group);
  workers_meet<S>();
  if constexpr (S::APART) {
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) {
      int head = 8 * (c / 2) + 2 * (lane() & 3) + (c & 1);
      float most = fmaxf(room.top[0][head], room.top[1][head]);
      scale<S>(part, c, exponential(part.base[c] - subtrahend(most)));
    }
    exchange<S>(part, room, group);
  }
}

// Write the outputs of an item that is not cut.
template <typename S>
__device__ __forceinline__ void write_item(Part<S>& part, const Room<S>& room, const Attention& a, const Item<S>& item,
                                           int group, int latent) {
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    scale<S>(part, c, share_of<S>(a, block_sum<S>(room, 8 * (c / 2) + 2 * (lane() & 3) + (c & 1))));
  }
  int head = item.first_head + threadIdx.x;
  if (threadIdx.x < S::HEADS && head < a.heads && a.returns_lse)
    a.lse[item.row * a.lse_row + head] = lse_of(block_sum<S>(room, threadIdx.x));
  if constexpr (S::KEPT) turn<S>(part);
  write<S, 0>(part, a, item, latent);
  if (S::GROUPS == 1) write<S, S::TALL - 4>(part, a, item, latent + 8);
}

// Give this part of an item to the cluster's blocks, and write this block's share of the latents of all parts.
template <typename S>
__device__ __forceinline__ void spread(Part<S>& part, Room<S>& room, const Attention& a, const Item<S>& item, int latent) {
  int heads = min(S::HEADS, a.heads - item.first_head);
  Given<S> given(room, a.parts, item.part, heads);
  if constexpr (S::KEPT) turn<S>(part);
  put<S, 0>(part, given, latent, heads);
  if (S::GROUPS == 1) put<S, S::TALL - 4>(part, given, latent + 8, heads);
  if (threadIdx.x < S::HEADS) given.sums[item.part * S::HEADS + threadIdx.x] = block_sum<S>(room, threadIdx.x);
  publish();
  workers_meet<S>();
  cluster_wait();  // no block reads tiles any more, and barriers are there
  give<S>(room, given);
  __syncwarp();
  barrier_wait(&room.given, 0);
  cluster_arrive();
  add_given<S>(given, a, item, heads);
  __syncwarp();
  cluster_wait();  // all have what this block gave, which has to stand there until then
}

#include "meeting.cuh"
#include "relay.cuh"

// Add the parts of an item and write its outputs.
template <typename S>
__device__ __forceinline__ void settle(Part<S>& part, Room<S>& room, const Attention& a, const Item<S>& item, int group) {
  if (a.clustered()) cluster_arrive();
  join<S>(part, room, group);
  int latent = latent_of<S>(group);
  if (a.parts == 1) return write_item<S>(part, room, a, item, group, latent);
  if constexpr (S::LEAVES) {
    if (a.partials) return leave_item<S>(part, room, a, item);
  }
  spread<S>(part, room, a, item, latent);
}

// Compute this warpgroup's tiles, part by part.
template <typename S>
__device__ __forceinline__ void work(Room<S>& room, const Attention& a, const Walk& walk) {
  int group = alike(warp() >> 2), t = lane() & 3, before = 0;
#pragma unroll 1
  for (int at = walk.begin; at < walk.end; at += walk.step) {
    Item<S> item(a, at);
    if (at == walk.begin || item.part == 0)  // else they are there
      take_queries<S, S::WORKERS / 32>(room, a, item.row, item.first_head, warp());
    publish();
    workers_meet<S>();
    Part<S> mine;
    float factor[S::PAIRS];
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) {
      mine.base[c] = -INFINITY, mine.total[c] = 0.0f, factor[c] = room.factor[8 * (c / 2) + 2 * t + (c & 1)];
#pragma unroll
      for (int i = 0; i < S::TALL; ++i) mine.o[i][c / 2][c & 1] = mine.o[i][c / 2][2 + (c & 1)] = 0.0f;
    }
    int tiles = item.tiles;
#pragma unroll 1
    for (int turn = 0; turn * S::GROUPS < tiles; ++turn) {
      int tile = before + turn * S::GROUPS;
      if (turn * S::GROUPS + group < tiles) {
        if constexpr (S::KEPT)
          add_last<S>(mine, room, factor, tile + group, turn, group);
        else
          add_one<S>(mine, room, factor, tile + group, turn, group);
      }
    }
    if constexpr (S::KEPT) {
      int last = (tiles - group + 1) / 2 - 1;
      if (last >= 0) add_kept<S>(mine, room.kept[group], block_at(room.p[group][last & 1]));
    }
    before += tiles;
    settle<S>(mine, room, a, item, group);
  }
}

template <typename S>
__device__ __forceinline__ void attend(const Attention& a) {
  Room<S>& room = *reinterpret_cast<Room<S>*>(memory);
  Walk walk(a);
  int part = walk.begin - a.cuts.quotient(walk.begin) * a.parts;  // of a cluster
  if (threadIdx.x < S::DEPTH)
    barrier_init(&room.full[threadIdx.x], S::FETCHERS), barrier_init(&room.empty[threadIdx.x], 4);
  if constexpr (S::RELAYED) {
    if (threadIdx.x == 0) relay_init<S>(room, a.parts, part);
  } else if (a.clustered() && threadIdx.x == 32) {
    barrier_init(&room.given, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    int item = a.cuts.quotient(walk.begin), first_head = (item - a.blocks.quotient(item) * a.blocks.by) * S::HEADS;
    barrier_expect(&room.given, Given<S>(room, a.parts, part, min(S::HEADS, a.heads - first_head)).awaited());
  }
  __syncthreads();
  if (S::RELAYED && a.clustered()) cluster_arrive();
  if (threadIdx.x >= S::WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FEW));
    fetch_all<S>(room, a, Cursor<S>(walk));
    if (a.clustered()) {  // as those do who compute
      if constexpr (S::RELAYED)
        cluster_wait(), cluster_arrive();
      else
        publish(), cluster_arrive(), cluster_wait(), cluster_arrive();  // others write where this one may have written zeros
    }
  } else {
    if constexpr (S::RELAYED) {
      relay_work<S>(room, a, walk);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::MANY));
      work<S>(room, a, walk);
    }
  }
}

#include "few.cuh"

#define KERNEL(name, ...)                                                                       \
  using name##_shape = Shape<__VA_ARGS__>;                                                      \
  extern "C" __global__ void __launch_bounds__(name##_shape::THREADS, name##_shape::BLOCKS_THERE) \
      name(const __grid_constant__ Attention a) {                                               \
    attend<name##_shape>(a);                                                                    \
  }
KERNEL(fp8_16, Fp8, 16, 2, 5)
KERNEL(fp8_32, Fp8, 32, 2, 4)
KERNEL(fp8_48, Bytes<592>, 48, 3, 4)
KERNEL(fp8_pair, Fp8, 16, 1, 2)
KERNEL(nvfp4_16, Nvfp4, 16, 2, 3, true)
KERNEL(nvfp4_32, Nvfp4, 32, 2, 7)
KERNEL(nvfp4_48, Nvfp4, 48, 3, 6)
KERNEL(nvfp4_pair, Nvfp4, 16, 1, 3)

#define FEW(name, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1) name(const __grid_constant__ Attention a) { \
    attend_few<__VA_ARGS__>(a);                                                                            \
  }
FEW(fp8_few, Fp8, 1)
FEW(fp8_few_2, Fp8, 2)
FEW(fp8_few_4, Fp8, 4)
FEW(nvfp4_few, Nvfp4, 1)
FEW(nvfp4_few_2, Nvfp4, 2)
FEW(nvfp4_few_4, Nvfp4, 4)

// What the launches ask for and pass.
static_assert(sizeof(Room<fp8_16_shape>) == 231424 && sizeof(Room<fp8_32_shape>) == 228352);
static_assert(sizeof(Room<fp8_pair_shape>) == 101376);
static_assert(sizeof(Room<nvfp4_16_shape>) == 227328 && sizeof(Room<nvfp4_32_shape>) == 230400);
static_assert(sizeof(Room<fp8_48_shape>) == 232448 && sizeof(Room<nvfp4_48_shape>) == 219136);
static_assert(sizeof(Room<nvfp4_pair_shape>) == 91136);
static_assert(sizeof(FewRoom<Fp8, 1>) == 232448 && sizeof(FewRoom<Nvfp4, 1>) == 216064);
static_assert(sizeof(FewRoom<Fp8, 2>) == 166912 && sizeof(FewRoom<Nvfp4, 2>) == 150528);
static_assert(sizeof(FewRoom<Fp8, 4>) == 134144 && sizeof(FewRoom<Nvfp4, 4>) == 117760);
static_assert(sizeof(Attention) == 296);
