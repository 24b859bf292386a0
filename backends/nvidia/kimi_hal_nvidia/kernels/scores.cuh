// indexer_logits: S[t, j] = Σ_h w[t, h] · relu(q[t, h] · k_j), keys as the tall operand of a matrix product.
//
// All rows' keys are counted in pages, and every block takes an equal share of them, whoever has them. A producer warp
// copies pages into a ring; warpgroups take them in turn, put a page's 64 keys into the registers of the product, multiply
// them with the heads of one or more rows of a request, and add up what is rectified and weighed in float32.
//
// `Fp8` decodes keys to float16, which holds every element exactly: FP8 products are added with fewer bits than the contract
// asks for. `Fp4` multiplies groups of 32 numbers as e4m3, whose sums are exact even so. A score's bits depend on its row
// and its key alone.
#pragma once
#include "copies.cuh"
#include "elements.cuh"
#include "products.cuh"
#include "scoring.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define OWN_INSTRUCTIONS
#endif

template <typename Element, int N, int GROUPS, int STAGES>
struct Ring {
  static constexpr int PAGE_BYTES = PAGE * (Element::BYTES + 4);
  static constexpr int STAGE_BYTES = (PAGE_BYTES + 127) / 128 * 128;
  static constexpr bool FP4 = Element::BYTES == 64;
  unsigned char columns[GROUPS][N * Element::COLUMN];  // at whole 1,024 bytes
  unsigned char stage[STAGES][STAGE_BYTES];
  float weights[GROUPS][N];  // as `weight_place` says
  float4 scales[FP4 ? GROUPS * 4 : 1][FP4 ? 16 : 1];  // of the keys of each warp
  int keys[GROUPS][8];
  u64 full[STAGES], empty[STAGES];
  Unit unit[STAGES];
  u32 sums[2][32];
  int first_row, first_page;
};

// Twice the rectified number; NaN stays. The adder is faster than a comparison, and no product is infinite.
__device__ __forceinline__ float rectified_twice(float x) {
  return x + fabsf(x);
}

