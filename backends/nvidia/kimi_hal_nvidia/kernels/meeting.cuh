// Parts of a row that meet in memory: each leaves its outputs, references and sums there, and who leaves the last one adds
// them all, in their order. Nobody waits for anybody, so that parts may be dealt to any number of blocks, and a block with
// several parts of a row leaves them for itself. What is added, and how, is what a cluster's blocks add of as many parts:
// the bits are the same. Not of blocks of one warpgroup. Included by sparse_mla.cu, whose names it uses.
#pragma once

// An item's parts in memory.
template <typename S>
struct Partials {
  static constexpr int BYTES = S::HEADS * (LATENT * 4 + 64), FOURS = BYTES / 16, SUMS = S::HEADS * LATENT * 4;
  static constexpr int THREADS = S::RELAYED ? 128 : S::WORKERS;  // that have outputs
  static constexpr int EACH = S::HEADS * LATENT / 4 / THREADS;   // fours of a thread
  unsigned char* parts;

  __device__ __forceinline__ Partials(const Attention& a, const Item<S>& item)
      : parts(a.partials + static_cast<long long>(item.number) * a.parts * BYTES) {}
  // This thread's first four outputs; the next ones are THREADS on.
  __device__ __forceinline__ float4* outputs(int part) const {
    return reinterpret_cast<float4*>(parts + part * BYTES) + (S::RELAYED ? threadIdx.x & 127 : threadIdx.x);
  }
  // References and sums by head: those of a relay's block, else this warp's own copy.
  __device__ __forceinline__ float2* sums(int part) const {
    return reinterpret_cast<float2*>(parts + part * BYTES + SUMS) + (S::RELAYED ? 0 : warp() * S::HEADS);
  }
};

// Which of this thread's heads its `r`-th four neighbouring latents are of.
template <typename S>
__device__ __forceinline__ constexpr int pair_of_four(int r) { return r / (Partials<S>::EACH / S::PAIRS); }
template <typename S>
__device__ __forceinline__ int head_of(int c) { return 8 * (c / 2) + 2 * (lane() & 3) + (c & 1); }

// Those latents.
template <typename S>
__device__ __forceinline__ float4 four_of(const Part<S>& part, int r) {
  int c = pair_of_four<S>(r), q = r % (Partials<S>::EACH / S::PAIRS), j = c / 2, e = c & 1;
  if constexpr (S::KEPT)
    return make_float4(part.o[0][j][2 * q + e], part.o[1][j][2 * q + e], part.o[2][j][2 * q + e], part.o[3][j][2 * q + e]);
  const auto &low = part.o[2 * q][j], &high = part.o[2 * q + 1][j];
  return make_float4(low[e], low[2 + e], high[e], high[2 + e]);
}

// Leave this thread's outputs of heads that there are.
template <typename S>
__device__ __forceinline__ void leave_outputs(const Part<S>& part, const Partials<S>& partials, int number, int heads) {
  float4* to = partials.outputs(number);
#pragma unroll
  for (int r = 0; r < Partials<S>::EACH; ++r)
    if (head_of<S>(pair_of_four<S>(r)) < heads) __stcg(to + r * Partials<S>::THREADS, four_of<S>(part, r));
}

// Of one thread, behind what is to be seen: `count` more parts of an item are left by warp `who`. True if none is missing;
// then all of them can be read, and the word is as before the launch.
__device__ __forceinline__ bool arrives_last(const Attention& a, int item, int who, int count) {
  u64 *word = a.arrived + item, had;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(had)
               : "l"(word), "l"(static_cast<u64>(count) << 8 * who)
               : "memory");
  bool last = static_cast<int>(had >> 8 * who & 255) + count == a.parts;
  if (last) atomicAdd(word, 0 - (static_cast<u64>(a.parts) << 8 * who));
  return last;
}

// What the parts of an item are multiplied by, head by head, and their sum: of a relay the one includes the other. Parts that
// there are not are zeros times -0: adding that changes nothing, not even a zero's sign.
template <typename S>
struct Shares {
  float weight[MOST_PARTIALS][S::HEADS], share[S::HEADS];
};

// Of one thread, for a head.
template <typename S>
__device__ __forceinline__ void share_partials(Shares<S>& shares, const Attention& a, const Item<S>& item, const Partials<S>& partials, int mine,
                                           bool says_lse) {
  float2 sum = make_float2(-INFINITY, 0.0f), one[MOST_PARTIALS];
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i) one[i] = i < a.parts ? __ldcg(partials.sums(i) + mine) : sum;
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i) sum.x = fmaxf(sum.x, one[i].x);
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i)
    if (i < a.parts) sum.y += one[i].y * exponential(one[i].x - subtrahend(sum.x));
  float share = share_of<S>(a, sum);
  shares.share[mine] = share;
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i)
    shares.weight[i][mine] = i < a.parts ? exponential(one[i].x - subtrahend(sum.x)) * (S::RELAYED ? share : 1.0f) : -0.0f;
  int head = item.first_head + mine;
  if (says_lse && head < a.heads && a.returns_lse) a.lse[item.row * a.lse_row + head] = lse_of(sum);
}

