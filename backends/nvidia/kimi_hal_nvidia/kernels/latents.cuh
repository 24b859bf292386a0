// Formats of latents: how a thread takes numbers of a key as float16, for either product.
//
// In S = K Qt keys are the tall operand's rows and the contraction's order is free, so a thread takes the neighbouring
// bytes of its two keys. In O^T = V^T Pt latents are the rows, and a thread takes the neighbouring latents of four keys.
#pragma once
#include <cuda_fp16.h>

#include "block.cuh"

constexpr int LATENT = 512, SHARED = 64, WIDTH = LATENT + SHARED;
constexpr int BLOCKS = WIDTH / 64;  // of the contraction of S

__device__ __forceinline__ u32 halves_of(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
  return pair;
}

// Of the four bytes of a word, two and two.
__device__ __forceinline__ void halves_of(u32& low, u32& high, u32 codes) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

__device__ __forceinline__ u32 times(u32 pair, u32 scale) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale));
  return product;
}

// The same by one number of a pair, the lower or the UPPER one, which an instruction takes from there.
template <bool UPPER>
__device__ __forceinline__ u32 times_one(u32 pair, u32 two) {
  u32 product;
  if constexpr (UPPER)
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.rn.f16x2 %0, %1, s;\n}"
        : "=r"(product)
        : "r"(pair), "r"(two));
  else
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.rn.f16x2 %0, %1, s;\n}"
        : "=r"(product)
        : "r"(pair), "r"(two));
  return product;
}

// Where the keys of a lane's two rows of 16 stand: neighbours of a phase of a load lie two rows apart, eight lanes' keys
// in different banks.
__device__ __forceinline__ int key_of(int g) { return (g & 4) | (g & 1) << 1 | (g >> 1 & 1); }

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i < 2 ? i ? v.y : v.x : i > 2 ? v.w : v.z; }

// Of 16 bytes of two keys, STEPS of the four steps of S from `first` on.
template <int STEPS>
__device__ __forceinline__ void decode_bytes(u32 (&a)[STEPS][4], uint4 low, uint4 high, int first) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    halves_of(a[s][0], a[s][2], word_of(low, first + s));
    halves_of(a[s][1], a[s][3], word_of(high, first + s));
  }
}

// Position of number `e` of a block of 64 bytes in that block's order.
__device__ __forceinline__ int byte_position(int e) { return (e & 12) << 2 | (e & 2) << 2 | (e >> 4) << 1 | (e & 1); }

// Latents of a tensor's scale: 576 bytes, one a number. In shared memory rows are 6 or 5 chunks of 16 bytes modulo 8 apart.
template <int STRIDE_>
struct Bytes {
  static constexpr int BYTES = 576, STRIDE = STRIDE_;
  static_assert(STRIDE / 16 % 8 == 6 || STRIDE / 16 % 8 == 5, "in different banks");
  static __device__ __forceinline__ int key_of(int g) {
    return STRIDE / 16 % 8 == 6 ? ::key_of(g) : (g & 1) << 2 | (g & 2) | g >> 2;
  }

  // Where element e of a query stands in the contraction.
  static __device__ __forceinline__ int position(int e) { return (e & ~63) | byte_position(e & 63); }

  // Of two keys' rows, `row` and eight behind it. A block is read before it is decoded, so that nothing waits for it.
  struct Keys {
    const unsigned char* row;
    uint4 low[2], high[2];
    __device__ __forceinline__ Keys(const unsigned char* tile, int key) : row(tile + key * STRIDE + 16 * (lane() & 3)) {}
    __device__ __forceinline__ void read(int block) {
      low[block & 1] = *reinterpret_cast<const uint4*>(row + 64 * block);
      high[block & 1] = *reinterpret_cast<const uint4*>(row + 8 * STRIDE + 64 * block);
    }
    template <int STEPS>
    __device__ __forceinline__ void take(u32 (&a)[STEPS][4], int block, int first) const {
      decode_bytes(a, low[block & 1], high[block & 1], first);
    }
  };

  // Of two keys that stand in shared memory, APART bytes each: eight lanes' bytes in different banks. Two blocks are read ahead,
  // `which` says where a block's are; what is read behind the last is not used.
  static constexpr int APART = 576;
  struct Laid {
    const unsigned char* row;
    uint4 low[2], high[2];
    __device__ __forceinline__ Laid(const unsigned char* keys, int key) : row(keys + key * APART + 16 * (lane() & 3)) {}
    __device__ __forceinline__ void read(int which, int block) {
      low[which] = *reinterpret_cast<const uint4*>(row + 64 * block);
      high[which] = *reinterpret_cast<const uint4*>(row + 8 * APART + 64 * block);
    }
    __device__ __forceinline__ void begin() { read(0, 0), read(1, 1); }
    __device__ __forceinline__ void take(u32 (&a)[4][4], int which, int block) {
      decode_bytes(a, low[which], high[which], 0);
      read(which, block + 2);
    }
  };

