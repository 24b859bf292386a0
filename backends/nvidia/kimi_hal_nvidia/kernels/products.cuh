// Matrix products of a warpgroup: 64 rows in registers, N columns in shared memory, sums in registers: of float16 in float32, of
// integers exactly.
//
// Hopper has wgmma; elsewhere the same fragments go through mma.sync, sixteen rows a warp.
#pragma once
#include "places.cuh"

// Columns stand in shared memory as [k / 64][n][64] float16, each 128 bytes of a column swizzled by 16 bytes.
__device__ __forceinline__ u32 column_offset(u32 n, u32 k, u32 columns) {
  u32 chunk = (k % 64 / 8) ^ (n % 8);
  return k / 64 * columns * 128 + n * 128 + chunk * 16 + k % 8 * 2;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The low half of what a product is told of columns: their address, and 1; the high half says 1,024 bytes for eight columns
// and the swizzle. Steps are added to all 64 bits, so that a product costs one addition and no more.
constexpr u64 COLUMN_LAYOUT = 0x4000004000000000;
__device__ __forceinline__ u32 address_of_columns(const void* p) { return (shared_address(p) >> 4 & 0x3fff) | 1 << 16; }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SIXTEEN(d, j) FOUR(d, j), FOUR(d, j + 1), FOUR(d, j + 2), FOUR(d, j + 3)
#define FOUR_WHOLE(d, j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#define SIXTEEN_WHOLE(d, j) FOUR_WHOLE(d, j), FOUR_WHOLE(d, j + 1), FOUR_WHOLE(d, j + 2), FOUR_WHOLE(d, j + 3)
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
// One step of 16 float16 numbers: d (+)= a · N columns.
template <int N>
__device__ __forceinline__ void product(float (&d)[N / 8][4], const u32 (&a)[4], u64 columns, int add);
template <>
__device__ __forceinline__ void product<32>(float (&d)[4][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" NUMBERS_16
               "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<64>(float (&d)[8][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NUMBERS_32
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0), SIXTEEN(d, 4)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<128>(float (&d)[16][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NUMBERS_64
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)
               : GIVEN(a, columns, add));
}
// One step of 32 integers, keys' without a sign.
template <int N>
__device__ __forceinline__ void product(int (&d)[N / 8][4], const u32 (&a)[4], u64 columns, int add);
template <>
__device__ __forceinline__ void product<32>(int (&d)[4][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {" NUMBERS_16
               "}, {%16, %17, %18, %19}, %20, p;\n}"
               : SIXTEEN_WHOLE(d, 0)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<64>(int (&d)[8][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {" NUMBERS_32
               "}, {%32, %33, %34, %35}, %36, p;\n}"
               : SIXTEEN_WHOLE(d, 0), SIXTEEN_WHOLE(d, 4)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<128>(int (&d)[16][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {" NUMBERS_64
               "}, {%64, %65, %66, %67}, %68, p;\n}"
               : SIXTEEN_WHOLE(d, 0), SIXTEEN_WHOLE(d, 4), SIXTEEN_WHOLE(d, 8), SIXTEEN_WHOLE(d, 12)
               : GIVEN(a, columns, add));
}
#else
__device__ __forceinline__ u32 address_of_columns(const void* p) { return shared_address(p); }
#endif

// Where byte k of column n stands: 128 bytes a column, swizzled by 16.
__device__ __forceinline__ u32 byte_offset(u32 n, u32 k) { return n * 128 + (k / 16 ^ n % 8) * 16 + k % 16; }

// d += a · eight columns of 32 integers, by one warp: `low` and `high` are a lane's first and second four of its column.
__device__ __forceinline__ void add_products(int (&d)[4], const u32 (&a)[4], u32 low, u32 high) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

// Begins d = a · columns [first, first + N) of ALL, a being four steps of 32 integers without a sign.
template <int N, int ALL>
__device__ __forceinline__ void multiply(int (&d)[N / 8][4], const u32 (&a)[4][4], u32 columns, int first) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  products_begin();
#pragma unroll
  for (int s = 0; s < 4; s++) product<N>(d, a[s], (COLUMN_LAYOUT | columns) + (first * 128 + s * 32 >> 4), s > 0);
  products_commit();
#else
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 n = first + 8 * j + lane() / 4, k = 32 * s + lane() % 4 * 4;
      u32 low = load_word(columns + byte_offset(n, k)), high = load_word(columns + byte_offset(n, k + 16));
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
          : "r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3]), "r"(low), "r"(high));
    }
  }
#endif
}

// Begins d = a · columns [first, first + N) of ALL, a being eight steps of 16 numbers. Columns were written before, and
// the writers have met.
template <int N, int ALL>
__device__ __forceinline__ void multiply(float (&d)[N / 8][4], const u32 (&a)[8][4], u32 columns, int first) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  products_begin();
#pragma unroll
  for (int s = 0; s < 8; s++) product<N>(d, a[s], (COLUMN_LAYOUT | columns) + (first * 128 + s / 4 * ALL * 128 + s % 4 * 32 >> 4), s > 0);
  products_commit();
#else
  u32 n = lane() / 4, k = lane() % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) {
      u32 low = load_word(columns + column_offset(first + 8 * j + n, 16 * s + k, ALL));
      u32 high = load_word(columns + column_offset(first + 8 * j + n, 16 * s + k + 8, ALL));
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
