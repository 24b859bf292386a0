// sparse_mla: attention from one row's heads to the latents that its indices name.
//
// A row and block of 16 or 32 heads belongs to a cluster of blocks, each with a part of the row's keys. Latents come as
// they are into a ring in shared memory by one copy a row, asked for by warps that do nothing else. A warpgroup takes a
// tile of 64 keys by itself: keys are the tall operand of S = K Qt and latents that of O^T = V^T Pt, both decoded from
// the same bytes straight to float16 in registers, where every code times its scale is exact. Softmax subtracts a
// reference that only follows the maximum where that has grown by 2^SLACK, so that mostly one meeting a tile is enough.
// Warpgroups and blocks of a cluster add their parts through shared memory.
#include <cuda_bf16.h>

#include "copies.cuh"
#include "latents.cuh"
#include "tall.cuh"

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
  long long q_row, q_head, page_stride, index_row, len_stride, table_row, req_stride, out_row, out_head, lse_row;
  int width, pages, requests, columns, rows, heads, parts, each, page, space, world, rank, interleave, q_fp8, returns_lse;
  float softmax_scale;
};

enum Space { SLOT, POSITION, LOCAL };

constexpr int KEYS = 64;  // of a tile
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Exponentials beside the reference are at most e^SLACK, 2^4; times LIFT, so that small ones keep their bits, float16 holds
// them. Sums are not lifted: the reference is a logit, and one key's LSE is that logit to the bit.
constexpr float SLACK = 4 * LN2, LIFT = 2048.0f;

// How a kernel is laid out: heads of a block, warpgroups that compute, tiles in shared memory.
template <typename Format_, int HEADS_, int GROUPS_, int DEPTH_>
struct Shape {
  using Format = Format_;
  static constexpr int HEADS = HEADS_, GROUPS = GROUPS_, FETCHERS = 4, DEPTH = DEPTH_;
  static constexpr int WORKERS = 128 * GROUPS, THREADS = WORKERS + 32 * FETCHERS;
  // Registers of a thread that computes and of one that fetches.
  static constexpr int MANY = GROUPS == 2 ? 232 : 152, FEW = 40;
  static constexpr int STEPS = HEADS == 16 ? 4 : 2;  // of products that are begun together
  static constexpr int PAIRS = HEADS / 4;  // heads of a thread: 8 j + 2 t + (0, 1)
};

template <typename S>
struct Room {
  __align__(1024) unsigned char q[BLOCKS][S::HEADS * 128];
  unsigned char p[S::GROUPS][2][S::HEADS * 128];
  __align__(128) unsigned char keys[S::DEPTH][KEYS * S::Format::STRIDE];
  float factor[S::HEADS];
  float most[S::GROUPS][4][S::HEADS];
  float4 total[S::GROUPS][S::HEADS];  // of four warps
  float top[S::GROUPS][S::HEADS], share[S::GROUPS][S::HEADS];
  u64 full[S::DEPTH], empty[S::DEPTH];
  u32 exceeded[S::GROUPS][2];
  unsigned short live[S::DEPTH][4];  // which keys of a tile there are, a bit each
};
// Of a cut row the tiles' place afterwards takes what the cluster's blocks give to this one.

// Logits stay in base e: a large one would not be a float32 in base 2.
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2E));
  return y;
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < INFINITY; }

// Those who compute meet, without those who fetch.
template <typename S>
__device__ __forceinline__ void workers_meet() {
  asm volatile("bar.sync 15, %0;" ::"n"(S::WORKERS) : "memory");
}

// Where an index's latent stands in the cache; null where it names none.
template <typename Format>
__device__ __forceinline__ const unsigned char* located(const Attention& a, const int* table, int index) {
  bool live = index >= 0;
  if (a.space == POSITION) {
    live = live && index / a.interleave % a.world == a.rank;
    index = index / (a.world * a.interleave) * a.interleave + index % a.interleave;
  }
  int page = index / a.page, inside = index - page * a.page;
  if (a.space != SLOT) {
    live = live && page < a.columns;
    page = live ? __ldg(table + page) : -1;
    live = live && page >= 0;
  }
  if (!live || page >= a.pages) return nullptr;
  return a.cache + page * a.page_stride + static_cast<long long>(inside) * Format::BYTES;
}

