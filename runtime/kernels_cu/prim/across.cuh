// What crosses from launch to launch and from block to block: boxes brought to L2 ahead of their use; numbers that are their own flag.
//
// A cell is four numbers in global memory, zero while empty. Whoever sends stores none that is zero in bits: 0 goes as -0, which adds
// up to the same. Whoever takes reads a cell until no number of it is zero, adds it up and empties it. A number is its own flag, so there
// is no fence to wait for and no counter: one store and one load, where store, fence, counter and load were four trips to L2.
#pragma once
#include "hopper.cuh"

namespace prim {

__device__ __forceinline__ uint32_t never_zero(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ? bits : 0x80000000u;
}
// The least of those numbers and `least`: 0 if a cell is not full. No predicate a cell: ptxas had loads wait for those of other loads.
__device__ __forceinline__ uint32_t least_of(uint32_t least, const uint4& v) {
  const uint32_t xy = v.x < v.y ? v.x : v.y, zw = v.z < v.w ? v.z : v.w, all = xy < zw ? xy : zw;
  return all < least ? all : least;
}

#ifndef KCPU
// 16 bytes at L2, seen by all blocks in the order of each word's own stores. PTX ISA, "ld", "st": relaxed.
__device__ __forceinline__ uint4 load_cell(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_cell(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// After an attempt that found a cell empty; traps after seconds rather than hang the device.
__device__ __forceinline__ void try_again(int tries) {
  if (tries == 8000000) asm volatile("trap;");
}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A box on its way to L2 and no further. PTX ISA, "cp.async.bulk.prefetch.tensor".
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map, int column, int row, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.L2::cache_hint [%0, {%1, %2}], %3;" ::"l"(&map), "r"(column), "r"(row), "l"(policy) : "memory");
}
#endif
#else
inline uint4 load_cell(const void* p) {  // blocks run one after the other: what is not there never comes and shows as NaN
  uint4 v = *static_cast<const uint4*>(p);
  for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w})
    if (!*word) *word = 0x7FFFFFFF;
  return v;
}
inline void store_cell(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline void try_again(int) {}
inline void tensor_prefetch(const TensorMap&, int, int, uint64_t) {}
#endif

}  // namespace prim
