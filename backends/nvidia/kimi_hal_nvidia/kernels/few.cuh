// Attention of few rows: a block has 128 keys of a row or fewer, all at once, and sixteen heads. Lanes read the keys' bytes
// as the products take them, decode them once, and keep float16 for O, of which a warpgroup has a half of the latents.
//
// What a kernel runs once costs as much as its instructions and its turns: no ring, no loop over keys, little code. Blocks of
// a cluster have a row's parts and meet once, where nobody waits for more than the numbers that it adds.
#pragma once
#include <cstddef>

constexpr int FEW_WARPS = 8, FEW_THREADS = 32 * FEW_WARPS;  // a warp has sixteen keys

template <typename Format>
struct FewRoom {
  __align__(1024) unsigned char q[BLOCKS][16 * 128];
  unsigned char p[2][16 * 128];
  unsigned char kept[2][LATENT / 64 * KEYS * 128];
  float factor[16];
  float most[FEW_WARPS][16], total[FEW_WARPS][16], base[16];
  float2 sums[MOST_PARTS][16];  // by part: reference and sum
  float weight[MOST_PARTS][16];
  __align__(16) float outputs[16 * LATENT];  // by part, latent of this block's share and place of a head
  u64 given;
};


// Where a head's outputs stand among sixteen: four are a thread's.
__device__ __forceinline__ int head_place(int head) { return (head >> 1 & 3) * 4 + (head >> 3) * 2 + (head & 1); }

// Products of this warp's sixteen keys with the queries; what is decoded is kept.
template <typename Held>
__device__ __forceinline__ void few_scores(float (&s)[2][4], const Held& keys, Block q, unsigned char* kept) {
  float more[2][2][4];
  u32 a[2][4][4];
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    if (block > 1) tall_done<1>();
    keys.take(a[block & 1], block);
    if (block < LATENT / 64) keep_values(kept + block * KEYS * 128, a[block & 1]);
    tall_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tall<16>(block < 3 ? s : more[block / 3 - 1], a[block & 1][i], block_plus(q, block * 2048), i, block % 3 + i > 0);
    tall_commit();
  }
  tall_done<0>();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] += more[0][j][i] + more[1][j][i];
  }
}

// Give this block's references and sums to every block of the cluster: a thread one head's to one of them.
template <typename Room>
__device__ __forceinline__ void give_sums(Room& room, int rank, int parts) {
  int head = threadIdx.x & 15, to = threadIdx.x >> 4;
  if (to >= parts) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < FEW_WARPS; ++i) sum += room.total[i][head];
  send(reinterpret_cast<u64*>(&room.sums[rank][head]), to, bits_of(make_float2(room.base[head], sum)), &room.given);
}

// Add what the cluster's blocks gave, in their order, and write this block's latents. First a lane weighs a part for a
// head; then a thread adds latents of a head. `unit` is the latents' scale.
template <typename Room, typename Item>
__device__ __forceinline__ void add_parts(Room& room, const Attention& a, const Item& item, int rank, int heads, int each,
                                          float unit) {
  int head = threadIdx.x >> 4, mine = threadIdx.x & 15;
  float2 one = mine < a.parts ? room.sums[mine][head] : make_float2(-INFINITY, 0.0f), sum = one;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) sum.x = fmaxf(sum.x, __shfl_xor_sync(EVERY, sum.x, step));
  float weight = exponential(one.x - subtrahend(sum.x));
  sum.y *= weight;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) sum.y += __shfl_xor_sync(EVERY, sum.y, step);
  room.weight[mine][head_place(head)] = weight * share_of(sum, unit);
  if (rank == 0 && mine == 0 && head < heads && a.returns_lse)
    a.lse[item.row * a.lse_row + item.first_head + head] = lse_of(sum);
  __syncthreads();
  int latent = head;
  head = 8 * (mine >> 1 & 1) + 2 * (mine >> 2) + (mine & 1);
  __nv_bfloat16* to = a.out + item.row * a.out_row + (item.first_head + head) * a.out_head + rank * each;
#pragma unroll 1
  for (; latent < each; latent += 2 * FEW_THREADS / 16) {
    const float* from = room.outputs + latent * 16 + mine;
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_PARTS; ++i) {
      if (i < a.parts) {
        float by = room.weight[i][mine];
        x += from[i * each * 16] * by, y += from[i * each * 16 + FEW_THREADS] * by;
      }
    }
    if (head < heads) to[latent] = __float2bfloat16_rn(x), to[latent + FEW_THREADS / 16] = __float2bfloat16_rn(y);
  }
}

// A block's part of a row's keys, and its heads.
template <bool PLAIN>
struct FewItem {
  const int *indices, *table;
  long long row;
  int first_head, begin, end;

  __device__ __forceinline__ FewItem(const Attention& a, int item) {
    int whole = a.blocks.quotient(item);
    row = whole, first_head = (item - whole * a.blocks.by) * 16;
  }
  __device__ __forceinline__ void find(const Attention& a, int part) {
    begin = part * a.each * KEYS, end = min(a.width, begin + a.each * KEYS);
    if (a.index_len) end = min(end, __ldg(a.index_len + row * a.len_stride));
    table = a.table;
    if (!PLAIN && a.space != SLOT) {
      int request = end > begin ? __ldg(a.row_req + row * a.req_stride) : -1;
      if (request < 0 || request >= a.requests)
        end = 0;
      else
        table = a.table + request * a.table_row;
    }
    indices = a.indices + row * a.index_row;
  }
  // Before anything else is asked for: the keys wait for it.
  __device__ __forceinline__ int index(int key) const {
    int found = -1;
    if (key < end) asm volatile("ld.global.s32 %0, [%1];" : "=r"(found) : "l"(indices + key) : "memory");
    return found;
  }
};