// A block's part of the keys of an item: a row and a block of heads. Blocks take items in turn.
template <typename S>
struct Item {
  const int *indices, *table;
  long long row;
  int first_head, begin, end, tiles;

  __device__ __forceinline__ Item(const Attention& a, int item, int part) {
    int blocks = (a.heads + S::HEADS - 1) / S::HEADS;
    row = item / blocks, first_head = item % blocks * S::HEADS;
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

// Where the next tile that is asked for stands: goes through the tiles of all of a block's items.
template <typename S>
struct Cursor {
  int item, step, items, part, tile;
  Item<S> at;

  __device__ __forceinline__ Cursor(const Attention& a, int first, int step, int items, int part)
      : item(first), step(step), items(items), part(part), tile(0), at(a, first, part) {
    if (a.each > 2) announce(a, first);
    announce(a, first + step);
    settle(a);
  }
  // Bring an item's indices and queries nearer, some time before they are read.
  __device__ __forceinline__ void announce(const Attention& a, int item) const {
    if (item >= items) return;
    int blocks = (a.heads + S::HEADS - 1) / S::HEADS, me = threadIdx.x - S::WORKERS, head = item % blocks * S::HEADS;
    long long row = item / blocks;
    int begin = part * a.each * KEYS, end = min(a.width, begin + a.each * KEYS);
    for (int i = begin + 32 * me; i < end; i += 32 * 32 * S::FETCHERS)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a.indices + row * a.index_row + i));
    int size = a.q_fp8 ? 1 : 2, lines = WIDTH * size / 128 + 1, heads = min(S::HEADS, a.heads - head);
    const char* q = static_cast<const char*>(a.q) + (row * a.q_row + head * a.q_head) * size;
    for (int i = me; i < heads * lines; i += 32 * S::FETCHERS)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(
          q + (i / lines * a.q_head + min(i % lines * (128 / size), WIDTH - 1)) * size));
  }
  __device__ __forceinline__ bool there() const { return item < items; }
  // Skip items without tiles.
  __device__ __forceinline__ void settle(const Attention& a) {
    while (tile >= at.tiles) {
      item += step, tile = 0;
      if (item >= items) return;
      at = Item<S>(a, item, part);
      announce(a, item + step);
    }
  }
  __device__ __forceinline__ int index(int key) const {
    int i = at.begin + tile * KEYS + key;
    return there() && i < at.end ? __ldg(at.indices + i) : -1;
  }
  __device__ __forceinline__ void advance(const Attention& a) {
    if (there()) ++tile, settle(a);
  }
};

// Ask for the rows of every tile, as places in the ring come free; a row that names no key becomes zeros. A warp has 16
// rows of each tile, a lane one. Indices are read two tiles ahead, places in the cache looked up one ahead.
template <typename S>
__device__ __forceinline__ void fetch_all(Room<S>& room, const Attention& a, Cursor<S> cursor) {
  using Format = typename S::Format;
  static_assert(S::FETCHERS * 16 == KEYS, "sixteen rows a warp");
  int key = (warp() - S::WORKERS / 32) * 16 + lane();
  bool works = lane() < 16, known = cursor.there(), more, zeroed = false;
  const unsigned char* here = works ? located<Format>(a, cursor.at.table, cursor.index(key)) : nullptr;
  cursor.advance(a);
  const int* table = cursor.at.table;
  more = cursor.there();
  int next = works ? cursor.index(key) : -1, slot = 0;
  u32 parity = 1;
#pragma unroll 1
  while (known) {
    // The index after the next comes while this tile's rows are asked for.
    cursor.advance(a);
    const int* later_table = cursor.at.table;
    bool later = cursor.there();
    int after = works ? cursor.index(key) : -1;
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
    if (here) copy_bulk(to, here, Format::BYTES, &room.full[slot]);
    here = works ? located<Format>(a, table, next) : nullptr;
    known = more, more = later, table = later_table, next = after;
    if (++slot == S::DEPTH) slot = 0, parity ^= 1;
  }
}

