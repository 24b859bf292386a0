// Attention of many heads, whose outputs fill a warpgroup's registers. A warpgroup multiplies a tile's keys with the queries,
// another one says their probabilities, a third adds the tile's latents by them: each at a tile of its own, so that the matrix
// unit has work while exponentials are computed. Included by sparse_mla.cu, whose names it uses.
#pragma once

constexpr int SCORER = 0, ADDER = 1, WEIGHER = 2;  // warpgroups of a relay

// Besides tiles: products of one tile, and probabilities of two.
template <typename S>
struct Room<S, true> {
  __align__(1024) unsigned char q[BLOCKS][S::HEADS * 128];
  unsigned char p[2][S::HEADS * 128];
  // Of each thread eight heads, then in the same place what an item's end is told by.
  union {
    float4 products[S::HEADS / 8][128];
    struct {
      float most[4][S::HEADS];
      float4 total[S::HEADS];  // of four warps
      float top[S::HEADS];
      float weight[MOST_RELAYED][S::HEADS];  // of a cut row's parts
    };
    Shares<S> shares;
  };
  __align__(128) unsigned char keys[S::DEPTH][KEYS * S::Format::STRIDE];
  float factor[S::HEADS];
  float kept[2][S::HEADS];  // what outputs are multiplied by, where a reference was raised
  float share[S::HEADS];    // and at an item's end
  u64 full[S::DEPTH], empty[S::DEPTH], weighed[2], added[2], scored, taken, told, heard, summed, given;
  u32 raised[2];
  unsigned short live[S::DEPTH][4];  // which keys of a tile there are, a bit each

  // Where block `rank` of the cluster says a head's sum: between the rows of the tiles, or behind them.
  __device__ __forceinline__ float2* sum(int rank, int head) {
    constexpr int STRIDE = S::Format::STRIDE, BYTES = S::Format::BYTES, FIRST = STRIDE > BYTES ? BYTES : 0;
    int i = rank * S::HEADS + head;
    unsigned char* to = FIRST ? keys[0] + (i >> 1) * STRIDE + FIRST + (i & 1) * 8 : behind.sums + 8 * i;
    return reinterpret_cast<float2*>(to);
  }
  struct Nothing { unsigned char sums[1]; };
  struct Sums { __align__(16) unsigned char sums[MOST_RELAYED * S::HEADS * 8]; };
  typename Either<(S::Format::STRIDE > S::Format::BYTES), Nothing, Sums>::type behind;
};

// The latents of one block's share, and how many of them block `rank` has.
__device__ __forceinline__ int share_of_latents(int parts) { return (LATENT / 8 + parts - 1) / parts * 8; }
__device__ __forceinline__ int latents_of(int parts, int rank) {
  int each = share_of_latents(parts);
  return max(0, min(each, LATENT - rank * each));
}

template <typename S>
__device__ __forceinline__ void relay_init(Room<S>& room, int parts, int rank) {
  for (int i = 0; i < 2; ++i) barrier_init(&room.weighed[i], 4), barrier_init(&room.added[i], 4);
  barrier_init(&room.scored, 4), barrier_init(&room.taken, 4), barrier_init(&room.told, 4), barrier_init(&room.heard, 4);
  barrier_init(&room.summed, 1), barrier_init(&room.given, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  barrier_expect(&room.summed, parts * S::HEADS * sizeof(float2));
  barrier_expect(&room.given, parts * S::HEADS * latents_of(parts, rank) * 4);
}

// Lane 0 says that this warp has come here.
__device__ __forceinline__ void warp_arrives(u64* barrier) {
  __syncwarp();
  if (lane() == 0) barrier_arrive(barrier);
}

// A warpgroup meets; true if anything was true of one of its threads.
__device__ __forceinline__ bool meet_any(int group, bool any) {
  u32 found;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(found)
               : "r"(static_cast<u32>(any)), "r"(group + 1)
               : "memory");
  return found;
}

// Take an item's queries: at the start all three warpgroups, then those that have nothing else to do.
template <typename S>
__device__ __forceinline__ void take_first(Room<S>& room, const Attention& a, const Item<S>& item) {
  int size = a.q_fp8 ? 1 : 2, heads = min(S::HEADS, a.heads - item.first_head), line = 128 * lane();
  const char* q = static_cast<const char*>(a.q) + (item.row * a.q_row + item.first_head * a.q_head) * size;
#pragma unroll 1
  for (int h = warp(); h < heads; h += S::WORKERS / 32)
    if (line < WIDTH * size) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + h * a.q_head * size + line));
  take_queries<S, S::WORKERS / 32>(room, a, item.row, item.first_head, warp());
  publish();
  workers_meet<S>();
}
template <typename S>
__device__ __forceinline__ void take_next(Room<S>& room, const Attention& a, const Item<S>& item) {
  take_queries<S, 8>(room, a, item.row, item.first_head, warp() < 4 ? warp() : warp() - 4);
  publish();
  asm volatile("bar.sync 14, 256;" ::: "memory");
}

