// indexer_logits: S[t, j] = Σ_h w[t, h] · relu(q[t, h] · k_j), keys as the tall operand of a matrix product.
//
// All rows' keys are counted in pages, and every block takes an equal share of them, whoever has them. Four warps
// copy pages into a ring; warpgroups take them in turn, put a page's 64 keys into the registers of the product, multiply
// them with the heads of one or more rows of a request, and add up what is rectified and weighed in float32.
//
// FP8 keys become float16, which holds every element exactly: FP8 products are added with fewer bits than the contract asks
// for. MXFP4 keys become integers of eight bits, scaled to the largest of a key's four scales; what integers do not reach is
// scored again, group by group. A score's bits depend on its row and its key alone.
#pragma once
#include "copies.cuh"
#include "elements.cuh"
#include "products.cuh"
#include "scoring.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define OWN_INSTRUCTIONS
#endif

constexpr int MOST_ROWS = 128;  // that four warps know
constexpr int REST = 16;        // one page of so many is dealt out to those who are early

template <typename Element, int N, int GROUPS, int STAGES>
struct Ring {
  static constexpr int PAGE_BYTES = PAGE * (Element::BYTES + 4);
  static constexpr int STAGE_BYTES = (PAGE_BYTES + 127) / 128 * 128;
  static constexpr bool FP4 = Element::BYTES == 64;
  unsigned char columns[GROUPS][N * Element::COLUMN];  // at whole 1,024 bytes
  unsigned char stage[STAGES][STAGE_BYTES];
  float weights[GROUPS][N];  // as `weight_place` says
  int offsets[FP4 ? GROUPS : 1][FP4 ? N : 4];  // in their places, what is added to sums of integers
  u32 apart[FP4 ? GROUPS : 1][FP4 ? N : 4];  // powers of two that a query's groups still have to be divided by
  int keys[GROUPS][8];
  u64 full[STAGES], empty[STAGES];
  Unit unit[STAGES];
  u32 sums[2][32];
  Share share;
  int2 until[MOST_ROWS];  // pages of all rows up to each one, and its request
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

constexpr int SECTOR = 32;  // bytes that memory brings at a time

// Asks for a sector of memory to be brought near.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Loads what nobody waits for.
__device__ __forceinline__ void touch(const void* at) {
  asm volatile("{\n.reg .u32 nothing;\nld.global.u8 nothing, [%0];\n}" ::"l"(at) : "memory");
}

// Says of what is copied how long it should stay near: what is read once goes before what is written or read again.
__device__ __forceinline__ u64 stay(bool once) {
  u64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}

__device__ __forceinline__ void copy_part(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// How many rows there may be: one block of them of one request, as many as four warps know, or any number. Less to ask
// for, and fewer instructions that come from memory, until the first pages are on their way.
enum class Rows { ONE_BLOCK, SOME, MANY };

template <typename Element, int N, int HEADS, int GROUPS, int STAGES, Rows MANY>
struct Scorer {
  static constexpr bool ALONE = MANY == Rows::ONE_BLOCK;
  // Warpgroups are told when there are no more pages: each has the slots of one warp that copies.
  static constexpr bool TOLD = MANY == Rows::SOME && GROUPS == 4;
  static constexpr bool FP4 = Element::BYTES == 64;
  static constexpr bool LARGE = N == 256;
  static constexpr int ROWS = N / HEADS, THREADS = GROUPS * 128 + 128;
  // Registers of a thread at the start, of those that copy, and of the others, which get what those give back.
  static constexpr int FEW = GROUPS < 4 ? 56 : 40, EACH = 65536 / THREADS / 8 * 8, MOST = (EACH * THREADS - FEW * 128) / (GROUPS * 128) / 8 * 8;
  using Memory = Ring<Element, N, GROUPS, STAGES>;
  static constexpr bool HELD = N <= (FP4 && GROUPS > 4 ? 32 : 64);  // weights stay in registers
  // Quarters of queries that a thread asks for at the start, of the only block of rows.
  static constexpr int EARLY = (N * 4 + GROUPS * 128 - 1) / (GROUPS * 128);

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

  // A block of rows: where a lane's first score stands, and how many behind it, of every second row.
  struct Block {
    char* out;
    int first, left[ROWS == 1 ? 1 : ROWS / 2];
  };

  // What a lane weighs sums by, if it keeps that.
  struct Held {
    float weight[N / 4];
    int offset[FP4 ? N / 4 : 1];
  };

  // A quarter of a query as it is in memory, its weight, and its scales.
  struct Query {
    uint4 all[FP4 ? 1 : 2];
    float weight;
    u32 codes;
  };

  // The key of a page that a warp has as one of its first or second eight rows of the tall operand.
  static __device__ __forceinline__ u32 key_of(u32 row, u32 half) {
    return warp() % 4 * 16 + half * 8 + row;
  }

  // What a lane adds to a slot's places, computed once.
  struct Places {
    u32 keys, scales, columns, lane, shift;

    __device__ __forceinline__ Places(const Memory& m, int group) {
      u32 first = warp() % 4 * 16, token = first + ::lane() / 4, stage = shared_address(m.stage[0]);
      columns = kept(address_of_columns(m.columns[set_of(group)]));
      if constexpr (FP4) {
        keys = known(stage);
        lane = known(token * 4 + ::lane() % 4);
        shift = known(::lane() % 2 * 16);
      } else {
        keys = known(stage + token * 128 + ::lane() % 4 * 16);
        scales = known(stage + PAGE * 128 + token * 4 + ::lane() % 2 * 32);
      }
    }

    // Told by memory or another lane, a number is not computed again.
    static __device__ __forceinline__ u32 known(u32 x) { return __shfl_sync(EVERY, x, ::lane()); }
  };

  const Scoring& p;
  Memory& m;

  // The units of this block of threads, of any number of rows.
  __device__ __forceinline__ void share_many() {
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
          m.share = Share{row, now - begin, count};
        }
      }
      if (p.rows <= THREADS) break;
      total = before;
      divide(total, now, count);
    }
    if (count == 0 && threadIdx.x == 0) m.share = Share{0, 0, 0};
    __syncthreads();
  }

  // Copiers tell the others of the share, and that there are barriers.
  static __device__ __forceinline__ void tell() { asm volatile("bar.arrive 8, %0;" ::"n"(THREADS) : "memory"); }
  static __device__ __forceinline__ void be_told() { asm volatile("bar.sync 8, %0;" ::"n"(THREADS) : "memory"); }

  // One block of rows of one request: its pages are dealt out in turn, and looked up before lengths are known.
  __device__ __forceinline__ void copy_one() const {
    int fourth = warp() % 4, step = gridDim.x, own = 4 * lane() + fourth, at = blockIdx.x + own * step, request;
    int page = at < pages_in(p.room) ? p.table[at] : -1;
    Said said = said_of(p, lane());
    u64 policy = policy_of();
    begin_ring();
    give_registers();
    int keys = keys_of(p, said, request), pages = __reduce_max_sync(EVERY, pages_in(keys));
    if (lane() < STAGES / 4 && at < pages) send(own, Unit{0, at, page}, policy);
    int count = dealt(pages);
    if (fourth == 0 && lane() < ROWS) {
      m.keys[0][lane()] = keys;
      m.share = Share{0, 0, count};
    }
    __syncwarp();
    tell();
    copy_pages(p.table + blockIdx.x, step, Unit{0, static_cast<int>(blockIdx.x), page}, 0, count, STAGES / 4);
  }

  // Brings the queries of a row's block near, before its pages are asked for: what comes behind those waits for them.
  __device__ __forceinline__ void touch_queries(int row) const {
    int block = row / ROWS * ROWS;
    wait_for_leader();
#pragma unroll 1
    for (int n = lane(); n < N; n += 32) {
      int mine = block + n / HEADS, head = n % HEADS;
      if (mine >= p.rows || head >= p.heads) continue;
#pragma unroll
      for (int i = 0; i < Element::BYTES; i += SECTOR) touch(p.q + mine * p.q_row + head * p.q_head + i);
      touch(static_cast<const char*>(p.weights) + (mine * p.weights_row + head) * (p.weights_bf16 ? 2 : 4));
      if constexpr (FP4) touch(p.q_scale + mine * p.q_scale_row + head * p.q_scale_head);
    }
  }

  // A page of all rows' pages: its row, where it is in its request, and which it is.
  __device__ __forceinline__ Unit find(int number) const {
    int row = 0;
#pragma unroll
    for (int step = MOST_ROWS / 2; step > 0; step /= 2) {
      if (m.until[row + step - 1].x <= number) row += step;
    }
    int before = row ? m.until[row - 1].x : 0;
    return Unit{row, number - before, p.table[m.until[row].y * p.table_row + number - before]};
  }

  // The share of this block of threads of up to MOST_ROWS rows' pages. With tickets, one page of REST is dealt out to
  // those who are early: multiprocessors are not equally near to memory.
  __device__ __forceinline__ void copy_some() const {
    int request, thread = threadIdx.x % 128, fourth = warp() % 4, before = 0, total = 0;
    Said said = said_of(p, thread);
    begin_ring();
    give_registers();
    int keys = keys_of(p, said, request), pages = pages_brought<ROWS>(keys, request), until = warp_inclusive(pages);
    if (lane() == 31) m.sums[0][fourth] = until;
    meet(GROUPS);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int sum = m.sums[0][i];
      total += sum;
      before += i < fourth ? sum : 0;
    }
    m.until[thread] = make_int2(before + until, request);
    meet(GROUPS);
    bool dealt = TOLD && p.tickets;
    int blocks = gridDim.x, each = dealt ? (total - total / REST) / blocks : (total + blocks - 1) / blocks;
    int now = blockIdx.x * each, count = max(0, min(each, total - now));
    int own = 4 * lane() + fourth;
    Unit mine = own < count ? find(now + own) : Unit{0, 0, -1};
    if (thread == 0) m.share = Share{mine.row, 0, count};
    tell();
    int near = __shfl_sync(EVERY, mine.row, 0);
    if (fourth == 0) touch_queries(near);
    u64 policy = policy_of();
    int left = count - fourth, number = fourth, batch = STAGES / 4;