// A warp's numbers of a query: lane and every 32nd from there.
__device__ __forceinline__ void read_query(float (&x)[WIDTH / 32], const Attention& a, long long at) {
  if (a.q_fp8) {
    const unsigned char* from = static_cast<const unsigned char*>(a.q) + at;
    u32 codes[WIDTH / 32];
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) codes[n] = __ldg(from + 32 * n);
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n)
      x[n] = __half2float(__ushort_as_half(static_cast<unsigned short>(halves_of(codes[n]))));
  } else {
    const unsigned short* from = static_cast<const unsigned short*>(a.q) + at;
    u32 codes[WIDTH / 32];
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) codes[n] = __ldg(from + 32 * n);
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) x[n] = __uint_as_float(codes[n] << 16);
  }
}

// Put the block's queries into shared memory as float16, each head raised by a power of two to where float16 is fine.
// A warp takes one head after the other, which is little code: at a kernel's start code comes from afar.
template <typename S>
__device__ __forceinline__ void take_queries(Room<S>& room, const Attention& a, long long row, int first_head) {
  using Format = typename S::Format;
  float unit = a.softmax_scale * (a.k_scale ? __ldg(a.k_scale) : 1.0f) * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
  int heads = min(S::HEADS, a.heads - first_head);
  long long begin = row * a.q_row + first_head * a.q_head;
#pragma unroll 1
  for (int h = warp(); h < S::HEADS; h += S::WORKERS / 32) {
    float x[WIDTH / 32], most = 0.0f;
    read_query(x, a, begin + min(h, heads - 1) * a.q_head + lane());
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) {
      x[n] = h < heads ? x[n] : 0.0f;
      if (finite(x[n])) most = fmaxf(most, fabsf(x[n]) * (32 * n < LATENT ? 1.0f : exp2f(-Format::RAISED)));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    int exponent = most > 0.0f ? min(119, 13 - Format::RAISED - ilogbf(most)) : 0;
    float raised = exp2f(exponent);
    if (lane() == 0) room.factor[h] = exp2f(-exponent) * unit;
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) {
      int at = Format::position(32 * n + lane());
      *reinterpret_cast<__half*>(room.q[at >> 6] + place(h, at & 63)) = __float2half_rn(x[n] * (32 * n < LATENT ? raised * exp2f(Format::RAISED) : raised));
    }
  }
}

// What a warpgroup has of its tiles: outputs, and by head a reference and the sum of this thread's keys. `o[i]` holds
// latents 16 (8 w + g) + 2 i + (0, 1) by heads 8 j + 2 t + (0, 1), w the warp.
template <typename S>
struct Part {
  float o[8][S::HEADS / 8][4];
  float base[S::PAIRS], total[S::PAIRS];  // base: the reference; -inf: none yet, +inf: a logit was
};

template <typename S>
__device__ __forceinline__ void scores(float (&s)[S::HEADS / 8][4], const unsigned char* tile, int key, Block q) {
  typename S::Format::Keys keys(tile, key);
  keys.read(0);
  constexpr int STEPS = S::STEPS;
  u32 a[2][STEPS][4];
#pragma unroll
  for (int n = 0; n < BLOCKS * 4 / STEPS; ++n) {
    int block = n * STEPS / 4, first = n * STEPS % 4;
    if (first == 0 && block + 1 < BLOCKS) keys.read(block + 1);
    if (n > 1) tall_done<1>();
    keys.take(a[n & 1], block, first);
    tall_begin();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      tall<S::HEADS>(s, a[n & 1][i], block_plus(q, block * S::HEADS * 128), first + i, n + i > 0);
    tall_commit();
  }
  tall_done<0>();
}

