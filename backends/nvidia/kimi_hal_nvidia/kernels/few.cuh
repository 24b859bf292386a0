// Attention of few rows: a block has 256 keys of a row or fewer, 128 at once, sixteen heads, and a slice of the latents.
//
// What a kernel runs once costs as much as its instructions and its turns: 2.5 ns an instruction that is nowhere near yet. So
// warps of their own ask for keys and take queries, and what can be a loop is one. Blocks of a cluster have a row's parts
// and meet once, where nobody waits for more than the numbers that it adds. Where clusters are free, each has a slice of
// the latents: it scores all keys, and keeps and adds only what the slice needs.
#pragma once
#include <cstddef>

constexpr int FEW_WARPS = 8, FEW_WORKERS = 32 * FEW_WARPS;  // a warp has sixteen keys
constexpr int FEW_FETCHERS = 4, FEW_ASKERS = 4;  // warps: of keys, and of queries
constexpr int FEW_THREADS = FEW_WORKERS + 32 * (FEW_FETCHERS + FEW_ASKERS);
constexpr int FEW_KEYS = 16 * FEW_WARPS;  // of a turn
constexpr int FEW_OURS = 168, FEW_OTHERS = 88;  // registers of a thread that computes, and of another
constexpr int READY = 1, WORKERS_MEET = 2, FETCHERS_MEET = 2;  // barriers of the block; of a warpgroup one more says which

template <typename Format, int SLICES>
struct FewRoom {
  __align__(1024) unsigned char q[BLOCKS][16 * 128];
  unsigned char p[2][16 * 128];
  unsigned char kept[2][LATENT / SLICES / 64 * KEYS * 128];
  __align__(128) unsigned char keys[2 * KEYS * Format::APART];
  // Of four of a lane's heads together, as `head_place` says.
  float4 factor[4], most[FEW_WARPS][4], total[FEW_WARPS][4], base[4];
  float2 sums[MOST_PARTS][16];  // by part: reference and sum
  float weight[MOST_PARTS][16];
  u64 full[FEW_FETCHERS], empty, summed, given;
  u32 live[2][FEW_FETCHERS];  // which keys of a warp's 32 there are, in turn
};
// Afterwards the keys' place takes outputs: by part, latent of this block's share and place of a head.

__device__ __forceinline__ void workers_meet_few() { asm volatile("bar.sync %0, %1;" ::"n"(WORKERS_MEET), "n"(FEW_WORKERS) : "memory"); }
__device__ __forceinline__ void say_ready() { asm volatile("bar.arrive %0, %1;" ::"n"(READY), "n"(FEW_THREADS) : "memory"); }
__device__ __forceinline__ void wait_until_ready() { asm volatile("bar.sync %0, %1;" ::"n"(READY), "n"(FEW_THREADS) : "memory"); }

// Where a head's numbers stand among sixteen: four are a lane's.
__device__ __forceinline__ int head_place(int head) { return (head >> 1 & 3) * 4 + (head >> 3) * 2 + (head & 1); }
__device__ __forceinline__ int head_at(int place) { return (place >> 1 & 1) * 8 + (place >> 2) * 2 + (place & 1); }

__device__ __forceinline__ float& number(float4& v, int i) { return i < 2 ? i ? v.y : v.x : i > 2 ? v.w : v.z; }

// Of all lanes that have the same heads.
template <typename Of>
__device__ __forceinline__ float over_keys(float x, Of of) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = of(x, __shfl_xor_sync(EVERY, x, step));
  return x;
}

