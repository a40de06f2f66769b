// Blocks that run together and write into each other's shared memory: thread block clusters, from sm_90 on.
//
// Before that a cluster is one block, and the same code runs. On the CPU shim the blocks of a cluster have one shared memory: what
// is written to all of them in the same place is there.
#pragma once
#include "platform.cuh"

namespace prim {

#if defined(KCPU)
inline void cluster_arrive() {}
inline void cluster_wait() { kcpu::syncthreads(); }
inline void store_shared(float* p, int, float v) { *(volatile float*)p = v; }
inline float load_shared(const float* p) {
  kcpu::yield();                                          // who polls lets the others write
  return *(const volatile float*)p;
}
#else
// All threads of the cluster arrive, then wait: what was stored before an arrival is seen after the wait. PTX ISA, "barrier.cluster".
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
// A word in the shared memory of the cluster's block `rank`, at the place that p has here. Some 200 cycles. PTX ISA, "mapa".
__device__ __forceinline__ void store_shared(float* p, int rank, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nst.relaxed.cluster.shared::cluster.f32 [a], %2;\n}" ::"r"(smem(p)), "r"(rank), "f"(v) : "memory");
#else
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(smem(p)), "f"(v) : "memory");
#endif
}
// Such a word of this block.
__device__ __forceinline__ float load_shared(const float* p) {
  float v;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.relaxed.cluster.shared::cta.f32 %0, [%1];" : "=f"(v) : "r"(smem(p)) : "memory");
#else
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem(p)) : "memory");
#endif
  return v;
}
#endif

}  // namespace prim