// Write this warp's probabilities of rows g and g + 8, which are neighbours in the contraction of O.
template <typename S>
__device__ __forceinline__ void keep(unsigned char* p, const float (&x)[S::HEADS / 8][4], int column) {
  int t = lane() & 3;
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      *reinterpret_cast<__half2*>(p + place(8 * j + 2 * t + e, column)) = __floats2half2_rn(x[j][e] * LIFT, x[j][2 + e] * LIFT);
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
      for (int i = 0; i < 8; ++i) part.o[i][j][e] *= kept, part.o[i][j][2 + e] *= kept;
      s[j][e] = exponential(s[j][e] - less), s[j][2 + e] = exponential(s[j][2 + e] - less);
    }
  }
}

template <typename S>
__device__ __forceinline__ void add_tile(Part<S>& part, Room<S>& room, const float (&factor)[S::PAIRS], int slot,
                                         int turn, int group) {
  int g = lane() >> 2, w = warp() & 3, key = 16 * w + key_of(g);
  const unsigned char* tile = room.keys[slot];
  float s[S::HEADS / 8][4];
  scores<S>(s, tile, key, block_at(room.q));
  u32 live = room.live[slot][w];
  bool first = live >> key_of(g) & 1, second = live >> key_of(g) + 8 & 1, again = turn == 0;
  float x[S::HEADS / 8][4];
  unsigned char* p = room.p[group][turn & 1];
  int column = 16 * w + 2 * g;
  if (!again) {
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int c = 2 * j + (i & 1);
        bool there = i < 2 ? first : second;
        x[j][i] = fmaf(s[j][i], factor[c], -part.base[c]);
        exceeds = exceeds || there && !(x[j][i] <= SLACK);
        x[j][i] = there ? exponential(x[j][i]) : 0.0f;
      }
    }
    keep<S>(p, x, column);
    exceeds = __any_sync(EVERY, exceeds);
    if (lane() == 0) reinterpret_cast<unsigned char*>(&room.exceeded[group][turn & 1])[w] = exceeds;
    publish();
    meet(group);
    again = room.exceeded[group][turn & 1];
  }
  if (again) {
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = (i < 2 ? first : second) ? s[j][i] * factor[2 * j + (i & 1)] : -INFINITY;
    }
    raise<S>(part, room, x, group, w);
    keep<S>(p, x, column);
    publish();
    meet(group);
  }
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) part.total[c] += x[c / 2][c & 1] + x[c / 2][2 + (c & 1)];
  Block pt = block_at(p);
  constexpr int STEPS = S::STEPS;
  constexpr bool AHEAD = S::HEADS == 16;  // for more heads registers do not suffice
  u32 a[2][STEPS][4];
  typename S::Format::Values values[1 + AHEAD];
  if (AHEAD) values[0].read(tile, 0, 8 * w + g);
#pragma unroll
  for (int n = 0; n < 32 / STEPS; ++n) {
    int step = n * STEPS / 8, first = n * STEPS % 8;
    if (first == 0 && step + AHEAD < 4) values[step + 1 & AHEAD].read(tile, 16 * (step + AHEAD), 8 * w + g);
    if (n > 1) tall_done<1>();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) values[step & AHEAD].take(a[n & 1][i], first + i);
    tall_begin();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) tall<S::HEADS>(part.o[first + i], a[n & 1][i], pt, step, true);
    tall_commit();
  }
  __syncwarp();
  if (lane() == 0) barrier_arrive(&room.empty[slot]);
  tall_done<0>();
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

__device__ __forceinline__ float remote_float(const float* p, u32 rank) {
  return __uint_as_float(remote(reinterpret_cast<const u32*>(p), rank));
}

__device__ __forceinline__ float4 remote_four(const void* p, u32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(mapped(p, rank))
               : "memory");
  return v;
}

__device__ __forceinline__ void give_four(void* p, u32 rank, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mapped(p, rank)), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

