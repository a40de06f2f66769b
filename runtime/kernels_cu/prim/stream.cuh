// Reading what is read once.
#pragma once
#include "memory.cuh"
#include "mma.cuh"

namespace prim {

#ifndef KCPU
// 16 bytes past L1 of memory that no kernel in flight writes. Volatile: asked for where it stands, even before a wait for the
// predecessor; loads do not wait for each other. PTX ISA, "ld.global.nc".
__device__ __forceinline__ uint4 ldg128_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
#else
inline uint4 ldg128_once(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
#endif

}  // namespace prim
