// Tensor-core products by mma.sync, and the bf16 pair arithmetic that feeds them.
#pragma once
#include "platform.cuh"

namespace prim {

#ifndef KCPU
// c[16x8] += a[16x16] b[16x8]. Lane 4 g + c holds of a: rows g, g + 8, g, g + 8 at inputs 2 c, 2 c, 2 c + 8, 2 c + 8 (pairs);
// of b: inputs 2 c and 2 c + 8 of column g; of c: columns 2 c, 2 c + 1 of rows g and g + 8. PTX ISA, "mma.m16n8k16".
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two bf16 at a time; subnormals are kept. PTX ISA, "fma" and "mul" for bf16x2 (mul from sm_90 on, else an FMA with -0).
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return fma2(a, b, 0x80008000u);
#endif
}
// (low, high) rounded to nearest, ties to even.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// Bytes of (a, b) picked by the four nibbles of `pick`. PTX ISA, "prmt".
__device__ __forceinline__ uint32_t byte_pick(uint32_t a, uint32_t b, uint32_t pick) { return __byte_perm(a, b, pick); }
// One half in both halves; written as moves so that an FMA may take it as an operand selector.
__device__ __forceinline__ uint32_t twice_low(uint32_t v) {
  uint32_t d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));
  return d;
}
__device__ __forceinline__ uint32_t twice_high(uint32_t v) {
  uint32_t d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));
  return d;
}
__device__ __forceinline__ float exp_fast(float x) { return __expf(x); }
__device__ __forceinline__ float divide_fast(float a, float b) { return __fdividef(a, b); }
#else
inline float bf16_half(uint32_t packed, int half) { return __uint_as_float(half ? (packed & 0xffff0000u) : (packed << 16)); }
struct MmaLane { uint32_t a[4]; uint32_t b[2]; float c[4]; };
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaLane mine;
  memcpy(mine.a, a, 16);
  mine.b[0] = b0;
  mine.b[1] = b1;
  memcpy(mine.c, c, 16);
  kcpu::warp_collective(&mine, sizeof mine, c, 16, [](kcpu::Warp& warp) {
    MmaLane lanes[32];
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; lane++) {
      memcpy(&lanes[lane], warp.in[lane], sizeof(MmaLane));
      const MmaLane& x = lanes[lane];
      const int g = lane / 4, t = lane % 4;
      for (int half = 0; half < 2; half++) {
        const int k = 2 * t + half;
        for (int i = 0; i < 4; i++) A[g + 8 * (i & 1)][k + 8 * (i >> 1)] = bf16_half(x.a[i], half);
        for (int i = 0; i < 2; i++) B[k + 8 * i][g] = bf16_half(x.b[i], half);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      float result[4];
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        float sum = lanes[lane].c[i];
        for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][column];
        result[i] = sum;
      }
      memcpy(warp.out[lane], result, 16);
    }
  });
}
inline uint32_t round_bf16(double value) {  // by way of float only where that is exact enough: once, from double
  if (value != value) return 0x7fff;
  float f = (float)value;
  const uint32_t bits = __float_as_uint(f);
  uint32_t low = bits & 0xffff0000u;                                   // neighbours in bf16, towards and away from zero
  const double down = __uint_as_float(low), up = __uint_as_float(low + 0x10000u);
  const double a = value < 0 ? down - value : value - down, b = value < 0 ? value - up : up - value;
  if (b < a || (a == b && (low >> 16 & 1))) low += 0x10000u;
  return low >> 16;
}
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int h = 0; h < 2; h++) d |= round_bf16((double)bf16_half(a, h) * bf16_half(b, h) + bf16_half(c, h)) << (16 * h);
  return d;
}
inline uint32_t mul2(uint32_t a, uint32_t b) { return fma2(a, b, 0x80008000u); }
inline uint32_t pack_bf16(float low, float high) { return (uint32_t)__float2bfloat16(low).x | (uint32_t)__float2bfloat16(high).x << 16; }
inline uint32_t byte_pick(uint32_t a, uint32_t b, uint32_t pick) {
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) {
    const int n = pick >> (4 * i) & 7;
    d |= ((n < 4 ? a >> (8 * n) : b >> (8 * (n - 4))) & 255u) << (8 * i);
  }
  return d;
}
inline uint32_t twice_low(uint32_t v) { return byte_pick(v, 0, 0x1010); }
inline uint32_t twice_high(uint32_t v) { return byte_pick(v, 0, 0x3232); }
inline float exp_fast(float x) { return expf(x); }
inline float divide_fast(float a, float b) { return a / b; }
#endif

}  // namespace prim
