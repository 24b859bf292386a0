// Words at addresses of shared memory, which cost a register where a pointer costs two.
#pragma once
#include "block.cuh"

// A number that is not computed again wherever it is used.
__device__ __forceinline__ u32 kept(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ const void* pointer_to(u32 at) { return __cvta_shared_to_generic(at); }

__device__ __forceinline__ uint4 load_vector(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_word(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_half(u32 at) {
  u32 v;
  asm volatile("{\n.reg .u16 h;\nld.shared.u16 h, [%1];\ncvt.u32.u16 %0, h;\n}" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_byte(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_pair(u32 at, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
