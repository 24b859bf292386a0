// Index elements as float16, in the order in which matrix fragments take them.
//
// A row of 128 numbers is shared out among the four lanes of a quad; lane c turns its bytes into eight steps of two
// words. Which number stands where is free, as long as keys and queries agree.
#pragma once
#include "block.cuh"

// A power of two from an e8m0 code; 255 is NaN.
__device__ __forceinline__ float power(u32 code) {
  return __uint_as_float(code == 255 ? 0x7fffffffu : code ? code << 23 : 0x00400000u);
}

__device__ __forceinline__ u32 product_of_halves(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// FP8 e4m3fn: 128 bytes a row. Lane c has bytes 16 c to 16 c + 15 and the same 64 further on.
struct Fp8 {
  static constexpr int BYTES = 128;
  uint4 low, high;

  __device__ __forceinline__ void load(const unsigned char* row, u32 c) {
    low = *reinterpret_cast<const uint4*>(row + 16 * c);
    high = *reinterpret_cast<const uint4*>(row + 64 + 16 * c);
  }

  __device__ __forceinline__ void decode(u32 (&to)[8][2]) const {
    u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int s = 0; s < 8; s++) {
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
          : "=r"(to[s][0]), "=r"(to[s][1])
          : "r"(word[s]));
    }
  }
};

// MXFP4: 64 bytes a row, lane c has the 16 of group c, times 2^(its exponent − the largest of the row's four).
struct Fp4 {
  static constexpr int BYTES = 64;
  uint4 all;

  __device__ __forceinline__ void load(const unsigned char* row, u32 c) {
    all = *reinterpret_cast<const uint4*>(row + 16 * c);
  }

  // The largest of four exponents.
  static __device__ __forceinline__ u32 largest(u32 codes) {
    u32 two = __vmaxu4(codes, codes >> 16);
    return max(two & 255, two >> 8 & 255);
  }

  // False where float16 does not hold a number of this group beside the largest exponent.
  __device__ __forceinline__ bool decode(u32 (&to)[8][2], u32 codes, u32 c) const {
    u32 top = largest(codes), code = codes >> 8 * c & 255;
    int field = 29 - static_cast<int>(top - code);  // 2^14 · 2^(code − top): elements come as 2^−14 of themselves
    u32 factor = field > 0 ? field << 10 : field > -10 ? 512u >> -field : 0;
    factor *= 0x00010001u;
    u32 word[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 w = word[i];
      u32 even = (w << 4 & 0x80808080u) | (w << 1 & 0x0e0e0e0eu);  // high bytes of float16, of nibbles 0, 2, 4, 6
      u32 odd = (w & 0x80808080u) | (w >> 3 & 0x0e0e0e0eu);        // of nibbles 1, 3, 5, 7
      to[2 * i][0] = product_of_halves(even << 8 & 0xff00ff00u, factor);
      to[2 * i][1] = product_of_halves(even & 0xff00ff00u, factor);
      to[2 * i + 1][0] = product_of_halves(odd << 8 & 0xff00ff00u, factor);
      to[2 * i + 1][1] = product_of_halves(odd & 0xff00ff00u, factor);
    }
    bool zero = !((all.x | all.y | all.z | all.w) & 0x77777777u);
    return top - code <= 23 || zero;
  }

  // Element i of a row as a float, by itself.
  static __device__ __forceinline__ float element(const unsigned char* row, int i) {
    u32 code = row[i / 2] >> (i % 2 * 4) & 15, magnitude = code & 7;
    float x = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((126 + (magnitude >> 1)) << 23 | (magnitude & 1) << 22);
    return code & 8 ? -x : x;
  }
};
