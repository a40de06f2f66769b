// Loads and stores with a chosen width, order or proxy.
#pragma once
#include "platform.cuh"

namespace prim {

#ifndef KCPU
// 16 bytes of shared memory in one instruction. PTX ISA, "ld".
__device__ __forceinline__ uint4 lds128(smem_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ uint2 lds64(smem_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ float lds_f32(smem_t a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void sts_f32(smem_t a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
__device__ __forceinline__ void sts128(smem_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane 8 m + r gives the address of row r of matrix m, lane 4 r + q receives
// elements 2 q, 2 q + 1 of row r of matrix m in r[m]. PTX ISA, "ldmatrix".
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], smem_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}

// A counter that other blocks raise: read with acquire, raise with release, at device scope. PTX ISA, "Memory consistency".
__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(int* p, int v) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void spin_pause() {
#if __CUDA_ARCH__ >= 700
  asm volatile("nanosleep.u32 20;");
#endif
}
// Waits until the counter has reached `least`; traps after seconds rather than hang the device.
__device__ __forceinline__ void wait_count(const int* p, int least) {
  for (int n = 0; load_acquire(p) < least; ++n) {
    if (n == 8000000) asm volatile("trap;");
    spin_pause();
  }
}
// 16 bytes of global memory past L1: written in this launch by other blocks, or read once.
__device__ __forceinline__ uint4 ldg128_cg(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// The largest or smallest of the warp's 32 numbers. PTX ISA, "redux.sync" (sm_80).
__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
  uint32_t r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ uint32_t warp_min(uint32_t v) {
  uint32_t r;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
#else
inline uint32_t warp_max(uint32_t v) {
  for (int d = 16; d; d /= 2) { const uint32_t o = __shfl_xor_sync(0xffffffffu, v, d); v = o > v ? o : v; }
  return v;
}
inline uint32_t warp_min(uint32_t v) {
  for (int d = 16; d; d /= 2) { const uint32_t o = __shfl_xor_sync(0xffffffffu, v, d); v = o < v ? o : v; }
  return v;
}
inline uint4 lds128(smem_t a) { uint4 v; memcpy(&v, a, 16); return v; }
inline uint2 lds64(smem_t a) { uint2 v; memcpy(&v, a, 8); return v; }
inline float lds_f32(smem_t a) { float v; memcpy(&v, a, 4); return v; }
inline void sts_f32(smem_t a, float v) { memcpy(a, &v, 4); }
inline void sts128(smem_t a, uint4 v) { memcpy(a, &v, 16); }
inline void ldmatrix_x4(uint32_t (&r)[4], smem_t a) {
  kcpu::warp_collective(&a, sizeof a, r, 16, [](kcpu::Warp& warp) {
    for (int m = 0; m < 4; m++) {
      for (int row = 0; row < 8; row++) {
        char* address;
        memcpy(&address, warp.in[8 * m + row], sizeof address);
        for (int q = 0; q < 4; q++) memcpy(warp.out[4 * row + q] + 4 * m, address + 4 * q, 4);
      }
    }
  });
}
inline int load_acquire(const int* p) { return *(const volatile int*)p; }
inline void add_release(int* p, int v) { *p += v; }
inline void spin_pause() {
  static long spins = 0;
  if (++spins % kcpu::SPIN_LIMIT == 0) kcpu::deadlock("a wait for another block");
  kcpu::yield();
}
inline void wait_count(const int* p, int least) {
  while (load_acquire(p) < least) spin_pause();
}
inline uint4 ldg128_cg(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
#endif

// Bits whose unsigned order is the order of floats.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u);
}

}  // namespace prim