  // Which latent is number `at` of a block, of the 64 that stand in the contraction.
  static __device__ __forceinline__ int latent(int block, int at) {
    return 64 * block + ((at & 6) << 3 | (at & 48) >> 2 | (at & 8) >> 2 | at & 1);
  }

  // Of 16 keys, this thread's four; COUNT latents, 16 or 8, from COUNT · `chunk` on. Tile i of the rows holds latents 2 i
  // and 2 i + 1.
  template <int COUNT>
  struct Values {
    u32 w[4][COUNT / 4];
    __device__ __forceinline__ void read(const unsigned char* tile, int base, int chunk) {
      int t = lane() & 3;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int key = base + key_of(t + 4 * (k >> 1)) + 8 * (k & 1);
        const unsigned char* at = tile + key * STRIDE + COUNT * chunk;
        if constexpr (COUNT == 16) {
          uint4 v = *reinterpret_cast<const uint4*>(at);
          w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
        } else {
          uint2 v = *reinterpret_cast<const uint2*>(at);
          w[k][0] = v.x, w[k][1] = v.y;
        }
      }
    }
    __device__ __forceinline__ void take(u32 (&a)[4], int i) const {
      u32 choice = i & 1 ? 0x7362 : 0x5140;
      u32 first = __byte_perm(w[0][i >> 1], w[1][i >> 1], choice), second = __byte_perm(w[2][i >> 1], w[3][i >> 1], choice);
      halves_of(a[0], a[1], first);
      halves_of(a[2], a[3], second);
    }
  };
};

using Fp8 = Bytes<608>;

// The low or the high nibbles of a word as e4m3 numbers, 2^6 smaller than the e2m1 that they are: sign, exponent and
// mantissa only move, since e4m3's subnormal numbers continue its others as e2m1's do.
__device__ __forceinline__ u32 bytes_of_low(u32 x) { return (x << 4 & 0x80808080u) | (x << 2 & 0x1c1c1c1cu); }
__device__ __forceinline__ u32 bytes_of_high(u32 x) { return (x & 0x80808080u) | (x >> 2 & 0x1c1c1c1cu); }

// Scales of two latents, e4m3 in the low bytes of a word, times the 2^6 above.
__device__ __forceinline__ u32 scales_of(u32 codes) { return times(halves_of(codes), 0x54005400u); }

// 256 bytes of e2m1, 64 of e4m3, and a scale for each 16 latents: of latents 16 s on at byte 320 + 8 (s mod 4) + s / 4.
struct Nvfp4 {
  static constexpr int BYTES = 352, STRIDE = 352;
  static __device__ __forceinline__ int key_of(int g) { return ::key_of(g); }

  // A thread has 32 neighbouring numbers of 128, sixteen a block; of a word's eight, the lower four are a step and the
  // higher four another, those of low nibbles before those of high ones, as pairs (n, n + 2).
  static __device__ __forceinline__ int position(int e) {
    if (e >= LATENT) return LATENT + byte_position(e - LATENT);
    int t = e >> 5 & 3, step = e >> 2 & 3;
    return (e >> 7) * 128 + (e >> 4 & 1) * 64 + step * 16 + (e & 1) * 8 + 2 * t + (e >> 1 & 1);
  }

  // Which latent is number `at` of a block, of the 64 that stand in the contraction.
  static __device__ __forceinline__ int latent(int block, int at) {
    return (block >> 1) * 128 + (block & 1) * 16 + ((at & 6) << 4 | (at & 48) >> 2 | (at & 1) << 1 | at >> 3 & 1);
  }

  struct Keys {
    const unsigned char* row;
    uint4 scale[2];  // of both rows: bytes 0 to 7 of first halves, 8 to 15 of second
    uint4 low[2], high[2];
    __device__ __forceinline__ Keys(const unsigned char* tile, int key) : row(tile + key * STRIDE + 16 * (lane() & 3)) {
      const unsigned char* scales = tile + key * STRIDE + 320 + 16 * (lane() & 1);
      scale[0] = *reinterpret_cast<const uint4*>(scales);
      scale[1] = *reinterpret_cast<const uint4*>(scales + 8 * STRIDE);
    }
    __device__ __forceinline__ void read(int block) {
      if (block & 1) return;
      low[block >> 1 & 1] = *reinterpret_cast<const uint4*>(row + 32 * block);
      high[block >> 1 & 1] = *reinterpret_cast<const uint4*>(row + 8 * STRIDE + 32 * block);
    }
    template <int STEPS>
    __device__ __forceinline__ void take(u32 (&a)[STEPS][4], int block, int first) const {
      decode(a, low[block >> 1 & 1], high[block >> 1 & 1], scale, block, first);
    }
  };