// Numbers that a product writes are not read before it is waited for.
__device__ __forceinline__ void settled(float (&d)[2][4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}

// Products of this warp's sixteen keys with the queries: of blocks below `last`, and of the one of no latents. Blocks from
// `first` on, for COUNT of which there is room, are kept as they are decoded. Chains of sums are two: a matrix unit cuts each of
// its sums, and long chains lean to one side.
template <int COUNT, typename Laid>
__device__ __forceinline__ void few_scores(float (&s)[2][4], Laid keys, Block q, unsigned char* kept, int first, int last) {
  float more[2][4];
  u32 a[2][4][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = more[i / 4][i % 4] = 0.0f;
  auto take = [&](float (&sums)[2][4], int which, int block, bool latents) {
    Block at = alike(block_plus(q, block * 2048));  // first, since it takes as long as half a block's decoding
    tall_done<1>();  // the operand that was where this block's comes is read no more
    keys.take(a[which], which, block);
    if (latents && static_cast<u32>(block - first) < COUNT) keep_values(kept + (block - first) * KEYS * 128, a[which]);
    tall_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) tall<16>(sums, a[which][i], at, i, true);
    tall_commit();
  };
#pragma unroll 1
  for (int block = 0; block < last; block += 2) take(s, 0, block, true), take(more, 1, block + 1, true);
  take(s, 0, BLOCKS - 1, false);
  tall_done<0>();
  settled(s), settled(more);
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += more[i / 4][i % 4];
}

// Turns that a part's keys take: two at most.
__device__ __forceinline__ int few_turns(const Attention& a) { return a.each * KEYS > FEW_KEYS ? 2 : 1; }

// Which cluster this block is of, and which of its blocks.
struct FewItem {
  long long row;
  int first_head, slice, rank;
  template <int SLICES>
  static __device__ __forceinline__ FewItem of(const Attention& a) {
    u32 unit, rank;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(unit));
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    int item = unit / SLICES, row = a.blocks.quotient(item);
    return {row, (item - row * static_cast<int>(a.blocks.by)) * 16, static_cast<int>(unit % SLICES), static_cast<int>(rank)};
  }
};

// The request of a row, and whether it is one.
__device__ __forceinline__ bool known(const Attention& a, int request) { return request >= 0 && request < a.requests; }

// Read at once, whatever comes between here and where it is needed.
__device__ __forceinline__ int read_now(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Ask for the keys of each turn, a thread for one; one that is not there becomes zeros. What a row has beside its indices is asked
// for before whoever writes those is waited for. Keys of a second turn come nearer while the first one's are scored.
template <typename Format, typename Room>
__device__ __forceinline__ void few_fetch(Room& room, const Attention& a, const FewItem& item) {
  int w = warp() - FEW_WARPS, key = 32 * w + lane(), all = a.each * KEYS, first = item.rank * all, length = a.width, request = 0;
  int found[2] = {-1, -1};
  bool tabled = a.space != SLOT;
  if (a.index_len) length = read_now(a.index_len + item.row * a.len_stride);
  if (tabled) request = read_now(a.row_req + item.row * a.req_stride);
  wait_for_leader();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int at = FEW_KEYS * i + key;
    if (at < all && first + at < a.width) found[i] = read_now(a.indices + item.row * a.index_row + first + at);
  }
  if (lane() == 0) barrier_init(&room.full[w], 1);
  if (threadIdx.x == FEW_WORKERS) barrier_init(&room.empty, FEW_WARPS);
  meet(FETCHERS_MEET);
  say_ready();
  bool asks = !tabled || known(a, request);
  const int* table = a.table + (tabled && asks ? request * a.table_row : 0);
  unsigned char* to = room.keys + key * Format::APART;
  int turns = few_turns(a);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    int index = asks && first + FEW_KEYS * turn + key < length ? found[0] : -1;
    found[0] = found[1];
    const unsigned char* from = located<Format>(a, table, index);
    if (turn > 0) {
      if (from) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(Format::BYTES) : "memory");
      barrier_wait(&room.empty, 0);
      publish();  // zeros of the first turn are overwritten by copies
    }
    if (from) copy_bulk(to, from, Format::BYTES, &room.full[w]);
    u32 live = __ballot_sync(EVERY, from != nullptr);
    if (live != EVERY) {
      if (!from) {
#pragma unroll 1
        for (int i = 0; i < Format::BYTES; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
      }
      __syncwarp();
    }
    if (lane() == 0) room.live[turn][w] = live, barrier_expect(&room.full[w], __popc(live) * Format::BYTES);
  }
}

// Put queries into shared memory: a warp asks for all of its heads' at once, and takes one after the other.
template <typename Format, typename Room>
__device__ __forceinline__ void few_queries(Room& room, const Attention& a, const FewItem& item, float unit) {
  constexpr int EACH = 16 / FEW_ASKERS;
  int mine = warp() - FEW_WARPS - FEW_FETCHERS, heads = min(16, a.heads - item.first_head);
  long long from = item.row * a.q_row + item.first_head * a.q_head + 2 * lane();
  u32 codes[EACH][BLOCKS];
#pragma unroll
  for (int i = 0; i < EACH; ++i) read_query(codes[i], a, from + min(mine + FEW_ASKERS * i, heads - 1) * a.q_head);
  if (a.space != SLOT) {  // of the block table as much as a line for each thread, which keys are looked up in
    int request = __ldg(a.row_req + item.row * a.req_stride), first = 32 * (threadIdx.x - FEW_WORKERS - 32 * FEW_FETCHERS);
    if (known(a, request) && first < a.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.table + request * a.table_row + first));
  }
  unit *= a.softmax_scale * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