#pragma unroll 1
    while (left > 0) {
      Unit next;
#pragma unroll 1
      for (int i = 0; i < 32 && 4 * i < left; i += batch, batch = 1) {
        int row = __shfl_sync(EVERY, mine.row, min(i + batch, (left + 3) / 4) - 1);
        if (row != near) touch_queries(near = row);
        if (lane() - i < batch && 4 * lane() < left) fill(number + 4 * lane(), mine, policy);
        __syncwarp();
        if (i == 0) {  // once pages are on their way
          own += 128;
          next = own < count ? find(now + own) : Unit{0, 0, -1};
        }
      }
      number += 4 * min(32, (left + 3) / 4);
      left -= 128;
      mine = next;
    }
    if constexpr (TOLD) {
      if (dealt) number = copy_dealt(number, blocks * each, total, near, policy);
      if (lane() == 0) {
        u32 slot = number % STAGES, round = number / STAGES;
        if (round > 0) barrier_wait(&m.empty[slot], (round - 1) & 1);
        m.unit[slot].row = -1;
        barrier_arrive(&m.full[slot]);
      }
    }
  }

  // Pages from `now` on, some to a ticket; returns the next number of this warp.
  __device__ __forceinline__ int copy_dealt(int number, int now, int total, int near, u64 policy) const {
    int size = total - now > 32 * static_cast<int>(gridDim.x) ? 2 : 1;
    u32 ticket = take();
#pragma unroll 1
    while (true) {
      int begin = now + static_cast<int>(__shfl_sync(EVERY, ticket, 0)) * size;
      if (begin >= total) break;
      ticket = take();  // while these are copied
      int some = min(size, total - begin);
      Unit mine = static_cast<int>(lane()) < some ? find(begin + lane()) : Unit{0, 0, -1};
#pragma unroll 1
      for (int i = 0; i < some; i++, number += 4) {
        int row = __shfl_sync(EVERY, mine.row, i);
        if (row != near) touch_queries(near = row);
        if (lane() == i) fill(number, mine, policy);
        __syncwarp();
      }
    }
    if (lane() == 0 && atomicAdd(p.tickets + 1, 1) == gridDim.x * 4 - 1) {  // nobody takes another
      p.tickets[0] = 0;
      p.tickets[1] = 0;
    }
    return number;
  }

  __device__ __forceinline__ u32 take() const { return lane() == 0 ? atomicAdd(p.tickets, 1) : 0; }

  __device__ __forceinline__ u64 policy_of() const { return stay(p.rows <= p.requests * ROWS); }

  // Copies a page, whose place is still a number of pages, into the slot of a number, once that is empty.
  __device__ __forceinline__ void fill(u32 number, const Unit& unit, u64 policy) const {
    u32 slot = number % STAGES, round = number / STAGES;
    if (round > 0) barrier_wait(&m.empty[slot], (round - 1) & 1);
    send(slot, unit, policy);
  }

  __device__ __forceinline__ void send(u32 slot, const Unit& unit, u64 policy) const {
    bool present = unit.page >= 0 && unit.page < p.pages;
    m.unit[slot] = Unit{unit.row, unit.first * PAGE, present ? unit.page : -1};
    if (present) {
      const unsigned char* from = p.cache + unit.page * p.cache_page;
      barrier_expect(&m.full[slot], Memory::PAGE_BYTES);
      copy_part(m.stage[slot], from, Memory::PAGE_BYTES, &m.full[slot], policy);
    } else {
      barrier_arrive(&m.full[slot]);
    }
  }

  // The share of this block of threads of any number of rows, request for request.
  __device__ __forceinline__ void copy_many() const {
    begin_ring();
    give_registers();
    Share mine = m.share;
    tell();
    int base = mine.row / 32 * 32 - 32, request = 0, pages = 0, done = 0, from = mine.first;
    u32 behind = EVERY << mine.row % 32, waiting = 0;
#pragma unroll 1
    while (done < mine.count) {
#pragma unroll 1
      while (!waiting) {
        base += 32;
        int keys = keys_of(p, said_of(p, base + lane()), request);
        pages = pages_brought<ROWS>(keys, request);
        waiting = __ballot_sync(EVERY, pages > 0) & behind;
        behind = EVERY;
      }
      int at = __ffs(waiting) - 1;
      waiting &= waiting - 1;
      int some = min(__shfl_sync(EVERY, pages, at) - from, mine.count - done);
      const int* table = p.table + __shfl_sync(EVERY, request, at) * p.table_row + from;
      // A slot is always the same warp's, or one would be a round ahead of another.
      int own = 4 * lane() + ((warp() - done) & 3), page = own < some ? table[own] : -1;
      copy_pages(table, 1, Unit{base + at, from, page}, done, some, 0);
      done += some;
      from = 0;
    }
  }

  // Keeps the ring filled with `some` pages of a request, `step` apart in its table, as numbers from `done` on: each of
  // four warps has every fourth slot. A lane looks up a page and copies it, and knows its first one; the first `sent` are
  // on their way.
  __device__ __forceinline__ void copy_pages(const int* table, int step, Unit begin, int done, int some, int sent) const {
    int place = (warp() - done) & 3, own = 4 * lane() + place, page = begin.page;
    u64 policy = policy_of();
#pragma unroll 1
    while (place < some) {
      int after = own + 128, next = after < some ? table[after * step] : -1;
      Unit unit{begin.row, begin.first + own * step, page};
      int batch = sent ? 1 : max(1, (STAGES + 3 - done - place) / 4);  // what finds its slot empty goes at once
#pragma unroll 1
      for (int i = sent; i < 32 && place + 4 * i < some; i += batch, batch = 1) {
        if (lane() - i < batch && own < some) fill(done + own, unit, policy);
        __syncwarp();
      }
      sent = 0;
      place += 128;
      own = after;
      page = next;
    }
  }

  // Which set of columns, weights and lengths a warpgroup has.
  static __device__ __forceinline__ int set_of(int group) { return ALONE ? 0 : group; }

  // Whether any of the threads that meet says so.
  template <int THREADS_MEETING>
  static __device__ __forceinline__ bool any_of(bool said, int barrier) {
    u32 told;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(told)
        : "r"(static_cast<u32>(said)), "r"(barrier), "n"(THREADS_MEETING)
        : "memory");
    return told;
  }

  // Puts the queries of the only block of rows, which were asked for before, into the columns of all warpgroups; true where
  // integers do not hold them, or float32 what they weigh.
  __device__ __forceinline__ bool put_queries(const Query (&query)[EARLY]) const {
    bool held_all = true;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      u32 item = threadIdx.x + GROUPS * 128 * i;
      if (item < N * 4) held_all = put_query(0, item, query[i]) && held_all;
    }
    publish();
    be_told();
    return FP4 && any_of<GROUPS * 128>(!held_all, 7);
  }

  // Puts the queries of a block of rows into this warpgroup's columns; true as above.
  __device__ __forceinline__ bool load_queries(int group, int row) const {
    int block = row / ROWS * ROWS, request = 0;
    u32 thread = threadIdx.x % 128;
    bool held_all = true;
    Said said{0, -1};
    if (thread < ROWS) {
      said = said_of(p, block + thread);
      request = p.row_req[row * p.req_stride];
    }
    meet(group);
    constexpr int SOME = N <= 64 ? N / 32 : 1;  // every load is under way before one is waited for
#pragma unroll 1
    for (u32 item = thread; item < N * 4; item += 128 * SOME) {
      Query query[SOME];
#pragma unroll
      for (int i = 0; i < SOME; i++) query[i] = ask(block, item + 128 * i);
#pragma unroll
      for (int i = 0; i < SOME; i++) held_all = put_query(group, item + 128 * i, query[i]) && held_all;
    }
    if (thread < ROWS) {
      int its, keys = keys_of(p, said, its);
      m.keys[group][thread] = its == request ? keys : 0;
    }
    publish();
    if constexpr (FP4) return any_of<128>(!held_all, group + 1);
    meet(group);
    return false;
  }

  // What a lane knows of the rows whose queries are there.
  __device__ __forceinline__ void look_at(int group, int row, Held& held, Block& rows) const {
    int block = row / ROWS * ROWS, set = set_of(group);
    rows.first = row;
    int place = key_of(lane() / 4, lane() % 2), odd_row = ROWS == 1 ? 0 : lane() / 2 % 2;
    rows.out = static_cast<char*>(p.out) + ((block + odd_row) * p.out_row + place) * (p.out_bf16 ? 2 : 4);
#pragma unroll
    for (int i = 0; i < (ROWS + 1) / 2; i++) {
      rows.left[i] = m.keys[set][2 * i + odd_row] - place;
      if (ROWS == 1 && lane() / 2 % 2) rows.left[i] = 0;  // another lane has the same
    }
    hold(set, held);
  }

  __device__ __forceinline__ void hold(int set, Held& held) const {
    if constexpr (HELD) {
#pragma unroll
      for (int j = 0; j < N / 8; j += 2) {
        float4 four = weights_of(set, j);
        held.weight[2 * j] = four.x;
        held.weight[2 * j + 1] = four.y;
        held.weight[2 * j + 2] = four.z;
        held.weight[2 * j + 3] = four.w;
        if constexpr (FP4) {
          int4 other = offsets_of(set, j);
          held.offset[2 * j] = other.x;
          held.offset[2 * j + 1] = other.y;
          held.offset[2 * j + 2] = other.z;
          held.offset[2 * j + 3] = other.w;
        }
      }
    }
  }

  __device__ __forceinline__ Query ask(int block, u32 item) const {
    u32 n = item / 4;
    int mine = ROWS == 1 ? block : block + n / HEADS, head = n % HEADS;
    Query query{};
    query.codes = 0x7f7f7f7fu;
    if (n < N && mine < p.rows && head < p.heads) {
      const unsigned char* at = p.q + mine * p.q_row + head * p.q_head;
      load_vectors(query.all, at, item % 4);
      if constexpr (FP4) query.codes = scales_of(mine, head);
      query.weight = weight(mine, head);
      load_bytes(query.all, at, item % 4);
    }
    return query;
  }

  // Puts it into a set of columns, where the products of its keys' words look for it; false where that is not exact.
  __device__ __forceinline__ bool put_query(int set, u32 item, const Query& query) const {
    u32 n = item / 4, c = item % 4;
    unsigned char* columns = m.columns[set];
    bool held = true;
    float w = query.weight;
    if constexpr (FP4) {
      int sum;
      u32 apart = put_group(columns, n, c, query.all[0], query.codes, sum);
      sum += __shfl_xor_sync(EVERY, sum, 1);
      sum += __shfl_xor_sync(EVERY, sum, 2);
      if (c == 0) m.offsets[set][weight_place(n)] = -128 * sum;
      float unit = w * power(Fp4::largest(query.codes));
      if (!in_range(w, unit)) apart = BEYOND;
      reinterpret_cast<unsigned char*>(m.apart[set])[n * 4 + c] = apart;
      held = apart == 0;
      w = unit * 0x1p86f;
    } else {
      Element e{query.all[0], query.all[1]};
      u32 piece[8][2], first = column_offset(n, 2 * c, N);
      e.decode(piece);
#pragma unroll
      for (u32 i = 0; i < 16; i++) {  // number 8 i + 2 c
        *reinterpret_cast<u32*>(columns + (first ^ i % 8 * 16) + i / 8 * N * 128) = piece[i / 2][i % 2];
      }
    }
    if (c == 0) m.weights[set][weight_place(n)] = w;
    return held;
  }

  // Whether products with a weight in units have all bits where they are added as the integers' own bits times 2^86.
  static __device__ __forceinline__ bool in_range(float weight, float unit) {
    return weight == 0.0f || (fabsf(unit) > 0x1p-63f && fabsf(unit) < 0x1p40f);
  }

  // Group `g` of a query as integers relative to the query's largest scale, and their sum. Where that does not hold one of the
  // four groups, all stand as they are, and the powers of two between are returned.
  static __device__ __forceinline__ u32 put_group(unsigned char* columns, u32 n, u32 g, const uint4& all, u32 codes, int& sum) {
    u32 below = Fp4::largest(codes) - (codes >> 8 * g & 255), word[4] = {all.x, all.y, all.z, all.w};
    bool any = (all.x | all.y | all.z | all.w) & 0x77777777u;
    bool loose = __ballot_sync(EVERY, any && below > Fp4::LEAST) >> (lane() & 28) & 15;
    Fp4::Table table(loose ? 0 : min(below, Fp4::LEAST));
    sum = 0;
#pragma unroll
    for (u32 s = 0; s < 4; s++) {
      u32 first, last;
      Fp4::decode(first, last, word[s], table);
      first ^= Fp4::BIAS;
      last ^= Fp4::BIAS;
      *reinterpret_cast<u32*>(columns + byte_offset(n, 32 * s + 4 * g)) = first;
      *reinterpret_cast<u32*>(columns + byte_offset(n, 32 * s + 16 + 4 * g)) = last;
      sum = __dp4a(static_cast<int>(first), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(last), 0x01010101, sum);
    }
    return !loose ? 0 : below <= MOST_BELOW ? below : any ? BEYOND : MOST_BELOW;
  }

  // A lane's vectors of a query, 64 bytes from each other, where they stand at whole 16 bytes: without a branch, so that
  // nothing is ahead of it; else byte for byte.
  template <int VECTORS>
  __device__ __forceinline__ void load_vectors(uint4 (&to)[VECTORS], const unsigned char* at, u32 c) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.eq.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
          : "+r"(to[i].x), "+r"(to[i].y), "+r"(to[i].z), "+r"(to[i].w)
          : "l"(at + 64 * i + 16 * c), "r"(static_cast<u32>(reinterpret_cast<u64>(at) % 16)));
    }
  }
  template <int VECTORS>
  __device__ __forceinline__ void load_bytes(uint4 (&to)[VECTORS], const unsigned char* at, u32 c) const {
    if (seldom(reinterpret_cast<u64>(at) % 16)) {
      __align__(16) unsigned char copy[VECTORS * 16];
#pragma unroll
      for (int i = 0; i < VECTORS * 16; i++) copy[i] = at[i / 16 * 64 + 16 * c + i % 16];
#pragma unroll
      for (int i = 0; i < VECTORS; i++) to[i] = reinterpret_cast<uint4*>(copy)[i];
    }
  }

  __device__ __forceinline__ u32 scales_of(int row, int head) const {
    const unsigned char* at = p.q_scale + row * p.q_scale_row + head * p.q_scale_head;
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24;
  }

  // A lane's four weights of two times eight columns stand together.
  static __device__ __forceinline__ u32 weight_place(u32 n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; }
  __device__ __forceinline__ float4 weights_of(int set, int j) const {
    return *reinterpret_cast<const float4*>(&m.weights[set][8 * j + lane() % 4 * 4]);
  }
  __device__ __forceinline__ int4 offsets_of(int set, int j) const {
    return *reinterpret_cast<const int4*>(&m.offsets[set][8 * j + lane() % 4 * 4]);
  }
  __device__ __forceinline__ float4 weights_of(int group, int j, const Held& held) const {
    const float* w = held.weight + 2 * j;
    return HELD ? make_float4(w[0], w[1], w[2], w[3]) : weights_of(set_of(group), j);
  }
  __device__ __forceinline__ int4 offsets_of(int group, int j, const Held& held) const {
    const int* o = held.offset + 2 * j;
    return HELD ? make_int4(o[0], o[1], o[2], o[3]) : offsets_of(set_of(group), j);
  }

  // Pages of the same rows are one run of code: what changes rows, and what integers do not reach, stands behind it.
  __device__ __forceinline__ void consume(int group) {
    Held held;
    Block rows;
    u32 odd = 0;
    wait_for_leader();  // which may have written queries, their scales and weights, and nothing else that is read here
    if constexpr (ALONE) {  // queries come first: what is asked for behind the first pages waits for those
      Query query[EARLY];
#pragma unroll
      for (int i = 0; i < EARLY; i++) query[i] = ask(0, threadIdx.x + GROUPS * 128 * i);
      take_registers();
      odd = put_queries(query);
      look_at(group, 0, held, rows);
    } else {
      be_told();
      take_registers();
      rows.first = -1;
    }
    Places places(m, group);
    Turn turn(group, m.share.count);
    int next = ALONE ? 0 : m.share.row;
#pragma unroll 1
    while (TOLD || turn.left > 0) {
      if (!ALONE && next != rows.first) {  // for the first row before its first page has come
        odd = load_queries(group, next);
        look_at(group, next, held, rows);
      }
      Unit unit;
      bool again = false;
#pragma unroll 1
      do {
        barrier_wait(&m.full[turn.slot], turn.parity);
        unit = m.unit[turn.slot];
        if (!ALONE && unit.row != rows.first) break;
        if constexpr (FP4) again = score_integers(group, turn.slot, places, rows, unit, held, odd);
        else score_page(group, turn.slot, places, rows, unit, held);
        if (again) break;
        turn.go_on();
      } while (TOLD || turn.left > 0);
      if (again) {
        score_groups(group, unit, odd);
        turn.go_on();
        hold(set_of(group), held);
      } else {
        next = unit.row;
        if (TOLD && next < 0) return;
      }
    }
  }

  // FP8: a page's keys times all heads.
  __device__ __forceinline__ void score_page(int group, int slot, const Places& places, const Block& rows, const Unit& unit,
                                             Held& held) const {
    u32 stage = slot * Memory::STAGE_BYTES;
    u32 a[8][4], code = load_word(places.scales + stage);  // of the one key of a lane's two that the lane will store
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 key = places.keys + stage + half * 1024;
      Element e{load_vector(key), load_vector(key + 64)};
      u32 piece[8][2];
      e.decode(piece);
#pragma unroll
      for (int s = 0; s < 8; s++) {
        a[s][half] = piece[s][0];
        a[s][2 + half] = piece[s][1];
      }
    }
    release(slot);
    score_all<float>(group, places, rows, unit, a, held, 0.5f * (p.e8m0 ? power(code & 255) : __uint_as_float(code)));
  }

  // Keys that stand in registers, times all heads.
  template <typename Sum, int STEPS>
  __device__ __forceinline__ void score_all(int group, const Places& places, const Block& rows, const Unit& unit,
                                            const u32 (&a)[STEPS][4], const Held& held, float scale) const {
    if constexpr (LARGE) {  // rows are added up while those behind them are still multiplied
      Sum low[N / 16][4], high[N / 16][4];
      float part[ROWS / 2][2];
      multiply<N / 2, N>(low, a, places.columns, 0);
      multiply<N / 2, N>(high, a, places.columns, N / 2);
      multiplied<1>();
      weigh<0, ROWS / 2>(group, low, held, part);
      store<0, ROWS / 2>(rows, unit, part, scale);
      multiplied<0>();
      weigh<ROWS / 2, ROWS>(group, high, held, part);
      store<ROWS / 2, ROWS>(rows, unit, part, scale);
    } else {
      Sum d[N / 8][4];
      float sum[ROWS][2];
      multiply<N, N>(d, a, places.columns, 0);
      multiplied<0>();
      weigh<0, ROWS>(group, d, held, sum);
      store<0, ROWS>(rows, unit, sum, scale);
    }
  }

  // This warp has read the page.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(&m.empty[slot]);
  }

  // MXFP4: a lane has a group of each of two keys. True where a key's scales are too far apart, or 2^65 and above, or NaN, or
  // a query is odd.
  __device__ __forceinline__ bool score_integers(int group, int slot, const Places& places, const Block& rows,
                                                 const Unit& unit, const Held& held, u32 odd) const {
    u32 stage = places.keys + slot * Memory::STAGE_BYTES, a[4][4];
    uint4 all[2] = {load_vector(stage + places.lane * 16), load_vector(stage + places.lane * 16 + 512)};
    u32 scales = stage + places.lane + PAGE * 64;
    u32 codes = load_byte(scales) | load_byte(scales + 32) << 16;
    release(slot);
    u32 top = __vmaxu2(codes, __shfl_xor_sync(EVERY, codes, 1));
    top = __vmaxu2(top, __shfl_xor_sync(EVERY, top, 2));
    u32 below = top - codes;
    constexpr u32 FEW_BITS = (0xffff - Fp4::LEAST) * 0x10001, LARGEST = 0x400040;
    bool again = __any_sync(EVERY, below & FEW_BITS | (top + LARGEST) & 0x1000100 | odd);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Fp4::Table table(half ? below >> 16 : below);
      u32 word[4] = {all[half].x, all[half].y, all[half].z, all[half].w};
#pragma unroll
      for (int s = 0; s < 4; s++) Fp4::decode(a[s][half], a[s][2 + half], word[s], table);
    }
    // Sums are added as the bits of integers, which are so many times 2^-149, by weights times 2^86.
    u32 exponent = (top >> places.shift) + (149 - 86 - 2 * Fp4::UNIT);
    score_all<int>(group, places, rows, unit, a, held, __uint_as_float(exponent << 23));
    return again;
  }

  // Powers of two between a key's scales, and between a query's, up to which groups are added by them.
  static constexpr u32 MOST_APART = 64, MOST_BELOW = 14, BEYOND = 255;

  // Scores a warp's sixteen keys again, as integers of each group of 32 numbers by itself, which are added relative to a
  // key's and a query's largest scales; number by number, what is beyond that too.
  __device__ __forceinline__ void score_groups(int group, const Unit& unit, bool odd) const {
    constexpr int ZERO = 0x4b400000;  // as a float, to whose last bits integers are added
    const unsigned char* page = p.cache + unit.page * p.cache_page;
    // What is computed of these is not computed before the first page.
    u32 me = Places::known(lane()), quad = me / 4, c = me % 4, codes[2], a[4][4];
    int set = Places::known(set_of(group)), block = Places::known(unit.row / ROWS * ROWS);
    bool lost[2], needed = odd;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int key = key_of(quad, half), most = 0;
#pragma unroll
      for (int r = 0; r < ROWS; r++) most = max(most, m.keys[set][r]);
      bool there = unit.page >= 0 && unit.first + key < most;  // anything may stand behind them
      uint4 all{};
      codes[half] = 0;
      if (there) {
        all = *reinterpret_cast<const uint4*>(page + key * 64 + c * 16);
        codes[half] = *reinterpret_cast<const u32*>(page + PAGE * 64 + key * 4);
      }
      u32 top = Fp4::largest(codes[half]), below = top - (codes[half] >> 8 * c & 255), word[4] = {all.x, all.y, all.z, all.w};
      lost[half] = top >= 192 || below > MOST_APART && ((all.x | all.y | all.z | all.w) & 0x77777777u);
      needed |= lost[half] || below > Fp4::LEAST;
      Fp4::Table table(0);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        Fp4::decode(a[s][half], a[s][2 + half], word[s], table);
        a[s][half] ^= Fp4::BIAS;
        a[s][2 + half] ^= Fp4::BIAS;
      }
    }
    if (!__any_sync(EVERY, needed) || unit.page < 0) return;
    __syncwarp();  // behind what was stored before
