// Matrix products of a warpgroup: 64 rows in registers, N columns in shared memory, float32 sums in registers.
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
// and the swizzle. Steps are added to it, so that a product costs one addition and no more.
constexpr u32 COLUMN_LAYOUT = 0x40000040;
__device__ __forceinline__ u32 address_of_columns(const void* p) { return (shared_address(p) >> 4 & 0x3fff) | 1 << 16; }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SIXTEEN(d, j) FOUR(d, j), FOUR(d, j + 1), FOUR(d, j + 2), FOUR(d, j + 3)
#define GIVEN(a, columns, add) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(columns), "r"(add), "n"(COLUMN_LAYOUT)
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
template <int N>
__device__ __forceinline__ void product(float (&d)[N / 8][4], const u32 (&a)[4], u32 columns, int add);
template <>
__device__ __forceinline__ void product<32>(float (&d)[4][4], const u32 (&a)[4], u32 columns, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %22};\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" NUMBERS_16
               "}, {%16, %17, %18, %19}, b, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<64>(float (&d)[8][4], const u32 (&a)[4], u32 columns, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %38};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NUMBERS_32
               "}, {%32, %33, %34, %35}, b, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0), SIXTEEN(d, 4)
               : GIVEN(a, columns, add));
}
template <>
__device__ __forceinline__ void product<128>(float (&d)[16][4], const u32 (&a)[4], u32 columns, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, %70};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NUMBERS_64
               "}, {%64, %65, %66, %67}, b, p, 1, 1, 0;\n}"
               : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)
               : GIVEN(a, columns, add));
}
__device__ __forceinline__ void product_of_bytes(float (&d)[4][4], const u32 (&a)[4], u32 columns, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %22};\n"
               "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" NUMBERS_16
               "}, {%16, %17, %18, %19}, b, p, 1, 1;\n}"
               : SIXTEEN(d, 0)
               : GIVEN(a, columns, add));
}
#else
__device__ __forceinline__ u32 address_of_columns(const void* p) { return shared_address(p); }
#endif

// Where byte k of column n stands: 128 bytes a column, swizzled by 16.
__device__ __forceinline__ u32 byte_offset(u32 n, u32 k) { return n * 128 + (k / 16 ^ n % 8) * 16 + k % 16; }

// Begins d = a · 32 columns from `first` on, over group `g` of 32 e4m3 numbers. Columns are known by `address_of_columns`.
__device__ __forceinline__ void multiply_group(float (&d)[4][4], const u32 (&a)[4], u32 columns, int first, int g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  products_begin();
  product_of_bytes(d, a, columns + first * 8 + g * 2, 0);
  products_commit();
#else
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 n = first + 8 * j + lane() / 4, k = 32 * g + lane() % 4 * 4;
    u32 low = load_word(columns + byte_offset(n, k)), high = load_word(columns + byte_offset(n, k + 16));
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
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
  for (int s = 0; s < 8; s++) product<N>(d, a[s], columns + (first * 128 + s / 4 * ALL * 128 + s % 4 * 32 >> 4), s > 0);
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
