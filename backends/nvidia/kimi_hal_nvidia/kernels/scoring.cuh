// What index scores are asked for, and which rows bring which pages: a unit is a page of a request's keys for a block of rows.
#pragma once
#include <cuda_bf16.h>

#include "block.cuh"
#include "shards.cuh"

struct Scoring {
  const unsigned char* q;
  const unsigned char* q_scale;
  const void* weights;
  const unsigned char* cache;
  const int* table;
  const int* row_req;
  const int* row_len;
  void* out;
  u32* tickets;  // two words, zero between launches, that no other launch uses meanwhile; or null
  long long q_row, q_head, q_scale_row, q_scale_head, weights_row, cache_page, table_row, req_stride, len_stride,
      out_row;
  int rows, requests, pages, room, heads;
  Shard shard;
  int weights_bf16, out_bf16, e8m0;
};

constexpr int PAGE = 64;

struct alignas(16) Unit {
  int row, first, page;  // the first row of its request in its block; position of the page's first key; −1: no page
};

// The units of a block of threads: how many, from which row and which page of it.
struct Share {
  int row, first, count;
};

// What memory says of a row. Its two words are under way together, and nothing waits for them yet.
struct Said {
  int length, request;
};
__device__ __forceinline__ Said said_of(const Scoring& p, int row) {
  if (row >= p.rows) return Said{0, -1};
  return Said{p.row_len[row * p.len_stride], p.row_req[row * p.req_stride]};
}

// The keys of a row; none where its request does not exist.
__device__ __forceinline__ int keys_of(const Scoring& p, const Said& said, int& request) {
  request = -1;
  int keys = min(local_length(said.length, p.shard), p.room);
  if (keys <= 0 || said.request < 0 || said.request >= p.requests) return 0;
  request = said.request;
  return keys;
}

__device__ __forceinline__ int pages_in(int keys) { return (keys + PAGE - 1) / PAGE; }

// Pages that a lane's row brings in: those of all rows of its block of ROWS with its request, if it is the first of
// them. Lanes have rows that follow each other, and a block begins at a multiple of ROWS.
template <int ROWS>
__device__ __forceinline__ int pages_brought(int keys, int request) {
  bool first = keys > 0;
  int longest = keys;
#pragma unroll
  for (int i = 1; i < ROWS; i++) {
    u32 other = lane() / ROWS * ROWS + (lane() + i) % ROWS;
    int its = __shfl_sync(EVERY, request, other), more = __shfl_sync(EVERY, keys, other);
    if (more > 0 && its == request) {
      longest = max(longest, more);
      if (other < lane()) first = false;
    }
  }
  return first ? pages_in(longest) : 0;
}

// An equal share of all units for each block of threads; `now` is the first.
__device__ __forceinline__ void divide(int total, int& now, int& count) {
  int each = (total + gridDim.x - 1) / gridDim.x;
  now = blockIdx.x * each;
  count = max(0, min(each, total - now));
}

// Units of one block of rows, dealt out in turn: how many of `pages` this block of threads has.
__device__ __forceinline__ int dealt(int pages) {
  int after = pages - static_cast<int>(blockIdx.x);
  return after > 0 ? (after + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x) : 0;
}