// Where the latents of two fours, one behind the other, begin.
template <typename S>
__device__ __forceinline__ int latent_of(int unit) {
  int w = warp() & 3, chunk = 8 * w + (lane() >> 2), group = warp() >> 2;
  if constexpr (S::RELAYED) return 8 * chunk + 256 * (unit & 1);
  if constexpr (S::KEPT) return four_at<S>(4 * group);
  return 16 * chunk + 8 * group;
}

// Write two fours of a head.
template <typename S>
__device__ __forceinline__ void write_added(const Attention& a, const Item<S>& item, const float (&o)[2][4], int head, float share,
                                           int latent) {
  constexpr int BEHIND = S::KEPT ? 8 : 4;  // latents from one four to the next
  __nv_bfloat16* to = a.out + item.row * a.out_row + (item.first_head + head) * a.out_head + latent;
  bool wide = !((reinterpret_cast<u64>(a.out) | a.out_row * 2 | a.out_head * 2) & (S::KEPT ? 7 : 15));
  __align__(16) __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(o[i / 2][2 * (i & 1)] * share, o[i / 2][2 * (i & 1) + 1] * share);
  if (wide && !S::KEPT) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4*>(pairs);
  } else if (wide) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(pairs);
    *reinterpret_cast<uint2*>(to + BEHIND) = *reinterpret_cast<uint2*>(pairs + 2);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2 * BEHIND + 2 * (i & 1)] = pairs[i].x, to[i / 2 * BEHIND + 2 * (i & 1) + 1] = pairs[i].y;
  }
}

// Add all parts of an item's outputs, in their order, and write them: two fours of a head are a unit, `first` and every
// `step`-th; some units and parts are on their way together.
template <typename S>
__device__ __forceinline__ void add_partials(const Shares<S>& shares, const Attention& a, const Item<S>& item, const Partials<S>& partials,
                                         int first, int step) {
  constexpr int AT_ONCE = S::HEADS == 32 ? MOST_PARTIALS : 4, TOGETHER = 2;  // parts and units
  constexpr int OF_HEAD = Partials<S>::EACH / S::PAIRS / 2, UNITS = Partials<S>::EACH / 2;
  static_assert(UNITS % (TOGETHER * (S::RELAYED ? S::GROUPS : 1)) == 0 && MOST_PARTIALS % AT_ONCE == 0, "no unit is left over");
  int heads = min(S::HEADS, a.heads - item.first_head);
#pragma unroll 1
  for (int unit = first; unit < UNITS; unit += TOGETHER * step) {
    float o[TOGETHER][2][4] = {};
#pragma unroll 1
    for (int i = 0; i < a.parts; i += AT_ONCE) {
      float4 v[AT_ONCE][TOGETHER][2];
#pragma unroll
      for (int b = 0; b < AT_ONCE; ++b) {
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
          int mine = unit + u * step;
          const float4* from = partials.outputs(0) + (i + b) * Partials<S>::FOURS + 2 * mine * Partials<S>::THREADS;
          bool there = i + b < a.parts && head_of<S>(mine / OF_HEAD) < heads;
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            v[b][u][q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (there) v[b][u][q] = __ldcg(from + q * Partials<S>::THREADS);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < AT_ONCE; ++b) {
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
          float weight = shares.weight[i + b][head_of<S>((unit + u * step) / OF_HEAD)];
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            o[u][q][0] += v[b][u][q].x * weight, o[u][q][1] += v[b][u][q].y * weight;
            o[u][q][2] += v[b][u][q].z * weight, o[u][q][3] += v[b][u][q].w * weight;
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) {
      int mine = unit + u * step, head = head_of<S>(mine / OF_HEAD);
      if (head < heads) write_added<S>(a, item, o[u], head, S::RELAYED ? 1.0f : shares.share[head], latent_of<S>(mine));
    }
  }
}

// Leave this part of an item; behind the last one write the item's outputs. A warp has the same outputs of every part, and
// minds no other.
template <typename S>
__device__ __forceinline__ void leave_item(Part<S>& part, Room<S>& room, const Attention& a, const Item<S>& item) {
  Partials<S> partials(a, item);
  Walk walk(a);
  // The item's parts that are this block's.
  int begin = max(0, walk.begin - item.number * a.parts), end = min(a.parts, walk.end - item.number * a.parts);
  if constexpr (S::KEPT) turn_four<S, 0>(part);
  if (lane() < S::HEADS) __stcg(partials.sums(item.part) + lane(), block_sum<S>(room, lane()));
  leave_outputs<S>(part, partials, item.part, a.heads - item.first_head);
  __syncwarp();
  if (item.part + 1 < end) return;
  if (end - begin < a.parts) {
    bool last = lane() == 0 && arrives_last(a, item.number, warp(), end - begin);
    last = __shfl_sync(EVERY, last, 0);
    __syncwarp();
    if (!last) return;
  }
  static_assert(sizeof(room.p) >= S::WORKERS / 32 * sizeof(Shares<S>), "nobody reads weights any more");
  Shares<S>& shares = reinterpret_cast<Shares<S>*>(room.p)[warp()];
  if (lane() < S::HEADS) share_partials<S>(shares, a, item, partials, lane(), warp() == 0);
  __syncwarp();
  add_partials<S>(shares, a, item, partials, 0, 1);
}
