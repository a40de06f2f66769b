// Two blocks that run as a cluster: barriers of the other, boxes that land in both.
#pragma once
#include "hopper.cuh"

namespace prim {

#ifndef KCPU
#define CLUSTER_OF_2 __cluster_dims__(2, 1, 1)
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// PTX ISA, "barrier.cluster": all threads of both blocks that have not exited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Arrives at block `rank`'s barrier that lies where b does here. PTX ISA, "mapa", "mbarrier.arrive".
__device__ __forceinline__ void bar_arrive_at(smem_t b, uint32_t rank) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(rank) : "memory");
}
// As tensor_copy, to both blocks; each one's barrier, at the same place, counts its bytes. PTX ISA, "cp.async.bulk.tensor", multicast.
__device__ __forceinline__ void tensor_copy_both(smem_t dst, const TensorMap& map, smem_t barrier, int column, int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %6, %5;" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(policy), "h"((unsigned short)3) : "memory");
}
#endif
#else
#define CLUSTER_OF_2
inline void cluster_arrive() { kcpu::cluster_arrive(); }
inline void cluster_wait() { kcpu::cluster_wait(); }
inline uint32_t cluster_rank() { return kcpu::fibers[kcpu::current].rank; }
inline smem_t at_rank(smem_t a, uint32_t rank) { return kcpu::smem_of[rank] + (a - kcpu::dynamic_smem); }
inline void bar_arrive_at(smem_t b, uint32_t rank) { bar_arrive(at_rank(b, rank)); }
inline void tensor_copy_both(smem_t dst, const TensorMap& map, smem_t barrier, int column, int row, uint64_t policy) {
  for (uint32_t rank = 0; rank < 2; rank++) tensor_copy(at_rank(dst, rank), map, at_rank(barrier, rank), column, row, policy);
}
#endif

}  // namespace prim