// Products of a tile's keys with the queries, in two chains: a matrix unit cuts each of its sums, and long ones lean to one
// side.
template <typename S>
__device__ __forceinline__ void score_tile(float (&s)[S::HEADS / 8][4], const unsigned char* tile, int key, Block q) {
  typename S::Format::Keys keys(tile, key);
  keys.read(0);
  constexpr int STEPS = 2, ROOMS = 2, LONG = (BLOCKS + 1) / 2;
  u32 a[ROOMS][STEPS][4];
  float more[S::HEADS / 8][4];
#pragma unroll
  for (int n = 0; n < BLOCKS * 4 / STEPS; ++n) {
    int block = n * STEPS / 4, first = n * STEPS % 4;
    if (first == 0 && block + 1 < BLOCKS) keys.read(block + 1);
    if (n >= ROOMS) tall_done<ROOMS - 1>();
    keys.take(a[n % ROOMS], block, first);
    tall_begin();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      tall<S::HEADS>(block < LONG ? s : more, a[n % ROOMS][i], block_plus(q, block * S::HEADS * 128), first + i,
                     block % LONG + first + i > 0);
    tall_commit();
  }
  tall_done<0>();
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] += more[j][i];
  }
}

// Of the first warpgroup: products of all tiles with the queries.
template <typename S>
__device__ __forceinline__ void score_items(Room<S>& room, const Attention& a, const Walk& walk) {
  int tile = 0, mine = threadIdx.x & 127, key = 16 * (warp() & 3) + S::Format::key_of(lane() >> 2);
  Block q = alike(block_at(memory));
#pragma unroll 1
  for (int at = walk.begin; at < walk.end; at += walk.step) {
    Item<S> item(a, at);
    if (at != walk.begin) take_next<S>(room, a, item);
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, ++tile) {
      float s[S::HEADS / 8][4];
      arrived<S>(room, tile);
      score_tile<S>(s, room.keys[tile % S::DEPTH], key, q);
      barrier_wait(&room.taken, tile & 1 ^ 1);
#pragma unroll
      for (int j = 0; j < S::HEADS / 8; ++j) room.products[j][mine] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
      warp_arrives(&room.scored);
    }
    if (a.clustered()) cluster_wait(), cluster_arrive();  // all have begun; this one reads tiles no more
  }
}

// By head of this thread: what products are multiplied by, the reference, and the sum of this thread's keys.
template <typename S>
struct Sums {
  float factor[S::PAIRS], base[S::PAIRS], total[S::PAIRS];
};

// Take the maxima of a tile's logits anew, and make `x` exponentials beside these; say what outputs keep.
template <typename S>
__device__ __forceinline__ void raise_sums(Sums<S>& sums, Room<S>& room, float (&x)[S::HEADS / 8][4], bool first, bool second,
                                           float* kept_of) {
  int g = lane() >> 2, t = lane() & 3, w = warp() & 3, mine = threadIdx.x & 127;
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
    float4 v = room.products[j][mine];
    float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] = (i < 2 ? first : second) ? s[i] * sums.factor[2 * j + (i & 1)] : -INFINITY;
  }
  meet(WEIGHER);  // products are read, and their place is free
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    float most = fmaxf(x[c / 2][c & 1], x[c / 2][2 + (c & 1)]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    if (g == 0) room.most[w][8 * (c / 2) + 2 * t + (c & 1)] = most;
  }
  meet(WEIGHER);
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1, head = 8 * j + 2 * t + e;
    float old = sums.base[c], base = old;
#pragma unroll
    for (int i = 0; i < 4; ++i) base = fmaxf(base, room.most[i][head]);
    float less = finite(base) ? base : 0.0f, kept = finite(base) ? exponential(old - base) : 1.0f;
    sums.base[c] = base, sums.total[c] *= kept;
    if (g == 0 && w == 0) kept_of[head] = kept;
    x[j][e] = exponential(x[j][e] - less), x[j][2 + e] = exponential(x[j][2 + e] - less);
  }
}

