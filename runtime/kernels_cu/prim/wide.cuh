// Hopper's products with 128 columns: 64 rows times 16 keys times 128 value columns, B read by columns (sm_90a). Each has a CPU reference.
#pragma once
#include "hopper.cuh"

#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace prim {

// Four 8x8 matrices: lane 8 m + r gives the address of row r of matrix m, lane 4 r + q holds its elements 2 q, 2 q + 1.
// PTX ISA, "stmatrix" (sm_90).
__device__ __forceinline__ void stmatrix_x4(smem_t a, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D64(i) D4(i), D4(i + 1), D4(i + 2), D4(i + 3), D4(i + 4), D4(i + 5), D4(i + 6), D4(i + 7), D4(i + 8), D4(i + 9), D4(i + 10), D4(i + 11), D4(i + 12), D4(i + 13), D4(i + 14), D4(i + 15)
#define TEN(t) ",%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define R64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9" TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) ",%60,%61,%62,%63}"
// d[64 x 128 HALF ..] += a[64 x 16] b[16 x 128], a by rows; d[n] holds columns 8 n .. 8 n + 7 as mma.m16n8k16 does. PTX ISA, "wgmma.mma_async".
template <int HALF> __device__ __forceinline__ void wgmma_wide(float (&d)[32][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64 ", %64, %65, 1, 1, 1, 0, 1;" : D64(16 * HALF) : "l"(a), "l"(b));
}
// The same with a from registers.
template <int HALF> __device__ __forceinline__ void wgmma_wide(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : D64(16 * HALF) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef D4
#undef D64
#undef TEN
#undef R64

}  // namespace prim
#elif defined(KCPU)
namespace prim {

inline void stmatrix_x4(smem_t a, const uint32_t (&m)[4]) {
  struct Lane { smem_t a; uint32_t m[4]; } mine{a, {m[0], m[1], m[2], m[3]}};
  kcpu::warp_collective(&mine, sizeof mine, nullptr, 0, [](kcpu::Warp& warp) {
    for (int k = 0; k < 4; k++) {
      for (int row = 0; row < 8; row++) {
        Lane asks, holds;
        memcpy(&asks, warp.in[8 * k + row], sizeof asks);
        for (int q = 0; q < 4; q++) {
          memcpy(&holds, warp.in[4 * row + q], sizeof holds);
          memcpy(asks.a + 4 * q, &holds.m[k], 4);
        }
      }
    }
  });
}
// left: rows g and g + 8 of a, 16 inputs each.
template <int HALF> inline void add_wide(float (&d)[32][4], const float (&left)[2][16], uint64_t b) {
  for (int n = 16 * HALF; n < 16 * HALF + 16; n++) {
    for (int e = 0; e < 2; e++) {
      for (int k = 0; k < 16; k++) {
        const float right = operand_element(b, 8 * (n - 16 * HALF) + 2 * (threadIdx.x % 4) + e, k, true);
        d[n][e] += left[0][k] * right;
        d[n][2 + e] += left[1][k] * right;
      }
    }
  }
}
template <int HALF> inline void wgmma_wide(float (&d)[32][4], uint64_t a, uint64_t b) {
  float left[2][16];
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++) left[h][k] = operand_element(a, row + 8 * h, k, false);
  add_wide<HALF>(d, left, b);
}
template <int HALF> inline void wgmma_wide(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
  uint32_t quad[4][4];
  kcpu::warp_collective(a, 16, quad, 64, [](kcpu::Warp& warp) {
    for (int lane = 0; lane < 32; lane++)
      for (int q = 0; q < 4; q++) memcpy(warp.out[lane] + 16 * q, warp.in[lane / 4 * 4 + q], 16);
  });
  float left[2][16];
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++) left[h][k] = bf16_half(quad[k % 8 / 2][h + 2 * (k / 8)], k % 2);
  add_wide<HALF>(d, left, b);
}

}  // namespace prim
#endif

namespace prim {

// threadIdx.x, read where it stands: what is computed from it is not kept in registers over a loop that does not need it.
__device__ __forceinline__ int thread_here() {
#ifndef KCPU
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
#else
  return threadIdx.x;
#endif
}
// The operand `bytes` further on. Addresses fit the low word, so no carry: 32-bit additions, the high word stays a constant.
__device__ __forceinline__ uint64_t operand_plus(uint64_t d, uint32_t bytes) { return (d >> 32 << 32) | (uint32_t)((uint32_t)d + (bytes >> 4)); }
// Whether any lane of the warp says yes.
__device__ __forceinline__ bool warp_any(bool yes) {
#ifndef KCPU
  return __any_sync(0xffffffffu, yes);
#else
  int any = yes;
  for (int d = 1; d < 32; d *= 2) any |= __shfl_xor_sync(0xffffffffu, any, d);
  return any;
#endif
}
// Lane q of each four holds the q-th part of four things; afterwards it holds the q-th thing's four parts.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int q) {
#pragma unroll
  for (int d = 1; d <= 2; d *= 2) {
    const bool high = q & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t x = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i | d], d);
      if (high) v[i] = x;
      else v[i | d] = x;
    }
  }
}

}  // namespace prim