// What a head's outputs of this block's warpgroups are multiplied by: a lane looks at a warpgroup of the cluster.
template <typename S>
__device__ __forceinline__ void weigh(Room<S>& room, const Attention& a, const Item<S>& item, int part, int head) {
  int rank = lane() / S::GROUPS, group = lane() % S::GROUPS;
  bool there = rank < a.parts;
  float top = -INFINITY, total = 0.0f;
  if (there) {
    top = remote_float(&room.top[group][head], rank);
    float4 four = remote_four(&room.total[group][head], rank);
    total = four.x + four.y + (four.z + four.w);
  }
  float most = top;
#pragma unroll
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
  float base = finite(most) ? most : 0.0f, weight = exponential(top - base);
  total *= weight;
#pragma unroll
  for (int step = 16; step; step /= 2) total += __shfl_xor_sync(EVERY, total, step);
  float unit = exp2f(S::Format::RAISED) / LIFT * (a.k_scale ? __ldg(a.k_scale) : 1.0f);
  if (there && rank == part)
    room.share[group][head] = most == INFINITY ? NAN : unit / (total == 0.0f ? 1.0f : total) * weight;
  if (lane() == 0 && part == 0 && a.returns_lse)
    a.lse[item.row * a.lse_row + item.first_head + head] = most == INFINITY ? total : base + log2f(total) * LN2;
}

// Add the two warpgroups' outputs; each then has half of a thread's latents, `o[0]` to `o[3]`.
template <typename S>
__device__ __forceinline__ void exchange(Part<S>& part, Room<S>& room, int group) {
  constexpr int J = S::HEADS / 8;
  float4* stage = reinterpret_cast<float4*>(room.p);  // whose probabilities nobody reads any more
  int mine = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < J; ++j) {
      float give[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) give[n] = group ? part.o[i][j][n] : part.o[4 + i][j][n];
      stage[(group * J + j) * 128 + mine] = make_float4(give[0], give[1], give[2], give[3]);
    }
    workers_meet<S>();
#pragma unroll
    for (int j = 0; j < J; ++j) {
      float4 v = stage[((1 - group) * J + j) * 128 + mine];
      float more[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) part.o[i][j][n] = (group ? part.o[4 + i][j][n] : part.o[i][j][n]) + more[n];
    }
    workers_meet<S>();
  }
}

// Write this thread's eight latents of each of its heads.
template <typename S>
__device__ __forceinline__ void write(const Part<S>& part, const Attention& a, const Item<S>& item, int latent) {
  bool wide = !((reinterpret_cast<u64>(a.out) | a.out_row * 2 | a.out_head * 2) & 15);
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1, head = item.first_head + 8 * j + 2 * (lane() & 3) + e;
    if (head >= a.heads) continue;
    __nv_bfloat16* to = a.out + item.row * a.out_row + head * a.out_head + latent;
    __align__(16) __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(part.o[i][j][e], part.o[i][j][2 + e]);
    if (wide) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4*>(pairs);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[2 * i] = pairs[i].x, to[2 * i + 1] = pairs[i].y;
    }
  }
}

// Give every block of the cluster its share of the latents, then add what all gave to this one, in their order.
template <typename S>
__device__ __forceinline__ void spread(const Part<S>& part, Room<S>& room, const Attention& a, const Item<S>& item,
                                       int rank, int latent) {
  float* given = reinterpret_cast<float*>(room.keys);
  int heads = min(S::HEADS, a.heads - item.first_head), each = (LATENT / 8 + a.parts - 1) / a.parts * 8, to = latent / each;
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1, head = 8 * j + 2 * (lane() & 3) + e;
    float* at = given + (rank * S::HEADS + head) * each + latent - to * each;
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      if (head < heads)
        give_four(at + 2 * i, to,
                  make_float4(part.o[i][j][e], part.o[i][j][2 + e], part.o[i + 1][j][e], part.o[i + 1][j][2 + e]));
  }
  cluster_sync();
  int first = rank * each, mine = max(0, min(each, LATENT - first));
  for (int at = threadIdx.x; at < heads * mine; at += S::WORKERS) {
    int head = at / mine, here = at - head * mine;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i) sum += given[(i * S::HEADS + head) * each + here];
    a.out[item.row * a.out_row + (item.first_head + head) * a.out_head + first + here] = __float2bfloat16_rn(sum);
  }
}

