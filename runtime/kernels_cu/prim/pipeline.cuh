// Barriers in shared memory, and copies from global to shared memory that complete on them.
//
// From sm_90 on one bulk copy moves a whole block and counts its bytes on the barrier. Before that every lane copies
// 16-byte pieces with cp.async and arrives when its own have landed. `copies_arrivals` is what a barrier must expect from
// one copying warp; `copy_block` and `copies_done` are called by the whole warp.
#pragma once
#include "platform.cuh"

namespace prim {

#if defined(KCPU)
#define PRIM_BULK 0
#elif __CUDA_ARCH__ >= 900
#define PRIM_BULK 1
#else
#define PRIM_BULK 0
#endif

#ifndef KCPU
// PTX ISA, "mbarrier.init".
__device__ __forceinline__ void bar_init(smem_t b, int arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory"); }
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void bar_init_fence() {
#if PRIM_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void bar_arrive(smem_t b) { asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(b) : "memory"); }
// Waits until the phase of that parity is over; a fresh barrier has phase 0 open, so parity 1 returns at once.
// Bounded: a lost arrival traps after some seconds instead of hanging the device.
__device__ __forceinline__ void bar_wait(smem_t b, uint32_t parity) {
#if PRIM_BULK
  asm volatile(
      "{\n.reg .pred P;\n.reg .b32 n;\nmov.b32 n, 0;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 P, [%0], %1;\n@P bra DONE;\n"
      "add.u32 n, n, 1;\nsetp.lt.u32 P, n, 1000000;\n@P bra WAIT;\ntrap;\nDONE:\n}" ::"r"(b), "r"(parity) : "memory");
#else
  asm volatile(
      "{\n.reg .pred P;\n.reg .b32 n;\nmov.b32 n, 0;\nWAIT:\nmbarrier.test_wait.parity.shared.b64 P, [%0], %1;\n@P bra DONE;\n"
      "add.u32 n, n, 1;\nsetp.lt.u32 P, n, 400000000;\n@P bra WAIT;\ntrap;\nDONE:\n}" ::"r"(b), "r"(parity) : "memory");
#endif
}
// 16 bytes past L1, asynchronously. PTX ISA, "cp.async".
__device__ __forceinline__ void cp_async16(smem_t dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
// This lane's earlier cp.async, once landed, count as one arrival. PTX ISA, "cp.async.mbarrier.arrive".
__device__ __forceinline__ void cp_async_arrive(smem_t b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(b) : "memory"); }
// Threads `count` of the block that use the same id meet. PTX ISA, "barrier".
__device__ __forceinline__ void named_barrier(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
// Orders ordinary accesses with those of the copy engine and of wgmma. PTX ISA, "fence.proxy.async".
__device__ __forceinline__ void fence_async_proxy() {
#if PRIM_BULK
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// Programmatic dependent launch: wait for the kernels before this one; let the next one start. PTX ISA, "griddepcontrol".
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#else
inline void bar_init(smem_t b, int arrivals) { kcpu::mbarrier_init(b, arrivals); }
inline void bar_init_fence() {}
inline void bar_arrive(smem_t b) { kcpu::mbarrier_arrive(b); }
inline void bar_wait(smem_t b, uint32_t parity) { kcpu::mbarrier_wait(b, parity); }
inline void cp_async16(smem_t dst, const void* src) { memcpy(dst, src, 16); }
inline void cp_async_arrive(smem_t b) { kcpu::mbarrier_arrive(b); }
inline void named_barrier(int id, int count) { kcpu::named_barrier(id, count); }
inline void fence_async_proxy() {}
inline void pdl_wait() {}
inline void pdl_trigger() {}
#endif

#if PRIM_BULK
constexpr int copies_arrivals = 1;
// Announces `bytes` to come. PTX ISA, "mbarrier.arrive" with expect_tx.
__device__ __forceinline__ void bar_expect(smem_t b, uint32_t bytes) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;\n}" ::"r"(b), "r"(bytes) : "memory");
}
// One contiguous block; 16-byte aligned at both ends. PTX ISA, "cp.async.bulk".
__device__ __forceinline__ void bulk_copy(smem_t dst, const void* src, uint32_t bytes, smem_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(b) : "memory");
}
// The same for what is read once: first to leave L2.
__device__ __forceinline__ void bulk_copy_once(smem_t dst, const void* src, uint32_t bytes, smem_t b) {
  asm volatile(
      "{\n.reg .b64 p;\ncreatepolicy.fractional.L2::evict_first.b64 p, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], p;\n}" ::"r"(dst), "l"(src), "r"(bytes), "r"(b) : "memory");
}
#else
constexpr int copies_arrivals = 33;  // each lane's copies, and lane 0 itself, which releases what it stored before
#endif

// Copies `count` blocks of `bytes` (a multiple of 16); block i goes from src(i) to dst(i). The whole warp calls it, then
// the barrier's phase completes when all have landed. ONCE: the bytes are not read again.
template <bool ONCE, class Dst, class Src>
__device__ __forceinline__ void copy_blocks(int count, uint32_t bytes, Dst dst, Src src, smem_t barrier, int lane) {
#if PRIM_BULK
  if (lane == 0) bar_expect(barrier, count * bytes);
  __syncwarp();
  if (lane < count) {
    if (ONCE) bulk_copy_once(dst(lane), src(lane), bytes, barrier);
    else bulk_copy(dst(lane), src(lane), bytes, barrier);
  }
#else
  const uint32_t pieces = bytes / 16, total = count * pieces;
  for (uint32_t i = lane; i < total; i += 32) {
    const uint32_t block = i / pieces, piece = i % pieces;
    cp_async16(dst(block) + piece * 16, src(block) + piece * 16);
  }
  cp_async_arrive(barrier);
  if (lane == 0) bar_arrive(barrier);
#endif
}

}  // namespace prim
