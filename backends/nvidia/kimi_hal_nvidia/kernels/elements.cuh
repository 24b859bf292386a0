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
  static constexpr int BYTES = 128, COLUMN = 256;
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

// MXFP4: 64 bytes a row, in four groups of 32 with a scale each. Numbers become e4m3 at 2^-6 of themselves, whose bits
// are the same: products of a group and their sums are exact in the matrix unit, also where it adds with few bits.
struct Fp4 {
  static constexpr int BYTES = 64, COLUMN = 128;

  // The largest of four exponents.
  static __device__ __forceinline__ u32 largest(u32 codes) {
    u32 two = __vmaxu4(codes, codes >> 16);
    return max(two & 255, two >> 8 & 255);
  }

  // Numbers 0, 2, 4, 6 of a word, and 1, 3, 5, 7.
  static __device__ __forceinline__ u32 even(u32 w) { return (w << 4 & 0x80808080u) | (w << 2 & 0x1c1c1c1cu); }
  static __device__ __forceinline__ u32 odd(u32 w) { return (w & 0x80808080u) | (w >> 2 & 0x1c1c1c1cu); }

  // Multiplies four e4m3 numbers by 2^12 times two float16 factors' product.
  static __device__ __forceinline__ u32 scaled(u32 four, u32 factor) {
    u32 low, high, result;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
    low = product_of_halves(low, factor);
    high = product_of_halves(high, factor);
    asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 l, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n"
        "mov.b32 %0, {l, h};\n}"
        : "=r"(result)
        : "r"(low), "r"(high));
    return result;
  }

  // Element i of a row as a float, by itself.
  static __device__ __forceinline__ float element(const unsigned char* row, int i) {
    u32 code = row[i / 2] >> (i % 2 * 4) & 15, magnitude = code & 7;
    float x = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((126 + (magnitude >> 1)) << 23 | (magnitude & 1) << 22);
    return code & 8 ? -x : x;
  }
};

// MXFP4 as float16: numbers times twice their scale relative to the largest.
struct Fp4Half {
  static constexpr int BYTES = 64, COLUMN = 256;
  static constexpr u32 LEAST = 20;  // powers of two below the largest scale down to which factors are exact

  // 2^7 / 2^below, twice.
  static __device__ __forceinline__ u32 factor(u32 below) { return (22 - min(below, LEAST + 1)) * 0x04000400u; }

  // The eight numbers of a word, in pairs: 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static __device__ __forceinline__ void decode(u32 (&to)[4], u32 word, u32 factor) {
    u32 two[2] = {Fp4::even(word), Fp4::odd(word)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
          : "=r"(to[2 * i]), "=r"(to[2 * i + 1])
          : "r"(two[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = product_of_halves(to[i], factor);
  }
};
