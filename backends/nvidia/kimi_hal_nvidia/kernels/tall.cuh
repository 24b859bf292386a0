// Products whose tall operand is in registers: d[64 x N] += a[64 x 16] · b[16 x N], the 64 rows over a warpgroup.
//
// b is a step of a block [N][64] of float16 in shared memory, each row of 128 bytes swizzled by 16 bytes, the block
// aligned to 1,024. Hopper has wgmma; elsewhere the same fragments go through mma.sync.
#pragma once
#include "block.cuh"

// Where number k of column n of a block stands.
__device__ __forceinline__ u32 place(u32 n, u32 k) { return n * 128 + ((k >> 3 ^ n & 7) << 4) + (k & 7) * 2; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void tall_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tall_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void tall_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The low half of what a product is told of a block: its address, and 1; the high half says 1,024 bytes for eight columns
// and the swizzle. Steps are added to it, so that a product costs one addition and no more.
using Block = u32;
constexpr u32 LAYOUT = 0x40000040;
__device__ __forceinline__ Block block_at(const void* p) { return (shared_address(p) >> 4 & 0x3fff) | 1 << 16; }
__device__ __forceinline__ Block block_plus(Block block, int bytes) { return block + (bytes >> 4); }

// The same with the tall operand in shared memory too: rows of 64 of its 64 rows' numbers, one a step of the contraction,
// swizzled as b's are. It is read transposed.
__device__ __forceinline__ void tall_kept(float (&d)[2][4], Block a, Block block, int step) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.eq.u32 p, %10, %10;\nmov.b64 a, {%8, %10};\nmov.b64 b, {%9, %10};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, 1, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3])
      : "r"(a), "r"(block + 2 * step), "n"(LAYOUT));
}

template <int N>
__device__ __forceinline__ void tall(float (&d)[N / 8][4], const u32 (&a)[4], Block block, int step, bool add);

template <>
__device__ __forceinline__ void tall<16>(float (&d)[2][4], const u32 (&a)[4], Block block, int step, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %13, 0;\nmov.b64 b, {%12, %14};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, b, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(block + 2 * step), "r"(static_cast<int>(add)),
        "n"(LAYOUT));
}

template <>
__device__ __forceinline__ void tall<32>(float (&d)[4][4], const u32 (&a)[4], Block block, int step, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %22};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, b, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(block + 2 * step), "r"(static_cast<int>(add)),
        "n"(LAYOUT));
}

template <>
__device__ __forceinline__ void tall<48>(float (&d)[6][4], const u32 (&a)[4], Block block, int step, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %29, 0;\nmov.b64 b, {%28, %30};\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, b, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(block + 2 * step), "r"(static_cast<int>(add)),
        "n"(LAYOUT));
}
#else
using Block = u32;
__device__ __forceinline__ Block block_at(const void* p) { return shared_address(p); }
__device__ __forceinline__ Block block_plus(Block block, int bytes) { return block + bytes; }
__device__ __forceinline__ void tall_begin() {}
__device__ __forceinline__ void tall_commit() {}
template <int PENDING>
__device__ __forceinline__ void tall_done() {}

template <int N>
__device__ __forceinline__ void tall(float (&d)[N / 8][4], const u32 (&a)[4], Block block, int step, bool add) {
  u32 n = lane() >> 2, k = 16 * step + 2 * (lane() & 3);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    u32 low, high;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(low) : "r"(block + place(8 * j + n, k)));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(high) : "r"(block + place(8 * j + n, k + 8)));
    if (!add) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
  }
}

__device__ __forceinline__ void tall_kept(float (&d)[2][4], Block a, Block block, int step) {
  u32 row = (lane() & 7) + (lane() >> 4) * 8, chunk = 2 * (warp() & 3) + (lane() >> 3 & 1), part[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
               : "r"(a + place(row, 8 * chunk)));
  tall<16>(d, part, block, step, true);
}
#endif