// Add the parts of an item, of which nothing is read any more, and write its outputs.
template <typename S>
__device__ __forceinline__ void settle(Part<S>& part, Room<S>& room, const Attention& a, const Item<S>& item, int group,
                                       int rank) {
  int g = lane() >> 2, t = lane() & 3, w = warp() & 3, heads = min(S::HEADS, a.heads - item.first_head);
  tell<S>(part, room, group);
  if (a.parts == 1)
    workers_meet<S>();
  else
    cluster_sync();
  for (int head = warp(); head < heads; head += S::WORKERS / 32) weigh<S>(room, a, item, rank, head);
  workers_meet<S>();
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    float share = room.share[group][8 * (c / 2) + 2 * t + (c & 1)];
#pragma unroll
    for (int i = 0; i < 8; ++i) part.o[i][c / 2][c & 1] *= share, part.o[i][c / 2][2 + (c & 1)] *= share;
  }
  exchange<S>(part, room, group);
  int latent = 16 * (8 * w + g) + 8 * group;
  if (a.parts == 1)
    write<S>(part, a, item, latent);
  else
    spread<S>(part, room, a, item, rank, latent);
}

// Compute this warpgroup's tiles, item by item.
template <typename S>
__device__ __forceinline__ void work(Room<S>& room, const Attention& a, int first, int step, int items, int part) {
  int group = warp() >> 2, t = lane() & 3, before = 0;
#pragma unroll 1
  for (int at = first; at < items; at += step) {
    Item<S> item(a, at, part);
    take_queries<S>(room, a, item.row, item.first_head);
    publish();
    workers_meet<S>();
    Part<S> mine;
    float factor[S::PAIRS];
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) {
      mine.base[c] = -INFINITY, mine.total[c] = 0.0f, factor[c] = room.factor[8 * (c / 2) + 2 * t + (c & 1)];
#pragma unroll
      for (int i = 0; i < 8; ++i) mine.o[i][c / 2][c & 1] = mine.o[i][c / 2][2 + (c & 1)] = 0.0f;
    }
    int turn = 0;
#pragma unroll 1
    for (int tile = before + group; tile < before + item.tiles; tile += S::GROUPS, ++turn) {
      barrier_wait(&room.full[tile % S::DEPTH], tile / S::DEPTH & 1);
      add_tile<S>(mine, room, factor, tile % S::DEPTH, turn, group);
    }
    before += item.tiles;
    settle<S>(mine, room, a, item, group, part);
  }
}

template <typename S>
__device__ __forceinline__ void attend(const Attention& a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Room<S>& room = *reinterpret_cast<Room<S>*>(memory);
  int part = blockIdx.x % a.parts, first = blockIdx.x / a.parts, step = gridDim.x / a.parts;
  int items = a.rows * ((a.heads + S::HEADS - 1) / S::HEADS);
  if (threadIdx.x < S::DEPTH)
    barrier_init(&room.full[threadIdx.x], S::FETCHERS), barrier_init(&room.empty[threadIdx.x], 4);
  __syncthreads();
  if (threadIdx.x >= S::WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FEW));
    fetch_all<S>(room, a, Cursor<S>(a, first, step, items, part));
    if (a.parts > 1) cluster_sync(), cluster_sync();  // as those do who compute
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::MANY));
    work<S>(room, a, first, step, items, part);
  }
}

#define KERNEL(name, format, heads, depth)                                               \
  using name##_shape = Shape<format, heads, 2, depth>;                                   \
  extern "C" __global__ void __launch_bounds__(name##_shape::THREADS, 1)                 \
      name(const __grid_constant__ Attention a) {                                        \
    attend<name##_shape>(a);                                                             \
  }
#ifdef LIST
LIST
#else
KERNEL(fp8_16, Fp8, 16, 5)
KERNEL(fp8_32, Fp8, 32, 4)
KERNEL(nvfp4_16, Nvfp4, 16, 8)
KERNEL(nvfp4_32, Nvfp4, 32, 7)

// What the launches ask for and pass.
static_assert(sizeof(Room<fp8_16_shape>) == 223232 && sizeof(Room<fp8_32_shape>) == 211968);
static_assert(sizeof(Room<nvfp4_16_shape>) == 208896 && sizeof(Room<nvfp4_32_shape>) == 214016);
#endif
static_assert(sizeof(Attention) == 224);