__device__ __forceinline__ float rectified(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Asks for a line of memory to be brought near.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Says of what is copied how long it should stay near: what is read once goes before what is written or read again.
__device__ __forceinline__ u64 stay(bool once) {
  u64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}

__device__ __forceinline__ void copy_page(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

template <typename Element, int N, int HEADS, int GROUPS, int STAGES>
struct Scorer {
  static constexpr bool FP4 = Element::BYTES == 64;
  static constexpr bool LARGE = N == 256 && !FP4;
  static constexpr int ROWS = N / HEADS, THREADS = GROUPS * 128 + 128;
  // Registers of a thread at the start, of those that copy, and of the others, which get what those give back.
  static constexpr int FEW = 40, EACH = 65536 / THREADS / 8 * 8, MOST = (EACH * THREADS - FEW * 128) / (GROUPS * 128) / 8 * 8;
  using Memory = Ring<Element, N, GROUPS, STAGES>;
  static constexpr bool HELD = N <= 64;  // weights stay in registers

  // Where a warpgroup is in the ring: its pages stand in slots that it alone has.
  struct Turn {
    int slot, left;  // the pages that are still to come
    u32 parity;

    __device__ __forceinline__ Turn(int group, int count)
        : slot(group), left(max(0, count - group + GROUPS - 1) / GROUPS), parity(0) {}
    __device__ __forceinline__ void go_on() {
      slot += GROUPS;
      left--;
      if (slot >= STAGES) {
        slot -= STAGES;
        parity ^= 1;
      }
    }
  };

  // A block of rows: its first column of scores, and a lane's keys of every second row.
  struct Rows {
    long long line;
    int first, keys[ROWS == 1 ? 1 : ROWS / 2];
  };

  const Scoring& p;
  Memory& m;

  // One block of rows of one request: its pages are dealt out in turn, and may be asked for before lengths are known.
  __device__ __forceinline__ bool solo() const { return p.requests == 1 && p.rows <= ROWS; }

  // The units of this block of threads, of any number of rows.
  __device__ __forceinline__ Share share_many() {
    int total = 0, now = 0, count = 0;
    u32 sum, turn = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
      u32 before = 0;
#pragma unroll 1
      for (int base = 0; base < p.rows; base += THREADS) {
        int request, row = base + threadIdx.x, keys = keys_of(p, said_of(p, row), request);
        int pages = pages_brought<ROWS>(keys, request);
        int begin = before + block_before<THREADS>(pages, m.sums[turn ^= 1], sum);
        before += sum;
        if (pass == 0 && p.rows <= THREADS) {  // one look is enough
          total = sum;
          divide(total, now, count);
        }
        if ((pass == 1 || p.rows <= THREADS) && count > 0 && begin <= now && now < begin + pages) {
          m.first_row = row;
          m.first_page = now - begin;
        }
      }
      if (p.rows <= THREADS) break;
      total = before;
      divide(total, now, count);
    }
    __syncthreads();
    return count ? Share{m.first_row, m.first_page, count} : Share{0, 0, 0};
  }

  // The same of up to 32 rows, by each warp for itself.
  __device__ __forceinline__ Share share_few() const {
    int request, keys = keys_of(p, said_of(p, lane()), request);
    return share_of(pages_brought<ROWS>(keys, request));
  }

  // Keeps the ring filled, some pages at a time, each by a lane of its own.
  __device__ __forceinline__ void produce(Share mine) {
    constexpr int TOGETHER = STAGES / 2 < 32 ? STAGES / 2 : 32, BEGIN = STAGES < 32 ? STAGES : 32;
    bool alone = solo(), few = p.rows <= 32;
    int step = alone ? gridDim.x : 1, early = -1, request;
    u64 policy = stay(p.rows <= p.requests * ROWS);
    if (alone) {  // before anything is known
      int at = blockIdx.x + lane() * step;
      if (at < pages_in(p.room)) early = p.table[at];
    }
    int base = few ? 0 : mine.row / 32 * 32, keys = keys_of(p, said_of(p, base + lane()), request);
    int pages = pages_brought<ROWS>(keys, request);
    if (alone) {
      int all = __reduce_max_sync(EVERY, pages);
      mine = Share{0, static_cast<int>(blockIdx.x), dealt(all)};
    } else if (few) {
      mine = share_of(pages);
    }
    u32 waiting = __ballot_sync(EVERY, pages > 0) & EVERY << mine.row % 32;
    int done = 0, from = mine.first;
#pragma unroll 1
    while (done < mine.count) {
#pragma unroll 1
      while (!waiting) {
        base += 32;
        keys = keys_of(p, said_of(p, base + lane()), request);
        pages = pages_brought<ROWS>(keys, request);
        waiting = __ballot_sync(EVERY, pages > 0);
      }
      int at = __ffs(waiting) - 1, row = alone ? 0 : base + at, left = mine.count - done;
      waiting &= waiting - 1;
      int some = alone ? left : min(__shfl_sync(EVERY, pages, at) - from, left);
      const int* table = p.table + __shfl_sync(EVERY, request, at) * p.table_row + from;
      int i = 0, batch = done == 0 ? BEGIN : TOGETHER, next = early;
      if (!alone) next = static_cast<int>(lane()) < min(batch, some) ? table[lane()] : -1;
#pragma unroll 1
      while (i < some) {
        int own = i + lane(), after = own + batch, page = next;
        bool live = static_cast<int>(lane()) < batch && own < some;
        next = static_cast<int>(lane()) < TOGETHER && after < some ? table[after * step] : -1;
        if (live) {
          int number = done + own, slot = number % STAGES;
          if (number >= STAGES) barrier_wait(&m.empty[slot], (number / STAGES - 1) & 1);
          bool present = page >= 0 && page < p.pages;
          m.unit[slot] = Unit{row, (from + own * step) * PAGE, present ? page : -1};
          if (present) {
            barrier_expect(&m.full[slot], Memory::PAGE_BYTES);
            copy_page(m.stage[slot], p.cache + page * p.cache_page, Memory::PAGE_BYTES, &m.full[slot], policy);
          } else {
            barrier_arrive(&m.full[slot]);
          }
        }
        __syncwarp();
        i += batch;
        batch = TOGETHER;
      }
      done += some;
      from = 0;
    }
  }

  // Puts the queries of a block of rows into this warpgroup's columns; true where float16 does not hold them, or
  // float32 what they weigh.
  __device__ __forceinline__ bool load_queries(int group, int row, float (&held)[N / 4], Rows& rows) {
    int block = row / ROWS * ROWS, thread = threadIdx.x % 128, request = 0;
    bool held_all = true;
    Said said{0, -1};
    if (thread < ROWS) {
      said = said_of(p, block + thread);
      if (!solo()) request = p.row_req[row * p.req_stride];
    }
    meet(group);
#pragma unroll 1
    for (int item = thread; item < N * 4; item += 128) {
      int n = item / 4, c = item % 4, mine = block + n / HEADS, head = n % HEADS;
      bool live = mine < p.rows && head < p.heads;
      float w = live ? weight(mine, head) : 0.0f;  // every load is under way before one is waited for
      u32 codes = 0x7f7f7f7fu;
      if constexpr (FP4) {
        uint4 all = make_uint4(0, 0, 0, 0);
        if (live) {
          load_bytes<1>(&all, p.q + mine * p.q_row + head * p.q_head, c);
          codes = scales_of(mine, head);
        }
        held_all = put_group(m.columns[group], n, c, all, codes) && held_all;
        float unit = w * power(Fp4::largest(codes));
        // Else it has no bits left, or its sums none above, that a key's scale brings back.
        held_all = held_all && (w == 0.0f || (fabsf(unit) > 0x1p-100f && fabsf(unit) < 0x1p100f));
        w = unit;
      } else {
        uint4 all[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (live) load_bytes<2>(all, p.q + mine * p.q_row + head * p.q_head, c);
        put_query(m.columns[group], n, c, all);
      }
      if (c == 0) m.weights[group][weight_place(n)] = w;
    }
    if (thread < ROWS) {
      int its, keys = keys_of(p, said, its);
      m.keys[group][thread] = its == request ? keys : 0;
    }
    publish();
    bool odd = false;
    if constexpr (FP4) {
      u32 told;
      asm volatile(
          "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
          : "=r"(told)
          : "r"(static_cast<u32>(!held_all)), "r"(group + 1)
          : "memory");
      odd = told;
    } else {
      meet(group);
    }
    rows.first = row;
    rows.line = block * p.out_row;
#pragma unroll
    for (int i = 0; i < (ROWS + 1) / 2; i++) rows.keys[i] = m.keys[group][ROWS == 1 ? 0 : 2 * i + lane() / 2 % 2];
    if constexpr (HELD) {
#pragma unroll
      for (int j = 0; j < N / 8; j += 2) {
        float4 four = weights_of(group, j);
        held[2 * j] = four.x;
        held[2 * j + 1] = four.y;
        held[2 * j + 2] = four.z;
        held[2 * j + 3] = four.w;
      }
    }
    return odd;
  }

  // A lane's 32 numbers of an FP8 query, where the products of its keys' words look for them.
  static __device__ __forceinline__ void put_query(unsigned char* columns, int n, int c, const uint4 (&all)[2]) {
    Element e{all[0], all[1]};
    u32 piece[8][2];
    e.decode(piece);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      *reinterpret_cast<u32*>(columns + column_offset(n, 8 * i + 2 * c, N)) = piece[i / 2][i % 2];
    }
  }

  // Group `g` of a query as e4m3, times 2^6 and its scale relative to the query's largest; false where that is not exact.
  static __device__ __forceinline__ bool put_group(unsigned char* columns, int n, int g, const uint4& all, u32 codes) {
    u32 below = Fp4::largest(codes) - (codes >> 8 * g & 255);
    u32 factor = (27 - min(below, 14u)) * 0x04000400u;  // 2^12 / 2^below
    u32 word[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 at = byte_offset(n, 32 * g + 4 * i);
      *reinterpret_cast<u32*>(columns + at) = Fp4::scaled(Fp4::even(word[i]), factor);
      at = byte_offset(n, 32 * g + 16 + 4 * i);
      *reinterpret_cast<u32*>(columns + at) = Fp4::scaled(Fp4::odd(word[i]), factor);
    }
    return below <= 14 || !((all.x | all.y | all.z | all.w) & 0x77777777u);
  }

  // Loads a lane's vectors of a query, 64 bytes from each other; queries may stand at any byte.
  template <int VECTORS>
  __device__ __forceinline__ void load_bytes(uint4* to, const unsigned char* at, int c) const {
    if (reinterpret_cast<u64>(at) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) to[i] = *reinterpret_cast<const uint4*>(at + 64 * i + 16 * c);
      return;
    }
    __align__(16) unsigned char copy[VECTORS * 16];
#pragma unroll
    for (int i = 0; i < VECTORS * 16; i++) copy[i] = at[i / 16 * 64 + 16 * c + i % 16];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) to[i] = reinterpret_cast<uint4*>(copy)[i];
  }

  __device__ __forceinline__ u32 scales_of(int row, int head) const {
    const unsigned char* at = p.q_scale + row * p.q_scale_row + head * p.q_scale_head;
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24;
  }

  // A lane's four weights of two times eight columns stand together.
  static __device__ __forceinline__ int weight_place(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; }
  __device__ __forceinline__ float4 weights_of(int group, int j) const {
    return *reinterpret_cast<const float4*>(&m.weights[group][8 * j + lane() % 4 * 4]);
  }
  __device__ __forceinline__ float4 weights_of(int group, int j, const float (&held)[N / 4]) const {
    return HELD ? make_float4(held[2 * j], held[2 * j + 1], held[2 * j + 2], held[2 * j + 3]) : weights_of(group, j);
  }

  // Queries of one block of rows come before its lengths are known, which say how many of its pages are dealt out here.
  __device__ __forceinline__ int dealt_here(int group) const {
    int keys = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) keys = max(keys, m.keys[group][r]);
    return dealt(pages_in(keys));
  }

  __device__ __forceinline__ void consume(int group, int next, int count) {
    wait_for_leader();  // which may have written queries, their scales and weights, and nothing else that is read here
    int token = warp() % 4 * 16 + lane() / 4;
    Turn turn(group, count);
    bool odd = false;
    float held[N / 4];
    Rows rows;
    rows.first = -1;
#pragma unroll 1
    while (turn.left > 0) {
      if (next != rows.first) {  // for the first row before its first page has come
        odd = load_queries(group, next, held, rows);
        if (solo()) {
          turn = Turn(group, dealt_here(group));
          if (turn.left == 0) return;
        }
      }
      barrier_wait(&m.full[turn.slot], turn.parity);
      Unit unit = m.unit[turn.slot];
      next = unit.row;
      if (next != rows.first) continue;
      if constexpr (FP4) {
        float sum[ROWS][2], scale;
        score_groups(group, turn.slot, held, sum, scale);
        if (odd && unit.page >= 0) store_plainly(group, unit, token);
        else store<0, ROWS>(rows, unit, token, sum, scale);
      } else {
        score_page(group, turn.slot, rows, unit, token, held);
      }
      turn.go_on();
    }
  }

  // The scale of the one key of a lane's two that the lane will store.
  __device__ __forceinline__ float scale_of(const unsigned char* stage, int token) const {
    u32 code = reinterpret_cast<const u32*>(stage + PAGE * Element::BYTES)[token + lane() % 2 * 8];
    return p.e8m0 ? power(code & 255) : __uint_as_float(code);
  }

  // FP8: a page's keys times all heads.
  __device__ __forceinline__ void score_page(int group, int slot, const Rows& rows, const Unit& unit, int token,
                                             float (&held)[N / 4]) const {
    const unsigned char* stage = m.stage[slot];
    float scale = scale_of(stage, token);
    u32 a[8][4], c = lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned char* key = stage + (token + 8 * half) * Element::BYTES;
      Element e;
      u32 piece[8][2];
      e.load(key, c);
      e.decode(piece);
#pragma unroll
      for (int s = 0; s < 8; s++) {
        a[s][half] = piece[s][0];
        a[s][2 + half] = piece[s][1];
      }
    }
    release(slot);
    if constexpr (LARGE) {  // rows are added up while those behind them are still multiplied
      float low[N / 16][4], high[N / 16][4], part[ROWS / 2][2];
      multiply<N / 2, N>(low, a, m.columns[group], 0);
      multiply<N / 2, N>(high, a, m.columns[group], N / 2);
      multiplied<1>();
      weigh<0, ROWS / 2>(group, low, held, part);
      store<0, ROWS / 2>(rows, unit, token, part, scale);
      multiplied<0>();
      weigh<ROWS / 2, ROWS>(group, high, held, part);
      store<ROWS / 2, ROWS>(rows, unit, token, part, scale);
    } else {
      float d[N / 8][4], sum[ROWS][2];
      multiply<N, N>(d, a, m.columns[group], 0);
      multiplied<0>();
      weigh<0, ROWS>(group, d, held, sum);
      store<0, ROWS>(rows, unit, token, sum, scale);
    }
  }

  // This warp has read the page.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(&m.empty[slot]);
  }

  // MXFP4: each group of 32 numbers by itself, in e4m3, times 32 heads; groups are added up by their scales.
  __device__ __forceinline__ void score_groups(int group, int slot, float (&held)[N / 4], float (&sum)[ROWS][2],
                                               float& scale) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int AHEAD = 2;
