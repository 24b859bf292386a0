// Index elements as float16 or as integers of eight bits, in the order in which matrix fragments take them.
//
// A row of 128 numbers is shared out among the four lanes of a quad; lane c turns its bytes into steps of two words. Which number stands where is free, as long as keys and queries agree.
#pragma once
#include "block.cuh"

// A power of two from an e8m0 code; 255 is NaN.
__device__ __forceinline__ float power(u32 code) {
  return __uint_as_float(code == 255 ? 0x7fffffffu : code ? code << 23 : 0x00400000u);
}

// Bytes of two words by the nibbles of a third; a nibble's fourth bit repeats a byte's highest in place of it.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 nibbles) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(nibbles));
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

// MXFP4: 64 bytes a row, in four groups of 32 with a scale each. Twice an element is an integer up to 12; times up to eight
// it still is one of eight bits, whose products and sums are exact. Lane c has group c.
struct Fp4 {
  static constexpr int BYTES = 64, COLUMN = 128;
  static constexpr u32 LEAST = 3;  // powers of two below the largest of four scales down to which integers hold a group
  static constexpr int UNIT = 4;   // an integer is so many powers of two above an element times its scale over the largest
  static constexpr u32 BIAS = 0x80808080;  // of what `decode` gives

  // The largest of four exponents.
  static __device__ __forceinline__ u32 largest(u32 codes) {
    u32 two = __vmaxu4(codes, codes >> 16);
    return max(two & 255, two >> 8 & 255);
  }

  // What the eight magnitudes of a group become, and what 128 less them.
  struct Table {
    u32 low, high, rest_low, rest_high;

    // For a group so many powers of two below the largest, LEAST at most.
    __device__ __forceinline__ explicit Table(u32 below) {
      u32 unit = __funnelshift_r(8, 0, below);
      low = unit * 0x03020100;
      high = unit * 0x0c080604;
      rest_low = BIAS - low;
      rest_high = BIAS - high;
    }
  };

  // The first and the last four numbers of a word as bytes of 128 more than they are: twice the positive ones, and 128 less
  // every one's magnitude.
  static __device__ __forceinline__ void decode(u32& first, u32& last, u32 word, const Table& t) {
    u32 size = word & 0x77777777u;
    // A fourth bit repeats the byte's highest, which is 0.
    first = bytes_of(t.low, t.high, word) * 2 + bytes_of(t.rest_low, t.rest_high, size);
    last = bytes_of(t.low, t.high, word >> 16) * 2 + bytes_of(t.rest_low, t.rest_high, size >> 16);
  }

  // Element i of a row as a float, by itself.
  static __device__ __forceinline__ float element(const unsigned char* row, int i) {
    u32 code = row[i / 2] >> (i % 2 * 4) & 15, magnitude = code & 7;
    float x = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((126 + (magnitude >> 1)) << 23 | (magnitude & 1) << 22);
    return code & 8 ? -x : x;
  }
};