#pragma unroll
    for (int half = 0; half < 2; half++) lost[half] = __ballot_sync(EVERY, lost[half]) >> (me & 28) & 15;
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
      float sum[2] = {0.0f, 0.0f};
      bool wild = false;
#pragma unroll 1
      for (int first = r * HEADS; first < (r + 1) * HEADS; first += 16) {
        float all[2][4] = {};
        wild |= __vcmpeq4(m.apart[set][first + me % 16], BEYOND * 0x01010101u);
#pragma unroll 1
        for (u32 g = 0; g < 4; g++) {
          float relative[2];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 below = Fp4::largest(codes[half]) - (codes[half] >> 8 * g & 255);
            relative[half] = __uint_as_float((127 - min(below, MOST_APART)) << 23);
          }
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const unsigned char* column = m.columns[set];
            int d[4] = {ZERO, ZERO, ZERO, ZERO};
#pragma unroll
            for (u32 s = 0; s < 4; s++) {  // a lane has its group of both, so that the others' are zero
              u32 n = first + 8 * j + quad, low = 0, high = 0;
              if (c == g) {
                low = *reinterpret_cast<const u32*>(column + byte_offset(n, 32 * s + 4 * c));
                high = *reinterpret_cast<const u32*>(column + byte_offset(n, 32 * s + 16 + 4 * c));
              }
              add_products(d, a[s], low, high);
            }
            const u32* apart = m.apart[set] + first + 8 * j + c * 2;
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float factor = relative[i / 2] * __uint_as_float((127 - (apart[i % 2] >> 8 * g & 255)) << 23);
              all[j][i] = fmaf(__int_as_float(d[i]) - __int_as_float(ZERO), factor, all[j][i]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float its = m.weights[set][weight_place(first + 8 * j + c * 2 + i % 2)] * 0x1p-31f;  // so that no sum is denormal
            sum[i / 2] = fmaf(rectified_twice(all[j][i]), its, sum[i / 2]);
          }
        }
      }
      wild = __any_sync(EVERY, wild);
      int row = block + r;
