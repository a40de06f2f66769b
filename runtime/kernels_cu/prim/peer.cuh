// Memory of other GPUs: words that carry their own flag, flags after data, at system scope.
#pragma once
#include "platform.cuh"

#ifdef KCPU
#include <sched.h>
#endif

namespace prim {

#ifndef KCPU
// Two 64-bit words, each single-copy atomic: half data, half flag. PTX ISA, "st" and "ld" with .relaxed.sys; vector elements
// are accesses of their own.
__device__ __forceinline__ void store_words(void* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void load_words(const void* p, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
// A flag that follows data: what was stored before the release is seen after the acquire. PTX ISA, "Memory consistency model".
__device__ __forceinline__ void store_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Makes the block's stores, ordered before by a barrier, part of what this thread releases. PTX ISA, "fence".
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// 16 bytes past L1, which does not follow other GPUs' stores. PTX ISA, "ld" with .cg.
__device__ __forceinline__ uint4 load_peer(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void peer_pause() {}
#else
// Ranks are processes here and their memory is shared; x86 keeps stores in order.
inline void store_words(void* p, uint64_t a, uint64_t b) {
  ((volatile uint64_t*)p)[0] = a;
  ((volatile uint64_t*)p)[1] = b;
}
inline void load_words(const void* p, uint64_t& a, uint64_t& b) {
  a = ((const volatile uint64_t*)p)[0];
  b = ((const volatile uint64_t*)p)[1];
}
inline void store_release_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint32_t load_acquire_sys(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void fence_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint4 load_peer(const uint4* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline void peer_pause() {
  const int before = kcpu::current;
  kcpu::yield();
  if (kcpu::current == before || before == 0) sched_yield();  // the other ranks' turn
}
#endif

}  // namespace prim
