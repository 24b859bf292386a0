// Attention of few rows: a block has 128 keys of a row or fewer, sixteen heads, and a slice of the latents.
//
// What a kernel runs once costs as much as its instructions and its turns: 2.5 ns an instruction that is nowhere near yet. So
// what can be a loop is one. Half of the warps take queries and compute. The others ask for keys, and go once through how parts are
// added while they have nothing to do, so that its code is there when the parts are. Blocks of a cluster have a row's parts
// and meet once, where nobody waits for more than the numbers that it adds. Where clusters are free, each has a slice of
// the latents: it scores all keys, and keeps and adds only what the slice needs.
#pragma once
#include <cstddef>

constexpr int FEW_WARPS = 8, FEW_WORKERS = 32 * FEW_WARPS;  // a warp has sixteen keys
constexpr int FEW_THREADS = 2 * FEW_WORKERS;  // the second half of them ask for keys, and add parts
constexpr int FEW_OURS = 168, FEW_OTHERS = 88;  // registers of a thread that computes, and of another
constexpr int READY = 1, WORKERS_MEET = 2, OTHERS_MEET = 3, SUMMED = 4;  // barriers of the block

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
  u64 full[2], summed, given;
  u32 live[FEW_WARPS];  // which keys of a warp's sixteen there are
};
// Afterwards the keys' place takes outputs: by part, latent of this block's share and place of a head.

template <int BARRIER>
__device__ __forceinline__ void half_meets() { asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(FEW_WORKERS) : "memory"); }
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

// Four matrices of eight rows of 16 bytes in shared memory, turned where TURNED.
template <bool TURNED>
__device__ __forceinline__ void read_matrices(u32 (&m)[4], u32 at) {
  if constexpr (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// d[16 x 16] += a[16 x 16] · b[16 x 16], of this warp alone: nothing has to be seen by the matrix unit of a warpgroup.
__device__ __forceinline__ void small_product(float (&d)[2][4], const u32 (&a)[4], const u32 (&b)[4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * j]), "r"(b[2 * j + 1]));
}

// Add 128 keys' latents of COUNT blocks, this warp's sixteen of each, by their probabilities.
template <int COUNT>
__device__ __forceinline__ void few_outputs(float (&o)[COUNT][2][4], u32 kept, u32 between, u32 p) {
  u32 row = (lane() & 7) + (lane() >> 4) * 8, half = lane() >> 3 & 1;
  u32 values = kept + place(row, 8 * (2 * (warp() & 3) + half)), head = p + row * 128, chunk = half ^ row & 7;
#pragma unroll 1
  for (int k = 0; k < 2; ++k, values += between, head += 2048) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 b[4];
      read_matrices<false>(b, head + ((chunk ^ 2 * step) << 4));
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        u32 a[4];
        read_matrices<true>(a, values + (i * KEYS + 16 * step) * 128);
        small_product(o[i], a, b);
      }
    }
  }
}

// Products of this warp's sixteen keys with the queries. Blocks from `first` on, for COUNT of which there is room, are kept as they
// are decoded. Chains of sums are two: a matrix unit cuts each of its sums, and long chains lean to one side.
template <int COUNT, typename Laid>
__device__ __forceinline__ void few_scores(float (&s)[2][4], Laid keys, Block q, u32 kept, int first) {
  float more[2][4] = {};
  u32 a[2][4][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = 0.0f;
  Block at = alike(q);
  auto take = [&](int which, int block) {
    tall_done<1>();  // the operand that was where this block's comes is read no more
    keys.take(a[which], which, block);
    tall_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) tall<16>(i & 1 ? more : s, a[which][i], block_plus(at, which * 2048), i, true);
    tall_commit();
  };
#pragma unroll 1
  for (int block = 0; block < BLOCKS - 1; block += 2, at = block_plus(at, 2 * 2048)) {
    take(0, block), take(1, block + 1);
    if (static_cast<u32>(block - first) < COUNT) {
#pragma unroll
      for (int i = 0; i < 8; ++i) keep_step((kept ^ 32 * (i & 3)) + (block - first + (i >> 2)) * KEYS * 128, a[i >> 2][i & 3]);
    }
  }
  take(0, BLOCKS - 1);
  tall_done<0>();
  settled(s), settled(more);
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += more[i / 4][i % 4];
}

