// Matrix products of a warpgroup: 64 rows in registers, N columns in shared memory, float32 sums in registers.
//
// Hopper has wgmma; elsewhere the same fragments go through mma.sync, sixteen rows a warp.
#pragma once
#include "block.cuh"

// Columns stand in shared memory as [k / 64][n][64] float16, each 128 bytes of a column swizzled by 16 bytes.
__device__ __forceinline__ u32 column_offset(u32 n, u32 k, u32 columns) {
  u32 chunk = (k % 64 / 8) ^ (n % 8);
  return k / 64 * columns * 128 + n * 128 + chunk * 16 + k % 8 * 2;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SIXTEEN(d, j) FOUR(d, j), FOUR(d, j + 1), FOUR(d, j + 2), FOUR(d, j + 3)
#define GIVEN(a, columns, add) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add)
#define NUMBERS_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
// One step of 16 float16 numbers, or of 32 e4m3: d (+)= a · N columns.
#define PRODUCTS(NAME, STEP, TAIL)                                                                                  \
  template <int N>                                                                                                  \
  __device__ __forceinline__ void NAME(float (&d)[N / 8][4], const u32 (&a)[4], u64 columns, int add);              \
  template <>                                                                                                       \
  __device__ __forceinline__ void NAME<32>(float (&d)[4][4], const u32 (&a)[4], u64 columns, int add) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32" STEP               \
                 " {" NUMBERS_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1" TAIL ";\n}"                                 \
                 : SIXTEEN(d, 0)                                                                                    \
                 : GIVEN(a, columns, add));                                                                         \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ __forceinline__ void NAME<64>(float (&d)[8][4], const u32 (&a)[4], u64 columns, int add) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64" STEP               \
                 " {" NUMBERS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1" TAIL ";\n}"                                 \
                 : SIXTEEN(d, 0), SIXTEEN(d, 4)                                                                     \
                 : GIVEN(a, columns, add));                                                                         \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ __forceinline__ void NAME<128>(float (&d)[16][4], const u32 (&a)[4], u64 columns, int add) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128" STEP              \
                 " {" NUMBERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1" TAIL ";\n}"                                 \
                 : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)                                      \
                 : GIVEN(a, columns, add));                                                                         \
  }
PRODUCTS(product, "k16.f32.f16.f16", ", 0")
PRODUCTS(product_of_bytes, "k32.f32.e4m3.e4m3", "")
#endif

// Where byte k of column n stands: 128 bytes a column, swizzled by 16.
__device__ __forceinline__ u32 byte_offset(u32 n, u32 k) { return n * 128 + (k / 16 ^ n % 8) * 16 + k % 16; }

// Adds a step of 32 e4m3 numbers from number `k` on to d: a · N columns from `first` on, by products of a warp.
template <int N>
__device__ __forceinline__ void add_bytes_of_warp(float (&d)[N / 8][4], const u32 (&a)[4], const void* columns, int first,
                                                  int k) {
  const char* at = static_cast<const char*>(columns);
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    u32 n = first + 8 * j + lane() / 4, mine = k + lane() % 4 * 4;
    u32 low = *reinterpret_cast<const u32*>(at + byte_offset(n, mine));
    u32 high = *reinterpret_cast<const u32*>(at + byte_offset(n, mine + 16));
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
  }
}

// Begins d = a · 32 columns from `first` on, over group `g` of 32 e4m3 numbers.
__device__ __forceinline__ void multiply_group(float (&d)[4][4], const u32 (&a)[4], const void* columns, int first,
                                               int g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  products_begin();
  product_of_bytes<32>(d, a, descriptor(shared_address(columns) + first * 128) + g * 2, 0);
  products_commit();
#else
#pragma unroll
  for (int j = 0; j < 4; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
  add_bytes_of_warp<32>(d, a, columns, first, 32 * g);
#endif
}

// Begins d = a · columns [first, first + N) of ALL, a being eight steps of 16 numbers. Columns were written before, and
// the writers have met.
template <int N, int ALL>
__device__ __forceinline__ void multiply(float (&d)[N / 8][4], const u32 (&a)[8][4], const void* columns, int first) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  u64 begin = descriptor(shared_address(columns) + first * 128);
  products_begin();
#pragma unroll
  for (int s = 0; s < 8; s++) product<N>(d, a[s], begin + (s / 4 * ALL * 128 + s % 4 * 32 >> 4), s > 0);
  products_commit();
#else
  u32 n = lane() / 4, k = lane() % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) {
      const char* at = static_cast<const char*>(columns);
      u32 low = *reinterpret_cast<const u32*>(at + column_offset(first + 8 * j + n, 16 * s + k, ALL));
      u32 high = *reinterpret_cast<const u32*>(at + column_offset(first + 8 * j + n, 16 * s + k + 8, ALL));
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
          : "r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3]), "r"(low), "r"(high));
    }
  }
#endif
}

// Waits until all products but the last PENDING begun are there.
template <int PENDING>
__device__ __forceinline__ void multiplied() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