// Write this warp's probabilities of rows g and g + 8, which are neighbours in the contraction of O.
template <typename S>
__device__ __forceinline__ void put_weights(unsigned char* p, const float (&x)[S::HEADS / 8][4], int column) {
  int t = lane() & 3;
#pragma unroll
  for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      *reinterpret_cast<__half2*>(p + place(8 * j + 2 * t + e, column)) = __floats2half2_rn(x[j][e], x[j][2 + e]);
  }
}

// Say the probabilities of tile `tile`, the first of an item or not.
template <typename S>
__device__ __forceinline__ void weigh(Sums<S>& sums, Room<S>& room, int tile, bool fresh) {
  int g = lane() >> 2, w = warp() & 3, slot = tile & 1, mine = threadIdx.x & 127;
  barrier_wait(&room.scored, slot);
  u32 live = room.live[tile % S::DEPTH][w];
  bool first = live >> S::Format::key_of(g) & 1, second = live >> S::Format::key_of(g) + 8 & 1, again = fresh;
  float x[S::HEADS / 8][4];
  if (!again) {
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
      float4 v = room.products[j][mine];
      float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int c = 2 * j + (i & 1);
        x[j][i] = fmaf(s[i], sums.factor[c], -sums.base[c]);
      }
    }
    if (live != 0xffff) {
#pragma unroll
      for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][i] = (i < 2 ? first : second) ? x[j][i] : -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < S::HEADS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = larger(most[i], x[j][i]), x[j][i] = exponential(x[j][i]);
    }
    again = meet_any(WEIGHER, !(larger(larger(most[0], most[1]), larger(most[2], most[3])) <= SLACK));
  }
  if (!again) warp_arrives(&room.taken);
  barrier_wait(&room.added[slot], tile >> 1 & 1 ^ 1);  // this place's last are read
  if (again) {
    raise_sums<S>(sums, room, x, first, second, room.kept[slot]);
    warp_arrives(&room.taken);
  }
  put_weights<S>(room.p[slot], x, 16 * w + 2 * g);
  if (mine == 0) room.raised[slot] = again && !fresh;
  publish();
  warp_arrives(&room.weighed[slot]);
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) sums.total[c] += x[c / 2][c & 1] + x[c / 2][2 + (c & 1)];
}

// The reference and the sum of a head's keys of this block, as told.
template <typename S>
__device__ __forceinline__ float2 own_sum(const Room<S>& room, int head) {
  float4 four = room.total[head];
  return make_float2(room.top[head], four.x + four.y + (four.z + four.w));
}

// The same of all parts, once they have come.
template <typename S>
__device__ __forceinline__ float2 row_sum(Room<S>& room, int parts, int head) {
  float2 sum = make_float2(-INFINITY, 0.0f);
  for (int i = 0; i < parts; ++i) sum.x = fmaxf(sum.x, room.sum(i, head)->x);
  for (int i = 0; i < parts; ++i) {
    float2 one = *room.sum(i, head);
    sum.y += one.y * exponential(one.x - subtrahend(sum.x));
  }
  return sum;
}

// Send this block's sums to all blocks of its cluster, and wait for theirs.
template <typename S>
__device__ __forceinline__ void exchange_sums(Room<S>& room, int parts, int rank) {
  cluster_wait();  // all have begun
  for (int i = threadIdx.x & 127; i < parts * S::HEADS; i += 128) {
    float2 sum = own_sum<S>(room, i % S::HEADS);
    send(reinterpret_cast<u64*>(room.sum(rank, i % S::HEADS)), i / S::HEADS, *reinterpret_cast<u64*>(&sum), &room.summed);
  }
  barrier_wait(&room.summed, 0);
}

// Of an item's end: write its LSE, and tell what this part's outputs are multiplied by.
template <typename S>
__device__ __forceinline__ void tell_shares(Sums<S>& sums, Room<S>& room, const Attention& a, const Item<S>& item, int number) {
  int g = lane() >> 2, t = lane() & 3, w = warp() & 3, mine = threadIdx.x & 127, rank = item.part;
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int head = 8 * (c / 2) + 2 * t + (c & 1);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums.total[c] += __shfl_xor_sync(EVERY, sums.total[c], step);
    if (g == 0) reinterpret_cast<float*>(&room.total[head])[w] = sums.total[c];
    if (g == 0 && w == 0) room.top[head] = sums.base[c];
  }
  meet(WEIGHER);
  if (a.partials) {
    if (mine < S::HEADS) Partials<S>(a, item).sums(rank)[mine] = own_sum<S>(room, mine);
    return;
  }
  if (a.parts > 1) exchange_sums<S>(room, a.parts, rank);
  barrier_wait(&room.heard, number & 1 ^ 1);
  if (mine < S::HEADS) {
    int head = item.first_head + mine;
    float2 sum = a.parts > 1 ? row_sum<S>(room, a.parts, mine) : own_sum<S>(room, mine);
    float share = share_of<S>(a, sum);
    room.share[mine] = share;
    if (a.parts > 1)
      for (int i = 0; i < a.parts; ++i)
        room.weight[i][mine] = exponential(room.sum(i, mine)->x - subtrahend(sum.x)) * share;
    if (rank == 0 && head < a.heads && a.returns_lse) a.lse[item.row * a.lse_row + head] = lse_of(sum);
  }
  warp_arrives(&room.told);
  if (a.parts > 1) cluster_arrive();  // sums are read, which outputs may overwrite
}

