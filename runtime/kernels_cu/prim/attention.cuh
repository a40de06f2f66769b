// What attention adds to the prims: swizzled boxes, transposing loads and stores, a vote of named threads, tensor copies.
#pragma once
#include "memory.cuh"
#include "mma.cuh"
#include "pipeline.cuh"

#ifdef KCPU
#define DYNAMIC_SMEM_1024(name) unsigned char* name = (unsigned char*)kcpu::dynamic_smem
#else
#define DYNAMIC_SMEM_1024(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

namespace prim {

// A box is rows of 128 bytes whose 16-byte pieces are permuted by the row's low three bits, as the copy engine's 128-byte
// swizzle does: eight rows of one piece lie in eight different bank groups. PTX ISA, "Tensor swizzling modes".
__device__ __forceinline__ int in_box(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

#ifndef KCPU
// As ldmatrix_x4, each matrix transposed. PTX ISA, "ldmatrix".
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], smem_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
// Transposes an 8x8 matrix of 16-bit elements across the warp: before, lane 4 r + q holds elements 2 q, 2 q + 1 of row r.
// PTX ISA, "movmatrix".
__device__ __forceinline__ uint32_t transpose8(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ void sts32(smem_t a, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ float2 lds_f32x2(smem_t a) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void sts_f32x2(smem_t a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory"); }
__device__ __forceinline__ uint32_t lds_u32(smem_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
// Whether the phase of that parity is over, without waiting. PTX ISA, "mbarrier.test_wait".
__device__ __forceinline__ bool bar_test(smem_t b, uint32_t parity) {
  int r;
  asm volatile("{\n.reg .pred P;\nmbarrier.test_wait.parity.shared.b64 P, [%1], %2;\nselp.s32 %0, 1, 0, P;\n}" : "=r"(r) : "r"(b), "r"(parity) : "memory");
  return r != 0;
}
// This thread's earlier cp.async have landed. PTX ISA, "cp.async.wait_all".
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// As fence_async_proxy, for shared memory alone: 2 us less on an H200 while copies are on their way. PTX ISA, "fence.proxy.async".
__device__ __forceinline__ void fence_async_shared() {
#if PRIM_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Threads `count` that use the same id meet and learn whether any of them said yes. PTX ISA, "barrier.cta.red".
__device__ __forceinline__ bool named_any(int id, int count, bool yes) {
  int r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}"
               : "=r"(r) : "r"((int)yes), "r"(id), "r"(count) : "memory");
  return r != 0;
}
// Brings the line of p into L1, for a load to come. PTX ISA, "prefetch".
__device__ __forceinline__ void prefetch_near(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// v in a register from here on, not read from the constant bank where it is used.
__device__ __forceinline__ float held(float v) {
  asm volatile("" : "+f"(v));
  return v;
}
// 2**x. PTX ISA, "ex2".
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline void ldmatrix_x4_trans(uint32_t (&r)[4], smem_t a) {
  kcpu::warp_collective(&a, sizeof a, r, 16, [](kcpu::Warp& warp) {
    for (int m = 0; m < 4; m++) {
      for (int row = 0; row < 8; row++) {
        char* address;
        memcpy(&address, warp.in[8 * m + row], sizeof address);
        for (int column = 0; column < 8; column++) memcpy(warp.out[4 * column + row / 2] + 4 * m + 2 * (row % 2), address + 2 * column, 2);
      }
    }
  });
}
inline uint32_t transpose8(uint32_t v) {
  uint32_t r;
  kcpu::warp_collective(&v, 4, &r, 4, [](kcpu::Warp& warp) {
    for (int row = 0; row < 8; row++) {
      for (int column = 0; column < 8; column++) memcpy(warp.out[4 * column + row / 2] + 2 * (row % 2), warp.in[4 * row + column / 2] + 2 * (column % 2), 2);
    }
  });
  return r;
}
inline void sts32(smem_t a, uint32_t v) { memcpy(a, &v, 4); }
inline float2 lds_f32x2(smem_t a) { float2 v; memcpy(&v, a, 8); return v; }
inline void sts_f32x2(smem_t a, float x, float y) { memcpy(a, &x, 4); memcpy(a + 4, &y, 4); }
inline uint32_t lds_u32(smem_t a) { uint32_t v; memcpy(&v, a, 4); return v; }
inline bool named_any(int id, int count, bool yes) {
  static bool said[16];
  if (yes) said[id] = true;
  named_barrier(id, count);
  const bool any = said[id];
  named_barrier(id, count);
  said[id] = false;
  named_barrier(id, count);
  return any;
}
inline float exp2_fast(float x) { return exp2f(x); }
inline bool bar_test(smem_t b, uint32_t parity) {
  kcpu::yield();
  return (((volatile kcpu::Mbarrier*)b)->phase & 1) != parity;
}
inline void cp_async_wait() {}
inline void prefetch_near(const void*) {}
inline float held(float v) { return v; }
inline void fence_async_shared() {}
#endif

// The halves of a bf16 pair as float.
__device__ __forceinline__ float low_half(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_half(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ float2 pair(float x, float y) {
  float2 v;
  v.x = x;
  v.y = y;
  return v;
}

}  // namespace prim