#else
    constexpr int AHEAD = 1;  // a warp waits for its own products anyway
#endif
    constexpr int ALL = N / 32 * 4;
    const unsigned char* stage = m.stage[slot];
    u32 a[4][4], first = warp() % 4 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 word[4];
      load_matrices(word, stage + (first + 8 * half + lane() % 8) * Element::BYTES + lane() / 8 * 16);
#pragma unroll
      for (int g = 0; g < 4; g++) {
        a[g][half] = Fp4::even(word[g]);
        a[g][2 + half] = Fp4::odd(word[g]);
      }
    }
    // A lane has two of a key's four exponents, which count from the largest.
    u32 codes = reinterpret_cast<const unsigned short*>(stage + PAGE * Element::BYTES)[first * 2 + lane()];
    release(slot);
    float d[AHEAD][4][4], all[4][4];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) multiply_group(d[i], a[i % 4], m.columns[group], i / 4 * 32, i % 4);
    u32 top = max(codes & 255, codes >> 8);
    top = max(top, __shfl_xor_sync(EVERY, top, 1));
    reinterpret_cast<float2*>(m.scales[warp()])[lane()] =
        make_float2(power_below(top - (codes & 255)), power_below(top - (codes >> 8)));
    scale = power(__shfl_sync(EVERY, top, lane() / 4 * 2 + lane() % 2 * 16));
    __syncwarp();
    float4 low = m.scales[warp()][lane() / 4], high = m.scales[warp()][lane() / 4 + 8];
    float of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < ALL; i++) {
      constexpr int LAST = ALL - 1;
      if (LAST - i >= AHEAD - 1) multiplied<AHEAD - 1>();
      else if (LAST - i == 2) multiplied<2>();
      else if (LAST - i == 1) multiplied<1>();
      else multiplied<0>();
      add_group(all, d[i % AHEAD], of_low[i % 4], of_high[i % 4], i % 4 == 0);
      if (i + AHEAD < ALL) {
        multiply_group(d[i % AHEAD], a[(i + AHEAD) % 4], m.columns[group], (i + AHEAD) / 4 * 32, (i + AHEAD) % 4);
      }
      if (i % 4 == 3) weigh_part(group, i / 4, all, held, sum[i / 4 * 32 / HEADS]);
    }
  }

  // 2^-below; 0 where a float32 beside the largest is not moved by it.
  static __device__ __forceinline__ float power_below(u32 below) {
    return __uint_as_float(static_cast<u32>(max(127 - static_cast<int>(below), 0)) << 23);
  }

  static __device__ __forceinline__ void add_group(float (&all)[4][4], const float (&d)[4][4], float low, float high,
                                                   bool first) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float by = i < 2 ? low : high;
        all[j][i] = first ? d[j][i] * by : fmaf(d[j][i], by, all[j][i]);
      }
    }
  }

  // Rectifies, weighs and adds up what a lane holds of two times eight columns, for two keys.
  static __device__ __forceinline__ void add_weighed(float (&sum)[2], const float (&d)[4], const float (&e)[4], float4 w) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] = fmaf(rectified_twice(d[2 * half]), w.x, sum[half]);
      sum[half] = fmaf(rectified_twice(d[2 * half + 1]), w.y, sum[half]);
      sum[half] = fmaf(rectified_twice(e[2 * half]), w.z, sum[half]);
      sum[half] = fmaf(rectified_twice(e[2 * half + 1]), w.w, sum[half]);
    }
  }

  // The same of 32 columns.
  __device__ __forceinline__ void weigh_part(int group, int part, const float (&all)[4][4], float (&held)[N / 4],
                                             float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) add_weighed(sum, all[i], all[i + 1], weights_of(group, part * 4 + i, held));
  }

  // The same of the heads of rows FIRST to LAST.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void weigh(int group, float (&d)[(LAST - FIRST) * HEADS / 8][4], float (&held)[N / 4],
                                        float (&sum)[LAST - FIRST][2]) const {
    constexpr int EACH = HEADS / 8;
#pragma unroll
    for (int r = 0; r < LAST - FIRST; r++) {
      sum[r][0] = sum[r][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i += 2) {
        add_weighed(sum[r], d[r * EACH + i], d[r * EACH + i + 1], weights_of(group, (FIRST + r) * EACH + i, held));
      }
    }
  }

  // This lane's heads of a row for one key, number by number: for keys and queries that float16 does not hold.
  __device__ __forceinline__ float add_plainly(const unsigned char* page, int token, int row) const {
    const unsigned char* key = page + token * Element::BYTES;
    const unsigned char* codes = page + PAGE * Element::BYTES + token * 4;
    float sum = 0.0f;
#pragma unroll 1
    for (int head = lane() % 4; head < p.heads && row < p.rows; head += 4) {
      const unsigned char* query = p.q + row * p.q_row + head * p.q_head;
      u32 scales = scales_of(row, head);
      float dot = 0.0f;
#pragma unroll 1
      for (int g = 0; g < 4; g++) {
        float part = 0.0f;
#pragma unroll 1
        for (int i = 32 * g; i < 32 * g + 32; i++) part += Fp4::element(key, i) * Fp4::element(query, i);
        dot += part * power(codes[g]) * power(scales >> 8 * g & 255);
      }
      sum += rectified(dot) * weight(row, head) * 2.0f;  // as products are
    }
    return sum;
  }

  __device__ __forceinline__ float weight(int row, int head) const {
    long long where = row * p.weights_row + head;
    return p.weights_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[where])
                          : static_cast<const float*>(p.weights)[where];
  }

  // Adds up the four lanes of each key; lane c then has key c % 2 of every second row, and stores it.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void store(const Rows& rows, const Unit& unit, int token, float (&sum)[LAST - FIRST][2],
                                        float scale) const {
    constexpr int SOME = LAST - FIRST;
    u32 half = lane() % 2, odd = lane() / 2 % 2;
    int place = unit.first + token + 8 * half;
    float factor = 0.5f * scale;
    float one[SOME];
#pragma unroll
    for (int r = 0; r < SOME; r++) {
      one[r] = half ? sum[r][1] : sum[r][0];
      one[r] += __shfl_xor_sync(EVERY, half ? sum[r][0] : sum[r][1], 1);
    }
    if constexpr (SOME == 1) {
      float score = (one[0] + __shfl_xor_sync(EVERY, one[0], 2)) * factor;
      if (!odd) put(unit, rows.line, place, score, rows.keys[0]);
    } else {
#pragma unroll
      for (int r = 0; r < SOME; r += 2) {
        float mine = odd ? one[r + 1] : one[r];
        mine += __shfl_xor_sync(EVERY, odd ? one[r] : one[r + 1], 2);
        put(unit, rows.line + (FIRST + r + odd) * p.out_row, place, mine * factor, rows.keys[(FIRST + r) / 2]);
      }
    }
  }

  __device__ __forceinline__ void store_plainly(int group, const Unit& unit, int token) const {
    const unsigned char* page = p.cache + unit.page * p.cache_page;
#pragma unroll 1
    for (int i = 0; i < 2 * ROWS; i++) {
      int row = unit.row / ROWS * ROWS + i / 2, key = token + i % 2 * 8;
      float sum = add_plainly(page, key, row);
      sum += __shfl_xor_sync(EVERY, sum, 1);
      sum += __shfl_xor_sync(EVERY, sum, 2);
      if (lane() % 4 == 0) put(unit, row * p.out_row, unit.first + key, sum * 0.5f, m.keys[group][i / 2]);
    }
  }

  __device__ __forceinline__ void put(const Unit& unit, long long line, int place, float score, int keys) const {
    if (place >= keys) return;
    if (unit.page < 0) score = -INFINITY;
    long long at = line + place;
    if (p.out_bf16) static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(score);
    else static_cast<float*>(p.out)[at] = score;
  }

  // Page numbers and queries come near while the lengths are still under way.
  __device__ __forceinline__ void prefetch_all() const {
    constexpr int LINES = 8192;
    if (p.room <= 0) return;
    int line = blockIdx.x * GROUPS * 128 + threadIdx.x;
    long long table = (p.requests - 1) * p.table_row + pages_in(p.room);
    if (table <= LINES * 32 && line * 32 < table) prefetch(p.table + line * 32);
    long long queries = (p.rows - 1) * p.q_row + p.heads * p.q_head;
    if (queries <= LINES * 128 && line * 128 < queries) prefetch(p.q + line * 128);
  }

  __device__ __forceinline__ void run() {
    let_followers_start();
    int group = __shfl_sync(EVERY, warp() / 4, 0);  // known to be the same in all lanes
    if (warp() == GROUPS * 4 && lane() < STAGES) {
      barrier_init(&m.full[lane()], 1);
      barrier_init(&m.empty[lane()], 4);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      publish();
    }
    Share mine{0, 0, 1 << 30};
    if (group < GROUPS && !solo()) prefetch_all();
    if (p.rows > 32) mine = share_many();  // synchronises
    else __syncthreads();
    if (group == GROUPS) {
#if defined(OWN_INSTRUCTIONS)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
#endif
      if (warp() == GROUPS * 4) produce(mine);
      return;
    }
#if defined(OWN_INSTRUCTIONS)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST < 232 ? MOST : 232));
#endif
    if (p.rows <= 32 && !solo()) mine = share_few();
    consume(group, mine.row, mine.count);
  }
};

// N columns of heads padded to HEADS; warpgroups; pages in the ring.
#define SCORES(NAME, ELEMENT, N, HEADS, GROUPS, STAGES)                                                              \
  extern "C" __global__ void __launch_bounds__(Scorer<ELEMENT, N, HEADS, GROUPS, STAGES>::THREADS, 1)                \
      NAME(const __grid_constant__ Scoring p) {                                                                      \
    extern __shared__ __align__(1024) unsigned char memory[];                                                        \
    using This = Scorer<ELEMENT, N, HEADS, GROUPS, STAGES>;                                                          \
    This{p, *reinterpret_cast<This::Memory*>(memory)}.run();                                                         \
  }                                                                                                                  \
  static_assert(sizeof(Ring<ELEMENT, N, GROUPS, STAGES>) <= 232448, "no block has so much shared memory");             \
  static_assert(STAGES <= 32, "a lane begins each barrier");                                                          \
  static_assert(STAGES % GROUPS == 0, "a warpgroup that is ahead would take the page before for the one it waits for");