// PLAIN: indices are slots, and queries pairs of bfloat16. Parts are a power of two, 16 at most, of 128 keys at most.
template <typename Format, bool PLAIN>
__device__ __forceinline__ void attend_few(const Attention& a) {
  FewRoom<Format>& room = *reinterpret_cast<FewRoom<Format>*>(memory);
  int rank = blockIdx.x, g = lane() >> 2, t = lane() & 3, w = warp(), group = w >> 2;
  FewItem<PLAIN> item(a, blockIdx.y);
  wait_for_leader();
  item.find(a, rank);
  int key = item.begin + 16 * w + g, index[2] = {item.index(key), item.index(key + 8)};
  int log_each = 9 - (31 - __clz(a.parts)), each = 1 << log_each, heads = min(16, a.heads - item.first_head);
  u32 codes[2][BLOCKS];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    long long from = item.row * a.q_row + (item.first_head + min(w + 8 * i, heads - 1)) * a.q_head + 2 * lane();
    if constexpr (PLAIN) {
#pragma unroll
      for (int n = 0; n < BLOCKS; ++n)
        codes[i][n] = __ldg(reinterpret_cast<const u32*>(static_cast<const unsigned short*>(a.q) + from) + 32 * n);
    } else {
      read_query(codes[i], a, from);
    }
  }
  float scale = a.k_scale ? __ldg(a.k_scale) : 1.0f;
  float unit = a.softmax_scale * scale * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
  if (threadIdx.x == 0) {
    barrier_init(&room.given, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(&room.given, a.parts * 16 * (each * 4 + 8));
  }
  typename Format::Held keys;
  const unsigned char *low = located<Format, PLAIN>(a, item.table, index[0]), *high = located<Format, PLAIN>(a, item.table, index[1]);
  keys.read(low, high);
  cluster_arrive();  // and no load of a key comes later
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int h = w + 8 * i;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) codes[i][n] = h < heads ? pair_of(codes[i][n], !PLAIN && a.q_fp8) : 0;
    put_query<Format>(room.q, room.factor, codes[i], h, unit, lane());
  }
  publish();
  __syncthreads();
  float s[2][4];
  few_scores(s, keys, alike(block_at(room.q)), room.kept[group]);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    int j = c / 2, e = c & 1, head = 8 * j + 2 * t + e;
    float factor = room.factor[head];
    s[j][e] = low ? s[j][e] * factor : -INFINITY, s[j][2 + e] = high ? s[j][2 + e] * factor : -INFINITY;
    float most = fmaxf(s[j][e], s[j][2 + e]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    if (g == 0) room.most[w][head] = most;
  }
  __syncthreads();
  float total[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    int j = c / 2, e = c & 1, head = 8 * j + 2 * t + e;
    float most = room.most[0][head];
#pragma unroll
    for (int i = 1; i < FEW_WARPS; ++i) most = fmaxf(most, room.most[i][head]);
    float less = subtrahend(most);
    s[j][e] = exponential(s[j][e] - less), s[j][2 + e] = exponential(s[j][2 + e] - less);
    total[c] = s[j][e] + s[j][2 + e];
    if (threadIdx.x < 4) room.base[head] = most;
  }
  keep_in_order(room.p[group], s);
  publish();
  __syncthreads();
  float o[4][2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) o[i][0][n] = o[i][1][n] = 0.0f;
  }
  Block at = alike(block_at(room.kept[0] + 4 * group * KEYS * 128)), pt = alike(block_at(room.p[0]));
  tall_begin();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tall_kept(o[i],
                block_plus(at, (step >> 2) * static_cast<int>(sizeof room.kept[0]) + (i * KEYS + 16 * (step & 3)) * 128),
                block_plus(pt, (step >> 2) * 2048), step & 3);
  }
  tall_commit();
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total[c] += __shfl_xor_sync(EVERY, total[c], step);
    if (g == 0) room.total[w][8 * (c / 2) + 2 * t + (c & 1)] = total[c];
  }
  __syncthreads();
  cluster_wait();  // every block's barrier is there
  give_sums(room, rank, a.parts);
  tall_done<0>();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int latent = Format::kept(4 * group + i, w & 3) + Format::among(g);
    u32 there = mapped(&room, latent >> log_each);
    u32 to = there + offsetof(FewRoom<Format>, outputs) + (rank * each + (latent & each - 1)) * 64 + 16 * t;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      give_four(to + 8 * 64 * n, there + offsetof(FewRoom<Format>, given),
                make_float4(o[i][0][2 * n], o[i][0][2 * n + 1], o[i][1][2 * n], o[i][1][2 * n + 1]));
  }
  barrier_wait(&room.given, 0);
  add_parts(room, a, item, rank, heads, each, scale);
}
