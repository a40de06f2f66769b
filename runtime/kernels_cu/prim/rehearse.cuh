// Code that a block runs through once before its data are there, so that its instructions are: straight-line code that no block of
// this SM has run lately is fetched a line of 8 instructions at a time, when it matters. What it stores then goes nowhere, and must
// be computed all the same: a branch around a store would take along what only the store needs.
#pragma once
#include "platform.cuh"

namespace prim {

// Only where a kernel starts before the one before it ends is there time for that.
#if defined(KCPU) || __CUDA_ARCH__ >= 900
constexpr bool kRehearses = true;
#else
constexpr bool kRehearses = false;
#endif

#if defined(KCPU)
inline void store_if(bool real, uint4* p, const uint4& v) {
  if (real) *p = v;
}
#else
// A predicated store of 16 bytes. PTX ISA, "Predicated execution".
__device__ __forceinline__ void store_if(bool real, uint4* p, const uint4& v) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %0, 0;\n@P st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"((uint32_t)real), "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#endif

}  // namespace prim