// Which cluster this block is of, and which of its blocks.
struct FewItem {
  long long row;
  int first_head, slice, rank;
  template <int SLICES>
  static __device__ __forceinline__ FewItem of(const Attention& a) {
    u32 unit = a.cuts.quotient(blockIdx.x), rank = blockIdx.x - unit * a.cuts.by;
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

// Ask for the keys, half of a warp's lanes for one each; one that is not there becomes zeros. What a row has beside its indices
// is asked for before whoever writes those is waited for.
template <typename Format, typename Room>
__device__ __forceinline__ void few_fetch(Room& room, const Attention& a, const FewItem& item) {
  int w = warp() - FEW_WARPS, key = 16 * w + lane(), all = a.each * KEYS, at = item.rank * all + key, length = a.width, request = 0;
  int index = -1;
  bool tabled = a.space != SLOT, works = lane() < 16;
  if (a.index_len) length = read_now(a.index_len + item.row * a.len_stride);
  if (tabled) request = read_now(a.row_req + item.row * a.req_stride);
  wait_for_leader();
  if (works && key < all && at < a.width) index = read_now(a.indices + item.row * a.index_row + at);
  if (threadIdx.x == FEW_WORKERS) barrier_init(&room.full[0], FEW_WARPS / 2), barrier_init(&room.full[1], FEW_WARPS / 2);
  half_meets<OTHERS_MEET>();
  say_ready();
  bool asks = !tabled || known(a, request);
  if (!asks || at >= length) index = -1;
  const unsigned char* from = located<Format>(a, a.table + (tabled && asks ? request * a.table_row : 0), index);
  unsigned char* to = room.keys + key * Format::APART;
  u32 live = __ballot_sync(EVERY, from != nullptr);
  if (from) copy_bulk(to, from, Format::BYTES, &room.full[w >> 2]);
  if (live != 0xffff) {
    if (works && !from) {
#pragma unroll 1
      for (int i = 0; i < Format::BYTES; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }
  if (lane() == 0) room.live[w] = live, barrier_expect(&room.full[w >> 2], __popc(live) * Format::BYTES);
}

// Put queries into shared memory: a warp asks for all of its heads' at once, and takes one after the other.
template <typename Format, typename Room>
__device__ __forceinline__ void few_queries(Room& room, const Attention& a, const FewItem& item, float unit) {
  constexpr int EACH = 16 / FEW_WARPS;
  int mine = warp(), heads = min(16, a.heads - item.first_head);
  long long from = item.row * a.q_row + item.first_head * a.q_head + 2 * lane();
  u32 codes[EACH][BLOCKS];
  bool plain = !a.q_fp8 && !((reinterpret_cast<u64>(a.q) | a.q_row * 2 | a.q_head * 2) & 3);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {  // without a branch, so that they are asked for before any other code is fetched
    const unsigned short* at = static_cast<const unsigned short*>(a.q) + from + min(mine + FEW_WARPS * i, heads - 1) * a.q_head;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n)
      asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
                   : "=r"(codes[i][n])
                   : "l"(at + 64 * n), "r"(static_cast<int>(plain)));
  }
  if (!plain) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) read_query(codes[i], a, from + min(mine + FEW_WARPS * i, heads - 1) * a.q_head);
  }
  if (a.space != SLOT) {  // of the block table as much as a line for each thread, which keys are looked up in
    int request = __ldg(a.row_req + item.row * a.req_stride), first = 32 * threadIdx.x;
    if (known(a, request) && first < a.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.table + request * a.table_row + first));
  }
  unit *= a.softmax_scale * (a.q_scale ? __ldg(a.q_scale) : 1.0f);
