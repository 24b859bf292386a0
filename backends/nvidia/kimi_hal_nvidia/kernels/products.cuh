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

template <int N>
__device__ __forceinline__ void product(float (&d)[N / 8][4], const u32 (&a)[4], u64 columns, int add);

template <>
__device__ __forceinline__ void product<32>(float (&d)[4][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add));
}

template <>
__device__ __forceinline__ void product<64>(float (&d)[8][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add));
}

template <>
__device__ __forceinline__ void product<128>(float (&d)[16][4], const u32 (&a)[4], u64 columns, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63 "
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
        "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add));
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void product_of_bytes(float (&d)[4][4], const u32 (&a)[4], u64 columns) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
      "}, {%16, %17, %18, %19}, %20, p, 1, 1;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(0));
}
#endif

// Where byte k of column n stands: 128 bytes a column, swizzled by 16.
__device__ __forceinline__ u32 byte_offset(u32 n, u32 k) { return n * 128 + (k / 16 ^ n % 8) * 16 + k % 16; }

// Begins d = a · 32 columns from `first` on, over group `g` of 32 e4m3 numbers.
__device__ __forceinline__ void multiply_group(float (&d)[4][4], const u32 (&a)[4], const void* columns, int first,
                                               int g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  products_begin();
  product_of_bytes(d, a, descriptor(shared_address(columns) + first * 128) + g * 2);
  products_commit();
#else
  u32 n = lane() / 4, k = 32 * g + lane() % 4 * 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
    const char* at = static_cast<const char*>(columns);
    u32 low = *reinterpret_cast<const u32*>(at + byte_offset(first + 8 * j + n, k));
    u32 high = *reinterpret_cast<const u32*>(at + byte_offset(first + 8 * j + n, k + 16));
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