// Of the third warpgroup: probabilities of all items.
template <typename S>
__device__ __forceinline__ void weigh_items(Room<S>& room, const Attention& a, const Walk& walk) {
  int tile = 0, number = 0;
#pragma unroll 1
  for (int at = walk.begin; at < walk.end; at += walk.step, ++number) {
    Item<S> item(a, at);
    if (number) take_next<S>(room, a, item);
    Sums<S> sums;
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) {
      sums.base[c] = -INFINITY, sums.total[c] = 0.0f;
      sums.factor[c] = room.factor[8 * (c / 2) + 2 * (lane() & 3) + (c & 1)];
    }
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, ++tile) weigh<S>(sums, room, tile, i == 0);
    tell_shares<S>(sums, room, a, item, number);
  }
}

// Add tile `tile`'s latents by its probabilities.
template <typename S>
__device__ __forceinline__ void add_tile(Part<S>& part, Room<S>& room, int tile) {
  int chunk = 8 * (warp() & 3) + (lane() >> 2), t = lane() & 3, slot = tile & 1;
  const unsigned char* keys = room.keys[tile % S::DEPTH];
  arrived<S>(room, tile);
  u32 a[4][4];
  typename S::Format::template Values<8> values[2];  // of sixteen keys, a quarter of a warp's latents
  values[0].read(keys, 0, chunk);
  barrier_wait(&room.weighed[slot], tile >> 1 & 1);
  if (room.raised[slot]) {
#pragma unroll
    for (int c = 0; c < S::PAIRS; ++c) scale<S>(part, c, room.kept[slot][8 * (c / 2) + 2 * t + (c & 1)]);
  }
  Block pt = alike(block_at(room.p[slot]));
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    int at = n >> 1, first = 2 * (n & 1);
    if (first == 0 && at < 7) values[at + 1 & 1].read(keys, 16 * (at + 1 >> 1), chunk + 32 * (at + 1 & 1));
    if (n > 1) tall_done<1>();
#pragma unroll
    for (int i = 0; i < 2; ++i) values[at & 1].take(a[2 * (n & 1) + i], first + i);
    tall_begin();
#pragma unroll
    for (int i = 0; i < 2; ++i) tall<S::HEADS>(part.o[4 * (at & 1) + first + i], a[2 * (n & 1) + i], pt, at >> 1, true);
    tall_commit();
  }
  warp_arrives(&room.empty[tile % S::DEPTH]);
  tall_done<0>();
  warp_arrives(&room.added[slot]);
}

__device__ __forceinline__ void send_four(u32 at, float4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

// Send eight latents of each of this thread's heads, those of `o[FROM]` on, to the block whose share they are in.
template <typename S, int FROM>
__device__ __forceinline__ void send_outputs(const Part<S>& part, Room<S>& room, int parts, int rank, int latent) {
  int each = share_of_latents(parts), to = latent / each, size = latents_of(parts, to);
  float* outputs = reinterpret_cast<float*>(room.keys);
  u32 base = mapped(outputs + (rank * S::HEADS + 2 * (lane() & 3)) * size + latent - to * each, to);
  u32 barrier = mapped(&room.given, to);
#pragma unroll
  for (int c = 0; c < S::PAIRS; ++c) {
    int j = c / 2, e = c & 1;
    u32 at = base + (8 * j + e) * size * 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const auto &low = part.o[FROM + i][j], &high = part.o[FROM + i + 1][j];
      send_four(at + 8 * i, make_float4(low[e], low[2 + e], high[e], high[2 + e]), barrier);
    }
  }
}