  // The scales of block `block` of both rows.
  static __device__ __forceinline__ u32 factors(const uint4 (&codes)[2], int block) {
    int word = 2 * (block & 1) + (block >> 2);
    u32 at = (block & 2) + (lane() >> 1 & 1);  // byte 2 j + t / 2, j = block / 2
    return scales_of(__byte_perm(word_of(codes[0], word), word_of(codes[1], word), at * 0x11 + 0x40));
  }

  template <int STEPS>
  static __device__ __forceinline__ void decode(u32 (&a)[STEPS][4], uint4 l, uint4 h, const uint4 (&scale)[2], int block,
                                                int first) {
    if (block == BLOCKS - 1) return decode_bytes(a, l, h, first);
    decode_nibbles(a, l, h, factors(scale, block), block & 1, first);
  }

  // The same of the first or second of two blocks, with scales of both keys.
  template <int STEPS>
  static __device__ __forceinline__ void decode_nibbles(u32 (&a)[STEPS][4], uint4 l, uint4 h, u32 scales, int which, int first) {
    static_assert(STEPS % 2 == 0, "a word is two steps");
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
      int word = 2 * which + (first + s >> 1);
      u32 x = word_of(l, word), y = word_of(h, word);
      halves_of(a[s][0], a[s + 1][0], bytes_of_low(x));
      halves_of(a[s][1], a[s + 1][1], bytes_of_low(y));
      halves_of(a[s][2], a[s + 1][2], bytes_of_high(x));
      halves_of(a[s][3], a[s + 1][3], bytes_of_high(y));
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        u32 &one = a[s + i / 4][i % 4], &other = a[s + i / 4][i % 4 + 1];
        one = times_one<false>(one, scales), other = times_one<true>(other, scales);
      }
    }
  }

  static constexpr int APART = 448;
  struct Laid {
    const unsigned char *row, *scales;
    uint4 low, high;  // of two blocks
    u32 code[2][2];  // by block and key
    __device__ __forceinline__ Laid(const unsigned char* keys, int key)
        : row(keys + key * APART + 16 * (lane() & 3)), scales(keys + key * APART + 320 + 16 * (lane() & 1) + (lane() >> 1 & 1)) {}
    __device__ __forceinline__ void read(int which, int block) {
      const unsigned char* from = scales + 8 * which + (block & ~1);
      code[which][0] = from[0], code[which][1] = from[8 * APART];
    }
    __device__ __forceinline__ void read_two(int block) {
      low = *reinterpret_cast<const uint4*>(row + 32 * block), high = *reinterpret_cast<const uint4*>(row + 8 * APART + 32 * block);
    }
    __device__ __forceinline__ void begin() { read(0, 0), read(1, 1), read_two(0); }
    __device__ __forceinline__ void take(u32 (&a)[4][4], int which, int block) {
      if (which == 0 && block == BLOCKS - 1) return decode_bytes(a, low, high, 0);
      decode_nibbles(a, low, high, scales_of(code[which][0] | code[which][1] << 8), which, 0);
      read(which, block + 2);
      if (which) read_two(block + 1);
    }
  };

  template <int COUNT>
  struct Values {
    u32 w[4][COUNT / 8], scale[2];
    __device__ __forceinline__ void read(const unsigned char* tile, int base, int chunk) {
      int t = lane() & 3, block = COUNT == 16 ? chunk : chunk >> 1;
      u32 code[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int key = base + key_of(t + 4 * (k >> 1)) + 8 * (k & 1);
        const unsigned char* at = tile + key * STRIDE + COUNT / 2 * chunk;
        if constexpr (COUNT == 16) {
          uint2 v = *reinterpret_cast<const uint2*>(at);
          w[k][0] = v.x, w[k][1] = v.y;
        } else {
          w[k][0] = *reinterpret_cast<const u32*>(at);
        }
        code[k] = tile[key * STRIDE + 320 + 8 * (block & 3) + (block >> 2)];
      }
      scale[0] = scales_of(code[0] | code[1] << 8), scale[1] = scales_of(code[2] | code[3] << 8);
    }
    __device__ __forceinline__ void take(u32 (&a)[4], int i) const {
      u32 choice = i & 2 ? 0x7362 : 0x5140;
      u32 first = __byte_perm(w[0][i >> 2], w[1][i >> 2], choice), second = __byte_perm(w[2][i >> 2], w[3][i >> 2], choice);
      u32 two = __byte_perm(first, second, i & 1 ? 0x7632 : 0x5410);  // latents 2 i and 2 i + 1 of four keys
      halves_of(a[0], a[2], bytes_of_low(two));
      halves_of(a[1], a[3], bytes_of_high(two));
#pragma unroll
      for (int n = 0; n < 4; ++n) a[n] = times(a[n], scale[n >> 1]);
    }
  };
};
