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
// Two floats past L1: other blocks wrote them in this launch.
__device__ __forceinline__ float2 load_f32x2_cg(const float2* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
// Threads `count` that use the same id meet and learn whether any of them said yes. PTX ISA, "barrier.cta.red".
__device__ __forceinline__ bool named_any(int id, int count, bool yes) {
  int r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}"
               : "=r"(r) : "r"((int)yes), "r"(id), "r"(count) : "memory");
  return r != 0;
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
inline float2 load_f32x2_cg(const float2* p) { return *p; }
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

// ---------------------------------------------------------------- Hopper
#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PRIM_SM90A 1
namespace prim {

struct __align__(64) TensorMap { char bytes[128]; };  // CUtensorMap; a __grid_constant__ parameter

// A box of a two-dimensional tensor, written swizzled; bytes are counted on the barrier. PTX ISA, "cp.async.bulk.tensor".
__device__ __forceinline__ void tensor_copy(smem_t dst, const TensorMap& map, smem_t barrier, int column, int row, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
               "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}
// What is read once leaves L2 first. PTX ISA, "createpolicy".
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ uint64_t policy_evict_normal() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
  return p;
}
// PTX ISA, "setmaxnreg".
template <int N> __device__ __forceinline__ void lower_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
// Two 8x8 matrices, each transposed: lane 8 m + r gives the address of row r of matrix m. PTX ISA, "stmatrix" (sm_90).
__device__ __forceinline__ void stmatrix_x2_trans(smem_t a, uint32_t m0, uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(a), "r"(m0), "r"(m1) : "memory");
}

// Operand in boxes of 128-byte rows with 128-byte swizzle. PTX ISA, "Matrix descriptor".
__device__ __forceinline__ uint64_t box_operand(smem_t a, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32 | 1ull << 62;
}

// d[64 x 8 NB] = (accumulate ? d : 0) + a[64 x 16] b[16 x 8 NB], both from shared memory; A_BY_COLUMNS: a lies MN-major.
// PTX ISA, "wgmma.mma_async".
template <int NB, int A_BY_COLUMNS> __device__ __forceinline__ void wgmma_boxes(float (&d)[NB][4], uint64_t a, uint64_t b, int accumulate) {
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define IN "l"(a), "l"(b), "r"(accumulate), "n"(A_BY_COLUMNS)
#define WG(n, regs, x0, x1, x2, x3) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, " x0 ", " x1 ", p, 1, 1, " x3 ", 0;\n}"
#define R8 "%0,%1,%2,%3"
#define R16 R8 ",%4,%5,%6,%7"
#define R24 R16 ",%8,%9,%10,%11"
#define R32 R24 ",%12,%13,%14,%15"
#define R40 R32 ",%16,%17,%18,%19"
#define R48 R40 ",%20,%21,%22,%23"
#define R56 R48 ",%24,%25,%26,%27"
#define R64 R56 ",%28,%29,%30,%31"
#define R72 R64 ",%32,%33,%34,%35"
  static_assert(NB >= 1 && NB <= 9, "columns without an instruction here");
  if constexpr (NB == 1) WG(8, R8, "%4", "%5", "%6", "%7") : D4(0) : IN);
  if constexpr (NB == 2) WG(16, R16, "%8", "%9", "%10", "%11") : D4(0), D4(1) : IN);
  if constexpr (NB == 3) WG(24, R24, "%12", "%13", "%14", "%15") : D4(0), D4(1), D4(2) : IN);
  if constexpr (NB == 4) WG(32, R32, "%16", "%17", "%18", "%19") : D4(0), D4(1), D4(2), D4(3) : IN);
  if constexpr (NB == 5) WG(40, R40, "%20", "%21", "%22", "%23") : D4(0), D4(1), D4(2), D4(3), D4(4) : IN);
  if constexpr (NB == 6) WG(48, R48, "%24", "%25", "%26", "%27") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5) : IN);
  if constexpr (NB == 7) WG(56, R56, "%28", "%29", "%30", "%31") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6) : IN);
  if constexpr (NB == 8) WG(64, R64, "%32", "%33", "%34", "%35") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7) : IN);
  if constexpr (NB == 9) WG(72, R72, "%36", "%37", "%38", "%39") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8) : IN);
#undef D4
#undef IN
#undef WG
#undef R8
#undef R16
#undef R24
#undef R32
#undef R40
#undef R48
#undef R56
#undef R64
#undef R72
}

}  // namespace prim
#endif
