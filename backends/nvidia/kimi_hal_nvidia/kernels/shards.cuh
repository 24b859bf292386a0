// Decode context parallelism: how many of the first `length` positions a rank owns.
#pragma once

struct Shard {
  int world, rank, interleave;
};

__device__ __forceinline__ int local_length(int length, const Shard& shard) {
  int owned = max(length, 0);
  if (shard.world > 1) {
    int run = shard.world * shard.interleave;
    int over = owned % run - shard.rank * shard.interleave;
    owned = owned / run * shard.interleave + min(max(over, 0), shard.interleave);
  }
  return owned;
}