#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        int key = key_of(quad, half);
        bool plainly = wild || (half ? lost[1] : lost[0]);
        int top = Fp4::largest(half ? codes[1] : codes[0]);
        float score = scalbnf(added(half ? sum[1] : sum[0]), top - 127 - 64);  // rounded once, as other keys' are
        if (__any_sync(EVERY, plainly)) {
          float exact = added(add_plainly(page, key, row));
          score = plainly ? exact : score;
        }
        char* out = static_cast<char*>(p.out) + (row * p.out_row + key) * (p.out_bf16 ? 2 : 4);
        if (c == 0) put(unit, out, score, m.keys[set][r] - key);
      }
    }
  }

  // What the four lanes of a key have of a score.
  static __device__ __forceinline__ float added(float part) {
    part += __shfl_xor_sync(EVERY, part, 1);
    return part + __shfl_xor_sync(EVERY, part, 2);
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

  // The same of integers, whose bits are weighed as those of floats.
  static __device__ __forceinline__ void add_weighed(float (&sum)[2], const int (&d)[4], const int (&e)[4], float4 w, int4 o) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] = fmaf(__int_as_float(max(d[2 * half] + o.x, 0)), w.x, sum[half]);
      sum[half] = fmaf(__int_as_float(max(d[2 * half + 1] + o.y, 0)), w.y, sum[half]);
      sum[half] = fmaf(__int_as_float(max(e[2 * half] + o.z, 0)), w.z, sum[half]);
      sum[half] = fmaf(__int_as_float(max(e[2 * half + 1] + o.w, 0)), w.w, sum[half]);
    }
  }

  // The same of the heads of rows FIRST to LAST.
  template <int FIRST, int LAST, typename Sum>
  __device__ __forceinline__ void weigh(int group, Sum (&d)[(LAST - FIRST) * HEADS / 8][4], const Held& held,
                                        float (&sum)[LAST - FIRST][2]) const {
    constexpr int EACH = HEADS / 8;
#pragma unroll
    for (int r = 0; r < LAST - FIRST; r++) {
      sum[r][0] = sum[r][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i += 2) {
        int first = r * EACH + i, column = FIRST * EACH + first;
        float4 w = weights_of(group, column, held);
        if constexpr (FP4) add_weighed(sum[r], d[first], d[first + 1], w, offsets_of(group, column, held));
        else add_weighed(sum[r], d[first], d[first + 1], w);
      }
    }
  }

  // This lane's heads of a row for one key, number by number: for keys and queries that groups do not hold.
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
      sum += rectified(dot) * weight(row, head);
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
  __device__ __forceinline__ void store(const Block& rows, const Unit& unit, float (&sum)[LAST - FIRST][2],
                                        float scale) const {
    constexpr int SOME = LAST - FIRST;
    u32 half = lane() % 2, odd = lane() / 2 % 2;
    float one[SOME];
#pragma unroll
    for (int r = 0; r < SOME; r++) {
      one[r] = half ? sum[r][1] : sum[r][0];
      one[r] += __shfl_xor_sync(EVERY, half ? sum[r][0] : sum[r][1], 1);
    }
    if constexpr (SOME == 1) {
      put(unit, rows.out, (one[0] + __shfl_xor_sync(EVERY, one[0], 2)) * scale, rows.left[0]);
    } else {
#pragma unroll
      for (int r = 0; r < SOME; r += 2) {
        float mine = odd ? one[r + 1] : one[r];
        mine += __shfl_xor_sync(EVERY, odd ? one[r] : one[r + 1], 2);
        char* out = rows.out;
        if (FIRST + r > 0) out += (FIRST + r) * p.out_row * (p.out_bf16 ? 2 : 4);
        put(unit, out, mine * scale, rows.left[(FIRST + r) / 2]);
      }
    }
  }

  // A score of the page, to the place behind `out` if there are that many left.
  __device__ __forceinline__ void put(const Unit& unit, char* out, float score, int left) const {
    if (unit.first >= left) return;
    if (unit.page < 0) score = -INFINITY;
    if (p.out_bf16) reinterpret_cast<__nv_bfloat16*>(out)[unit.first] = __float2bfloat16_rn(score);
    else reinterpret_cast<float*>(out)[unit.first] = score;
  }

  // Page numbers and queries come near while the lengths are still under way: what is asked for behind the first pages
  // waits for those. Every block asks for a part, unless there is more than all of them ask for at once.
  __device__ __forceinline__ void prefetch_all() const {
    const long long most = GROUPS * 128 * SECTOR * gridDim.x;
    const u32 at = (threadIdx.x * gridDim.x + blockIdx.x) * SECTOR;
    auto bring = [&](const void* from, long long bytes) {
      if (at < bytes && bytes <= most) prefetch(static_cast<const char*>(from) + at);
    };
    bring(p.table, ((p.requests - 1) * p.table_row + pages_in(p.room)) * 4);
    bring(p.q, (p.rows - 1) * p.q_row + (p.heads - 1) * p.q_head + Element::BYTES);
    bring(p.weights, ((p.rows - 1) * p.weights_row + p.heads) * (p.weights_bf16 ? 2 : 4));
    if constexpr (FP4) bring(p.q_scale, (p.rows - 1) * p.q_scale_row + (p.heads - 1) * p.q_scale_head + 4);
  }

  // A warp that copies makes the barriers of its own slots.
  __device__ __forceinline__ void begin_ring() const {
    if (lane() < STAGES / 4) {
      int slot = 4 * lane() + warp() % 4;
      barrier_init(&m.full[slot], 1);
      barrier_init(&m.empty[slot], 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
  }

  static __device__ __forceinline__ void take_registers() {
#if defined(OWN_INSTRUCTIONS)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST < 232 ? MOST : 232));
#endif
  }
  static __device__ __forceinline__ void give_registers() {
#if defined(OWN_INSTRUCTIONS)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
#endif
  }

  __device__ __forceinline__ void run() {
    let_followers_start();
    int group = __shfl_sync(EVERY, warp() / 4, 0);  // known to be the same in all lanes
    if constexpr (MANY == Rows::MANY) share_many();  // synchronises
    if (group == GROUPS) {
      if constexpr (ALONE) copy_one();
      else if constexpr (MANY == Rows::SOME) copy_some();
      else copy_many();
      return;
    }
    if constexpr (!ALONE) prefetch_all();
    consume(group);
  }
};

#define SCORES_OF(NAME, ELEMENT, N, HEADS, GROUPS, STAGES, MANY)                                                      \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1) NAME(const __grid_constant__ Scoring p) {      \
    extern __shared__ __align__(1024) unsigned char memory[];                                                        \
    using This = Scorer<ELEMENT, N, HEADS, GROUPS, STAGES, Rows::MANY>;                                              \
    This{p, *reinterpret_cast<This::Memory*>(memory)}.run();                                                         \
  }
// N columns of heads padded to HEADS; warpgroups; pages in the ring.
#define SCORES(NAME, ELEMENT, N, HEADS, GROUPS, STAGES)                                                              \
  SCORES_OF(NAME##_one, ELEMENT, N, HEADS, GROUPS, STAGES, ONE_BLOCK)                                                \
  SCORES_OF(NAME, ELEMENT, N, HEADS, GROUPS, STAGES, SOME)                                                           \
  SCORES_OF(NAME##_many, ELEMENT, N, HEADS, GROUPS, STAGES, MANY)                                                    \
  static_assert(sizeof(Ring<ELEMENT, N, GROUPS, STAGES>) <= 232448, "no block has so much shared memory");             \
  static_assert(STAGES % 4 == 0, "a slot is always the same warp's");                                                 \
  static_assert(STAGES % GROUPS == 0, "a warpgroup that is ahead would take the page before for the one it waits for");