#pragma unroll 1
  for (int h = mine; h < 16; h += FEW_ASKERS) {
    u32 pairs[BLOCKS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      pairs[n] = h < heads ? pair_of(codes[0][n], a.q_fp8) : 0;
#pragma unroll
      for (int i = 1; i < EACH; ++i) codes[i - 1][n] = codes[i][n];
    }
    put_query<Format>(room.q, reinterpret_cast<float*>(room.factor)[head_place(h)], pairs, h, unit, lane());
  }
  publish();
  say_ready();
}

// Give this block's references and sums to every block of the cluster: a thread those of a head's place to one of them.
template <typename Room>
__device__ __forceinline__ void give_sums(Room& room, int rank, int parts) {
  int head = threadIdx.x & 15, to = threadIdx.x >> 4;
  if (to >= parts) return;
  const float *total = reinterpret_cast<const float*>(room.total) + head, *base = reinterpret_cast<const float*>(room.base) + head;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < FEW_WARPS; ++i) sum += total[16 * i];
  send(reinterpret_cast<u64*>(&room.sums[rank][head]), to, bits_of(make_float2(*base, sum)), &room.summed);
}

// Weigh what the cluster's blocks gave: a lane a part for a place of a head. `unit` is the latents' scale.
template <typename Room>
__device__ __forceinline__ void weigh_parts(Room& room, const Attention& a, const FewItem& item, float unit, bool writes) {
  int place = threadIdx.x >> 4, mine = threadIdx.x & 15, head = head_at(place);
  float2 one = mine < a.parts ? room.sums[mine][place] : make_float2(-INFINITY, 0.0f), sum = one;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) sum.x = fmaxf(sum.x, __shfl_xor_sync(EVERY, sum.x, step));
  float weight = exponential(one.x - subtrahend(sum.x));
  sum.y *= weight;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) sum.y += __shfl_xor_sync(EVERY, sum.y, step);
  room.weight[mine][place] = weight * share_of(sum, unit);
  if (writes && mine == 0 && item.first_head + head < a.heads && a.returns_lse)
    a.lse[item.row * a.lse_row + item.first_head + head] = lse_of(sum);
}

// Add what the cluster's blocks gave, in their order, and write this block's `each` latents, the first of which is `first`.
template <typename Room>
__device__ __forceinline__ void add_parts(const Room& room, const Attention& a, const FewItem& item, int first, int each) {
  int mine = threadIdx.x & 15, head = item.first_head + head_at(mine);
  __nv_bfloat16* to = a.out + item.row * a.out_row + head * a.out_head + first;
#pragma unroll 1
  for (int latent = threadIdx.x >> 4; latent < each; latent += FEW_WORKERS / 16) {
    const float *output = reinterpret_cast<const float*>(room.keys) + latent * 16 + mine, *weight = &room.weight[0][mine];
    float x = 0.0f;
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i, output += each * 16, weight += 16) x += *output * *weight;
    if (head < a.heads) to[latent] = __float2bfloat16_rn(x);
  }
}

// What warps that compute do.
template <typename Format, int SLICES>
__device__ __forceinline__ void few_work(FewRoom<Format, SLICES>& room, const Attention& a, const FewItem& item, float scale) {
  using Room = FewRoom<Format, SLICES>;
  constexpr int OF_GROUP = LATENT / 64 / SLICES / 2;  // blocks of latents of a warpgroup
  int g = lane() >> 2, t = lane() & 3, w = warp(), group = w >> 2, rank = item.rank;
  int log_each = 31 - __clz(LATENT / SLICES) - (31 - __clz(a.parts)), each = 1 << log_each;
  if (threadIdx.x == 0) {
    barrier_init(&room.summed, 1), barrier_init(&room.given, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(&room.summed, a.parts * 16 * 8), barrier_expect(&room.given, a.parts * 16 * each * 4);
  }
  typename Format::Laid laid(room.keys, 16 * w + g);
  Block q = block_at(room.q), pt = block_at(room.p[0]), kept = block_at(room.kept[0] + OF_GROUP * group * KEYS * 128);
  wait_until_ready();
  float o[OF_GROUP][2][4] = {};
  float4 base = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY), total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int turns = few_turns(a);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    barrier_wait(&room.full[2 * group], turn), barrier_wait(&room.full[2 * group + 1], turn);
    float s[2][4];
    laid.begin();
    few_scores<2 * OF_GROUP>(s, laid, q, room.kept[group], item.slice * 2 * OF_GROUP, BLOCKS - 1);
    u32 live = room.live[turn][w >> 1] >> 16 * (w & 1);
    bool low = live >> g & 1, high = live >> g + 8 & 1;
    float4 factor = room.factor[t], most;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float &x = s[c / 2][c & 1], &y = s[c / 2][2 + (c & 1)];
      x = low ? x * number(factor, c) : -INFINITY, y = high ? y * number(factor, c) : -INFINITY;
      number(most, c) = over_keys(fmaxf(x, y), [](float one, float other) { return fmaxf(one, other); });
    }
    if (g == 0) room.most[w][t] = most;
    workers_meet_few();
    if (turn + 1 == turns)
      cluster_arrive();  // keys are read no more, and barriers are there
    else if (lane() == 0)
      barrier_arrive(&room.empty);
    most = base;