// Add what all blocks sent to this one, in their order, and write it: four latents a thread.
template <typename S>
__device__ __forceinline__ void add_sent(Room<S>& room, const Attention& a, const Item<S>& item, int rank) {
  int size = latents_of(a.parts, rank), first = rank * share_of_latents(a.parts);
  int heads = min(S::HEADS, a.heads - item.first_head);
  const float* outputs = reinterpret_cast<const float*>(room.keys);
  bool wide = !((reinterpret_cast<u64>(a.out) | a.out_row * 2 | a.out_head * 2) & 7);
  barrier_wait(&room.told, 0), barrier_wait(&room.given, 0);
#pragma unroll 1
  for (int head = warp(); head < heads; head += S::WORKERS / 32) {
#pragma unroll 1
    for (int here = 4 * lane(); here < size; here += 128) {
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int i = 0; i < a.parts; ++i) {
        float4 v = *reinterpret_cast<const float4*>(outputs + (i * S::HEADS + head) * size + here);
        float weight = room.weight[i][head];
        o.x += v.x * weight, o.y += v.y * weight, o.z += v.z * weight, o.w += v.w * weight;
      }
      __nv_bfloat16* to = a.out + item.row * a.out_row + (item.first_head + head) * a.out_head + first + here;
      __align__(8) __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(o.x, o.y), __floats2bfloat162_rn(o.z, o.w)};
      if (wide)
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(pairs);
      else
        to[0] = pairs[0].x, to[1] = pairs[0].y, to[2] = pairs[1].x, to[3] = pairs[1].y;
    }
  }
}

// Of the second warpgroup: outputs of all items.
template <typename S>
__device__ __forceinline__ void add_items(Room<S>& room, const Attention& a, const Walk& walk) {
  int t = lane() & 3, latent = 8 * (8 * (warp() & 3) + (lane() >> 2)), tile = 0, number = 0;
#pragma unroll 1
  for (int at = walk.begin; at < walk.end; at += walk.step, ++number) {
    Item<S> item(a, at);
    Part<S> mine;
#pragma unroll
    for (int i = 0; i < S::TALL; ++i) {
#pragma unroll
      for (int j = 0; j < S::HEADS / 8; ++j) mine.o[i][j][0] = mine.o[i][j][1] = mine.o[i][j][2] = mine.o[i][j][3] = 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, ++tile) add_tile<S>(mine, room, tile);
    if (a.parts == 1) {
      barrier_wait(&room.told, number & 1);
#pragma unroll
      for (int c = 0; c < S::PAIRS; ++c) scale<S>(mine, c, room.share[8 * (c / 2) + 2 * t + (c & 1)]);
      warp_arrives(&room.heard);
      write<S, 0>(mine, a, item, latent);
      write<S, 4>(mine, a, item, 256 + latent);
    } else if (a.partials) {
      leave_outputs<S>(mine, Partials<S>(a, item), item.part, a.heads - item.first_head);
    } else {
      cluster_wait(), cluster_arrive(), cluster_wait();  // all have begun; no block reads tiles any more
      send_outputs<S, 0>(mine, room, a.parts, item.part, latent);
      send_outputs<S, 4>(mine, room, a.parts, item.part, 256 + latent);
    }
  }
}

// Of all who compute: this block's part is in memory. If that was the last one of its item, add all and write the outputs.
template <typename S>
__device__ __forceinline__ void add_relayed(Room<S>& room, const Attention& a, const Item<S>& item) {
  Partials<S> partials(a, item);
  workers_meet<S>();
  if (threadIdx.x == 0) room.raised[0] = arrives_last(a, item.number, 0, 1);
  workers_meet<S>();
  if (!room.raised[0]) return;
  if (threadIdx.x < S::HEADS) {
    float2 one[MOST_PARTIALS];
    read_sums<S>(one, a, partials, threadIdx.x);
    share_partials<S>(room.shares, a, item, one, threadIdx.x, true);
  }
  workers_meet<S>();
  Units<S> units;
  add_partials<S, false>(units, room.shares, a, item, partials, Part<S>(), warp() >> 2, S::GROUPS);
}

// Compute all tiles.
template <typename S>
__device__ __forceinline__ void relay_work(Room<S>& room, const Attention& a, const Walk& walk) {
  Item<S> item(a, walk.begin);
  int group = warp() >> 2;
  take_first<S>(room, a, item);
  if (group == SCORER) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::SCORING));
    score_items<S>(room, a, walk);
  } else if (group == ADDER) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::ADDING));
    add_items<S>(room, a, walk);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::WEIGHING));
    weigh_items<S>(room, a, walk);
  }
  if (a.clustered())
    add_sent<S>(room, a, item, item.part);
  else if (a.partials)
    add_relayed<S>(room, a, item);
}
