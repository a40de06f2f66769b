// Hopper's warpgroup product, A from registers. sm_90a only; for 8 to 96 columns in eights (from 64 on in sixteens).
#pragma once
#include "platform.cuh"

namespace prim {
// A warpgroup gives registers back or takes them. PTX ISA, "setmaxnreg".
template <bool YES> __device__ __forceinline__ void fewer_registers() {
#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (YES) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}
template <bool YES> __device__ __forceinline__ void more_registers() {
#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (YES) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}
}  // namespace prim

#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PRIM_WGMMA 1
namespace prim {

// Shared-memory operand without swizzle, K-major: 8 columns x 16 bytes are 128 contiguous bytes; `lbo` bytes lead to the
// next 8 inputs, `sbo` to the next 8 columns. PTX ISA, "Matrix descriptor".
__device__ __forceinline__ uint64_t wgmma_operand(smem_t a, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(sbo >> 4) << 32;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// d[64 x 8 NB] += a[64 x 16] b[16 x 8 NB]; warp w of the group holds rows 16 w .. 16 w + 15 as in mma.m16n8k16.
// PTX ISA, "wgmma.mma_async".
template <int NB> __device__ __forceinline__ void wgmma(float (&d)[NB][4], const uint32_t (&a)[4], uint64_t b) {
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define WG(n, regs, x0, x1, x2, x3, x4) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, {" x0 "," x1 "," x2 "," x3 "}, " x4 ", 1, 1, 1, 0;"
#define R8 "%0,%1,%2,%3"
#define R16 R8 ",%4,%5,%6,%7"
#define R24 R16 ",%8,%9,%10,%11"
#define R32 R24 ",%12,%13,%14,%15"
#define R40 R32 ",%16,%17,%18,%19"
#define R48 R40 ",%20,%21,%22,%23"
#define R56 R48 ",%24,%25,%26,%27"
#define R64 R56 ",%28,%29,%30,%31"
#define R72 R64 ",%32,%33,%34,%35"
#define R80 R72 ",%36,%37,%38,%39"
#define R88 R80 ",%40,%41,%42,%43"
#define R96 R88 ",%44,%45,%46,%47"
  static_assert(NB <= 8 || NB == 10 || NB == 12, "columns without an instruction here");
  if constexpr (NB == 1) WG(8, R8, "%4", "%5", "%6", "%7", "%8") : D4(0) : A4);
  if constexpr (NB == 2) WG(16, R16, "%8", "%9", "%10", "%11", "%12") : D4(0), D4(1) : A4);
  if constexpr (NB == 3) WG(24, R24, "%12", "%13", "%14", "%15", "%16") : D4(0), D4(1), D4(2) : A4);
  if constexpr (NB == 4) WG(32, R32, "%16", "%17", "%18", "%19", "%20") : D4(0), D4(1), D4(2), D4(3) : A4);
  if constexpr (NB == 5) WG(40, R40, "%20", "%21", "%22", "%23", "%24") : D4(0), D4(1), D4(2), D4(3), D4(4) : A4);
  if constexpr (NB == 6) WG(48, R48, "%24", "%25", "%26", "%27", "%28") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5) : A4);
  if constexpr (NB == 7) WG(56, R56, "%28", "%29", "%30", "%31", "%32") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6) : A4);
  if constexpr (NB == 8) WG(64, R64, "%32", "%33", "%34", "%35", "%36") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7) : A4);
  if constexpr (NB == 10) WG(80, R80, "%40", "%41", "%42", "%43", "%44") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9) : A4);
  if constexpr (NB == 12)
    WG(96, R96, "%48", "%49", "%50", "%51", "%52") : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11) : A4);
#undef D4
#undef A4
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
#undef R80
#undef R88
#undef R96
}

}  // namespace prim
#endif