#pragma unroll
    for (int i = 0; i < FEW_WARPS; ++i) {
      float4 other = room.most[i][t];
      most = make_float4(fmaxf(most.x, other.x), fmaxf(most.y, other.y), fmaxf(most.z, other.z), fmaxf(most.w, other.w));
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float less = subtrahend(number(most, c)), &x = s[c / 2][c & 1], &y = s[c / 2][2 + (c & 1)];
      x = exponential(x - less), y = exponential(y - less);
      if (turn > 0) {
        float kept_of = exponential(number(base, c) - less);
        number(total, c) *= kept_of;
#pragma unroll
        for (int i = 0; i < OF_GROUP; ++i) o[i][c / 2][c & 1] *= kept_of, o[i][c / 2][2 + (c & 1)] *= kept_of;
      }
      number(total, c) += x + y;
    }
    base = most;
    keep_in_order(room.p[group], s);
    publish();
    workers_meet_few();
    tall_begin();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      Block values = alike(block_plus(kept, half * static_cast<int>(sizeof room.kept[0]))), weights = alike(block_plus(pt, half * 2048));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < OF_GROUP; ++i) tall_kept(o[i], block_plus(values, (i * KEYS + 16 * step) * 128), weights, step);
      }
    }
    tall_commit();
    if (turn + 1 == turns) break;
    tall_done<0>();
#pragma unroll
    for (int i = 0; i < OF_GROUP; ++i) settled(o[i]);
    workers_meet_few();  // what was kept is read no more
  }
  if (threadIdx.x < 4) room.base[t] = base;
#pragma unroll
  for (int c = 0; c < 4; ++c) number(total, c) = over_keys(number(total, c), [](float one, float other) { return one + other; });
  if (g == 0) room.total[w][t] = total;
  workers_meet_few();
  cluster_wait(), give_sums(room, rank, a.parts);
  tall_done<0>();
#pragma unroll
  for (int i = 0; i < OF_GROUP; ++i) {
    settled(o[i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      int latent = Format::kept(OF_GROUP * group + i, w & 3) + Format::among(g) + 8 * n;
      u32 there = mapped(&room, latent >> log_each);
      give_four(there + offsetof(Room, keys) + (rank * each + (latent & each - 1)) * 64 + 16 * t, there + offsetof(Room, given),
                make_float4(o[i][0][2 * n], o[i][0][2 * n + 1], o[i][1][2 * n], o[i][1][2 * n + 1]));
    }
  }
  barrier_wait(&room.summed, 0);
  weigh_parts(room, a, item, scale, rank == 0 && item.slice == 0);
  workers_meet_few();
  barrier_wait(&room.given, 0);
  add_parts(room, a, item, item.slice * (LATENT / SLICES) + rank * each, each);
}

// Parts are a power of two, 16 at most, of 256 keys at most.
template <typename Format, int SLICES>
__device__ __forceinline__ void attend_few(const Attention& a) {
  FewRoom<Format, SLICES>& room = *reinterpret_cast<FewRoom<Format, SLICES>*>(memory);
  if (threadIdx.x >= FEW_WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_OTHERS));
    cluster_arrive();
    FewItem item = FewItem::of<SLICES>(a);
    if (threadIdx.x < FEW_WORKERS + 32 * FEW_FETCHERS)
      few_fetch<Format>(room, a, item);
    else
      few_queries<Format>(room, a, item, a.k_scale ? __ldg(a.k_scale) : 1.0f);
    cluster_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FEW_OURS));
    few_work<Format, SLICES>(room, a, FewItem::of<SLICES>(a), a.k_scale ? __ldg(a.k_scale) : 1.0f);
  }
}
