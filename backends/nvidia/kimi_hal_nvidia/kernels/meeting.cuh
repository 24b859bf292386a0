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
// then all of them can be read, and the word is as before the launch. Where all others are there already, nobody is told: what
// this warp left need not be seen by anybody else, which would take as long again.
__device__ __forceinline__ bool arrives_last(const Attention& a, int item, int who, int count) {
  u64 *word = a.arrived + item, had;
  auto others = [&] { return static_cast<int>(had >> 8 * who & 255); };
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(had) : "l"(word) : "memory");
  bool last = others() + count == a.parts;
  if (!last) {
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(had)
                 : "l"(word), "l"(static_cast<u64>(count) << 8 * who)
                 : "memory");
    if (others() + count != a.parts) return false;
    had += static_cast<u64>(count) << 8 * who;
  }
  atomicAdd(word, 0 - (static_cast<u64>(others()) << 8 * who));
  return true;
}

// What the parts of an item are multiplied by, head by head, and their sum: of a relay the one includes the other. Parts that
// there are not are zeros times -0: adding that changes nothing, not even a zero's sign.
template <typename S>
struct Shares {
  static constexpr int AT_ONCE = S::HEADS == 32 ? 5 : 4;  // parts that are added together
  static constexpr int ROWS = (MOST_PARTIALS + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  float weight[ROWS][S::HEADS], share[S::HEADS];
};

// References and sums of a head's parts.
template <typename S>
__device__ __forceinline__ void read_sums(float2 (&one)[MOST_PARTIALS], const Attention& a, const Partials<S>& partials, int mine) {
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i) {
    one[i] = make_float2(-INFINITY, 0.0f);
    if (i < a.parts) one[i] = __ldcg(partials.sums(i) + mine);
  }
}

// Of one thread, for a head.
template <typename S>
__device__ __forceinline__ void share_partials(Shares<S>& shares, const Attention& a, const Item<S>& item,
                                               const float2 (&one)[MOST_PARTIALS], int mine, bool says_lse) {
  float2 sum = make_float2(-INFINITY, 0.0f);
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i) sum.x = fmaxf(sum.x, one[i].x);
#pragma unroll
  for (int i = 0; i < MOST_PARTIALS; ++i)
    if (i < a.parts) sum.y += one[i].y * exponential(one[i].x - subtrahend(sum.x));
  float share = share_of<S>(a, sum);
  shares.share[mine] = share;
#pragma unroll
  for (int i = 0; i < Shares<S>::ROWS; ++i) {
    float reference = one[min(i, MOST_PARTIALS - 1)].x;
    shares.weight[i][mine] = i < a.parts ? exponential(reference - subtrahend(sum.x)) * (S::RELAYED ? share : 1.0f) : -0.0f;
  }
  int head = item.first_head + mine;
  if (says_lse && head < a.heads && a.returns_lse) a.lse[item.row * a.lse_row + head] = lse_of(sum);
}

// Where the latents of two fours, one behind the other, begin.
template <typename S>
__device__ __forceinline__ int latent_of_unit(int unit) {
  if constexpr (S::RELAYED) return 8 * (8 * (warp() & 3) + (lane() >> 2)) + 256 * (unit & 1);
  return latent_of<S>(warp() >> 2);
}

// Some units of some parts of an item, on their way together. A unit is two fours of a head.
template <typename S>
struct Units {
  static constexpr int AT_ONCE = Shares<S>::AT_ONCE, TOGETHER = S::RELAYED ? 2 : 4;  // parts and units
  static constexpr int OF_HEAD = Partials<S>::EACH / S::PAIRS / 2, COUNT = Partials<S>::EACH / 2;
  static_assert(COUNT % (TOGETHER * (S::RELAYED ? S::GROUPS : 1)) == 0, "no unit is left over");
  static constexpr bool OWN = !S::RELAYED && COUNT == TOGETHER;  // this block's last part is still in registers
  float4 v[AT_ONCE][TOGETHER][2];

  // Of parts from `part` on units `unit` and every `step`-th behind it.
  __device__ __forceinline__ void read(const Attention& a, const Item<S>& item, const Partials<S>& partials, const Part<S>& own, int part,
                                       int unit, int step) {
    int heads = min(S::HEADS, a.heads - item.first_head);
#pragma unroll
    for (int b = 0; b < AT_ONCE; ++b) {
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        int mine = unit + u * step;
        const float4* from = partials.outputs(0) + (part + b) * Partials<S>::FOURS + 2 * mine * Partials<S>::THREADS;
        bool here = OWN && part + b == item.part, there = !here && part + b < a.parts && head_of<S>(mine / OF_HEAD) < heads;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          v[b][u][q] = here ? four_of<S>(own, OWN ? 2 * (u % COUNT) + q : 0) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (there) v[b][u][q] = __ldcg(from + q * Partials<S>::THREADS);
        }
      }
    }
  }
};

// Add all parts of an item's outputs, in their order, and write them: units `first` and every `step`-th. The first are on their way
// where they were ASKED for.
template <typename S, bool ASKED>
__device__ __forceinline__ void add_partials(Units<S>& units, const Shares<S>& shares, const Attention& a, const Item<S>& item,
                                             const Partials<S>& partials, const Part<S>& own, int first, int step) {
  using U = Units<S>;
  int heads = min(S::HEADS, a.heads - item.first_head);
#pragma unroll 1
  for (int unit = first; unit < U::COUNT; unit += U::TOGETHER * step) {
    float o[U::TOGETHER][2][4] = {};
#pragma unroll 1
    for (int part = 0; part < a.parts; part += U::AT_ONCE) {
      if (!ASKED || unit != first || part != 0) units.read(a, item, partials, own, part, unit, step);
#pragma unroll
      for (int b = 0; b < U::AT_ONCE; ++b) {
#pragma unroll
        for (int u = 0; u < U::TOGETHER; ++u) {
          float weight = shares.weight[part + b][head_of<S>((unit + u * step) / U::OF_HEAD)];
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            float4 v = units.v[b][u][q];
            o[u][q][0] += v.x * weight, o[u][q][1] += v.y * weight, o[u][q][2] += v.z * weight, o[u][q][3] += v.w * weight;
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U::TOGETHER; ++u) {
      int mine = unit + u * step, head = head_of<S>(mine / U::OF_HEAD);
      if (head >= heads) continue;
      float share = S::RELAYED ? 1.0f : shares.share[head];
      __align__(16) __nv_bfloat162 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = __floats2bfloat162_rn(o[u][i / 2][2 * (i & 1)] * share, o[u][i / 2][2 * (i & 1) + 1] * share);
      write_fours<S>(a, a.out + item.row * a.out_row + (item.first_head + head) * a.out_head + latent_of_unit<S>(mine), pairs);
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
  if constexpr (S::KEPT) turn<S>(part);
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
  float2 one[MOST_PARTIALS];
  Units<S> units;
  if (lane() < S::HEADS) read_sums<S>(one, a, partials, lane());
  units.read(a, item, partials, part, 0, 0, 1);
  if (lane() < S::HEADS) share_partials<S>(shares, a, item, one, lane(), warp() == 0);
  __syncwarp();
  add_partials<S, true>(units, shares, a, item, partials, part, 0, 1);
}