#pragma unroll 1
  for (int h = mine; h < 16; h += FEW_WARPS) {
    u32 pairs[BLOCKS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      pairs[n] = h < heads ? codes[0][n] : 0;
#pragma unroll
      for (int i = 1; i < EACH; ++i) codes[i - 1][n] = codes[i][n];
    }
    if (a.q_fp8) {
      asm volatile("");  // a branch and no predicates: else all of it is fetched
#pragma unroll
      for (int n = 0; n < BLOCKS; ++n) pairs[n] = pair_of(pairs[n], true);
    }
    put_query<Format>(room.q, reinterpret_cast<float*>(room.factor)[head_place(h)], pairs, h, unit, lane());
  }
  publish();
}

// Leave this warp's sums, and the block's references.
template <typename Room>
__device__ __forceinline__ void leave_sums(Room& room, float4 base, float4 total) {
  if (threadIdx.x < 4) room.base[threadIdx.x] = base;
#pragma unroll
  for (int c = 0; c < 4; ++c) number(total, c) = over_keys(number(total, c), [](float one, float other) { return one + other; });
  if (lane() < 4) room.total[warp()][lane()] = total;
}

// Give this block's references and sums to every block of the cluster: a thread those of a head's place to one of them.
template <typename Room>
__device__ __forceinline__ void give_sums(Room& room, int rank, int parts) {
  int head = threadIdx.x & 15, to = (threadIdx.x & FEW_WORKERS - 1) >> 4;
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
  int place = threadIdx.x - FEW_WORKERS >> 4, mine = threadIdx.x & 15, head = head_at(place);
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
__device__ __forceinline__ void add_parts(const Room& room, const Attention& a, const FewItem& item, int first, int each, bool writes) {
  int mine = threadIdx.x & 15, head = item.first_head + head_at(mine);
  __nv_bfloat16* to = a.out + item.row * a.out_row + head * a.out_head + first;
#pragma unroll 1
  for (int latent = threadIdx.x - FEW_WORKERS >> 4; latent < each; latent += FEW_WORKERS / 16) {
    const float *output = reinterpret_cast<const float*>(room.keys) + latent * 16 + mine, *weight = &room.weight[0][mine];
    float x = 0.0f;
#pragma unroll 4
    for (int i = 0; i < a.parts; ++i, output += each * 16, weight += 16) x += *output * *weight;
    if (writes && head < a.heads) to[latent] = __float2bfloat16_rn(x);
  }
}

// Latents of a slice that a block of the cluster adds, as a power of two.
template <int SLICES>
__device__ __forceinline__ int log_share(const Attention& a) { return 31 - __clz(LATENT / SLICES) - (31 - __clz(a.parts)); }

// Add the parts that the cluster's blocks give to this one. First whatever stands there, and nothing of it is written.
template <int SLICES, typename Room>
__device__ __forceinline__ void few_finish(Room& room, const Attention& a, const FewItem& item, float scale) {
  int each = 1 << log_share<SLICES>(a);
#pragma unroll 1
  for (int real = 0; real < 2; ++real) {
    if (real) {
      asm volatile("bar.sync %0, %1;" ::"n"(SUMMED), "n"(FEW_THREADS) : "memory");
      cluster_wait();
      give_sums(room, item.rank, a.parts);
      barrier_wait(&room.summed, 0);
    }
    weigh_parts(room, a, item, scale, real && item.rank == 0 && item.slice == 0);
    half_meets<OTHERS_MEET>();
    if (real) barrier_wait(&room.given, 0);
    add_parts(room, a, item, item.slice * (LATENT / SLICES) + item.rank * each, each, real);
  }
}

// What warps that compute do.
template <typename Format, int SLICES>
__device__ __forceinline__ void few_work(FewRoom<Format, SLICES>& room, const Attention& a, const FewItem& item) {
  using Room = FewRoom<Format, SLICES>;
  constexpr int OF_GROUP = LATENT / 64 / SLICES / 2;  // blocks of latents of a warpgroup
  int g = lane() >> 2, t = lane() & 3, w = warp(), group = w >> 2, rank = item.rank;
  int log_each = log_share<SLICES>(a), each = 1 << log_each;
  if (threadIdx.x == 0) {
    barrier_init(&room.summed, 1), barrier_init(&room.given, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(&room.summed, a.parts * 16 * 8), barrier_expect(&room.given, a.parts * 16 * each * 4);
  }
  typename Format::Laid laid(room.keys, 16 * w + g);
  few_queries<Format>(room, a, item, a.k_scale ? __ldg(a.k_scale) : 1.0f);
  wait_until_ready();
  float o[OF_GROUP][2][4] = {}, s[2][4];
  barrier_wait(&room.full[group], 0);
  laid.begin();
  u32 mine = shared_address(room.kept[group]) + place(16 * (w & 3) + (lane() & 15), lane() >> 4 << 3);
  few_scores<2 * OF_GROUP>(s, laid, block_at(room.q), mine, item.slice * 2 * OF_GROUP);
  u32 live = room.live[w];
  bool low = live >> g & 1, high = live >> g + 8 & 1;
  float4 factor = room.factor[t], most, total;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float &x = s[c / 2][c & 1], &y = s[c / 2][2 + (c & 1)];
    x = low ? x * number(factor, c) : -INFINITY, y = high ? y * number(factor, c) : -INFINITY;
    number(most, c) = over_keys(fmaxf(x, y), [](float one, float other) { return fmaxf(one, other); });
  }
  if (g == 0) room.most[w][t] = most;
  half_meets<WORKERS_MEET>();
  cluster_arrive();  // keys are read no more, and barriers are there
#pragma unroll
  for (int i = 0; i < FEW_WARPS; ++i) {
    float4 other = room.most[i][t];
    most = make_float4(fmaxf(most.x, other.x), fmaxf(most.y, other.y), fmaxf(most.z, other.z), fmaxf(most.w, other.w));
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float less = subtrahend(number(most, c)), &x = s[c / 2][c & 1], &y = s[c / 2][2 + (c & 1)];
    x = exponential(x - less), y = exponential(y - less);
    number(total, c) = x + y;
  }
  keep_in_order(room.p[group], s);
  leave_sums(room, most, total);
  asm volatile("bar.arrive %0, %1;" ::"n"(SUMMED), "n"(FEW_THREADS) : "memory");
  half_meets<WORKERS_MEET>();
  few_outputs<OF_GROUP>(o, shared_address(room.kept[0] + OF_GROUP * group * KEYS * 128), sizeof room.kept[0], shared_address(room.p[0]));
  cluster_wait();
#pragma unroll
  for (int i = 0; i < OF_GROUP; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      int latent = Format::latent(OF_GROUP * group + i, 16 * (w & 3) + g + 8 * n);
      u32 there = mapped(&room, latent >> log_each);
      give_four(there + offsetof(Room, keys) + (rank * each + (latent & each - 1)) * 64 + 16 * t, there + offsetof(Room, given),
                make_float4(o[i][0][2 * n], o[i][0][2 * n + 1], o[i][1][2 * n], o[i][1][2 * n + 1]));
    }
  }
}

// Parts are a power of two, 16 at most, of 128 keys at most.
template <typename Format, int SLICES>
__device__ __forceinline__ void attend_few(const Attention& a) {
  FewRoom<Format, SLICES>& room = *reinterpret_cast<FewRoom<Format, SLICES>*>(memory);
  if (threadIdx.x < FEW_WORKERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FEW_OURS));
    few_work<Format, SLICES>(room, a, FewItem::of<SLICES>(a));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_OTHERS));
    cluster_arrive();
    FewItem item = FewItem::of<SLICES>(a);
    few_fetch<Format>(room, a, item);
    few_finish<SLICES>(room, a, item, a.k_scale ? __ldg(a.k_scale) : 1.0f);
  }
}
