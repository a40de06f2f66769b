// Hopper's copies of boxes and products straight from shared memory (sm_90a), each with a CPU reference.
//
// On the CPU a descriptor means what it means on the GPU: the reference decodes it, so wrong strides show there.
#pragma once
#include "attention.cuh"
#include "wgmma.cuh"

#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace prim {

struct __align__(64) TensorMap { char bytes[128]; };  // CUtensorMap; a __grid_constant__ parameter

// Brings a map near before the first copy needs it; parameters may be read before the launch's predecessor ends.
// PTX ISA, "prefetch.tensormap".
__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
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
template <int N> __device__ __forceinline__ void raise_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
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
#elif defined(KCPU)
namespace prim {

struct TensorMap {  // of a [rows, columns] array of 16-bit elements, in boxes of box_rows x 64
  const char* at;
  int rows, box_rows, columns = 576, row_bytes = 1152;
};
inline void bar_expect(smem_t b, uint32_t bytes) {
  kcpu::mbarrier_expect(b, bytes);
  bar_arrive(b);
}
inline void tensor_copy(smem_t dst, const TensorMap& map, smem_t barrier, int column, int row, uint64_t) {
  for (int r = 0; r < map.box_rows; r++) {
    const int left = row + r < map.rows ? 2 * std::max(0, std::min(64, map.columns - column)) : 0;  // bytes inside
    char line[128] = {};
    if (left) memcpy(line, map.at + (size_t)(row + r) * map.row_bytes + column * 2, left);
    for (int piece = 0; piece < 8; piece++) memcpy(dst + in_box(r, piece), line + piece * 16, 16);
  }
  kcpu::mbarrier_expect(barrier, -128 * map.box_rows);
}
inline void prefetch_map(const TensorMap&) {}
inline uint64_t policy_evict_first() { return 0; }
inline uint64_t policy_evict_normal() { return 0; }
template <int N> inline void lower_registers() {}
template <int N> inline void raise_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING> inline void wgmma_wait() {}
inline void stmatrix_x2_trans(smem_t a, uint32_t m0, uint32_t m1) {
  struct Lane { smem_t a; uint32_t m[2]; } mine{a, {m0, m1}};
  kcpu::warp_collective(&mine, sizeof mine, nullptr, 0, [](kcpu::Warp& warp) {
    for (int m = 0; m < 2; m++) {
      for (int row = 0; row < 8; row++) {
        Lane asks, holds;
        memcpy(&asks, warp.in[8 * m + row], sizeof asks);
        for (int i = 0; i < 8; i++) {
          memcpy(&holds, warp.in[4 * i + row / 2], sizeof holds);
          memcpy(asks.a + 2 * i, (char*)&holds.m[m] + 2 * (row % 2), 2);
        }
      }
    }
  });
}
inline uint64_t box_operand(smem_t a, uint32_t lbo, uint32_t sbo) {
  const uint64_t offset = a - kcpu::dynamic_smem;
  return (offset & 0x3FFFF) >> 4 | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32 | 1ull << 62;
}
// Element (i, k) of an operand: i counts along M or N. By rows, 8 of them are 1024 bytes and the next 8 lie `sbo` on; by
// columns, a k has 64 of them in 128 bytes and the next 8 k lie `sbo` on. The swizzle acts on the address.
inline float operand_element(uint64_t descriptor, int i, int k, bool by_columns) {
  const uint32_t start = (descriptor & 0x3FFF) << 4, sbo = (descriptor >> 32 & 0x3FFF) << 4, lbo = (descriptor >> 16 & 0x3FFF) << 4;
  uint32_t at = by_columns ? start + k / 8 * sbo + k % 8 * 128 + i % 64 * 2 + i / 64 * lbo : start + i / 8 * sbo + i % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  memcpy(&bits, kcpu::dynamic_smem + at, 2);
  return __uint_as_float((uint32_t)bits << 16);
}
template <int NB, int A_BY_COLUMNS> inline void wgmma_boxes(float (&d)[NB][4], uint64_t a, uint64_t b, int accumulate) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int e = 0; e < 4; e++) {
    const int row = 16 * warp + lane / 4 + 8 * (e / 2);
    float left[16];
    for (int k = 0; k < 16; k++) left[k] = operand_element(a, row, k, A_BY_COLUMNS);
    for (int n = 0; n < NB; n++) {
      float sum = accumulate ? d[n][e] : 0.f;
      for (int k = 0; k < 16; k++) sum += left[k] * operand_element(b, 8 * n + 2 * (lane % 4) + e % 2, k, false);
      d[n][e] = sum;
    }
  }
}

}  // namespace prim
#endif
