// Mapped host memory: what the host wrote before a launch, and the word that it polls. Apart from memory.cuh, whose text is
// part of what tuned configurations are dated by.
#pragma once
#include "platform.cuh"

namespace prim {

#ifndef KCPU
// Past every cache. PTX ISA, "ld.volatile".
__device__ __forceinline__ uint4 ldg128_host(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ldg32_host(const void* p) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Whoever sees this word sees all that this block wrote before its last barrier. PTX ISA, "st.release".
__device__ __forceinline__ void store_release_host(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
#else
inline uint4 ldg128_host(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline uint32_t ldg32_host(const void* p) { return *(const volatile uint32_t*)p; }
inline void store_release_host(uint32_t* p, uint32_t v) { *(volatile uint32_t*)p = v; }
#endif

}  // namespace prim
