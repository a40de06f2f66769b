// Ways of doing things that some builds have and others not (`served` in tree_mla_config.py), or that await a measurement
// (`tools/bench_mla.py --variants`).
#pragma once

#ifndef EARLY_KEYS    // the copier asks for committed keys before the kernel ahead of this one has ended (docs/mla.md says when it may)
#define EARLY_KEYS 0
#endif
#ifndef MERGE_LATER   // tree_mla.cu, few columns: parts of O are added up by tree_mla_merge, a launch of its own: no fence, no count, no waiting for one
                      // another. Registers are not dealt anew, so a block takes what it needs and the merge of the layer before fits beside it
#define MERGE_LATER 0
#endif
#ifndef MERGERS       // blocks of tree_mla_merge an item; 0: 2 with 8 columns, else 4
#define MERGERS 0
#endif
#ifndef SOFTEN_FIRST  // tree_mla_rows.cu: the softmax of an odd tile really runs behind the product of the even one, and a group looks for the boxes of the
                      // other's tile while it waits for something else anyway
#define SOFTEN_FIRST 0
#endif
#ifndef OWNERS        // tree_mla_rows.cu: a column tile has a block that keeps its sums and adds what others made of its last keys (`list_owned`); the number
                      // is what a piece costs a block beyond its key tiles, in key tiles
#define OWNERS 0
#endif
#ifndef EARLY_BOXES   // with EARLY_KEYS: boxes asked for before the kernel ahead has ended; 0: whole tiles, as many as the ring holds
#define EARLY_BOXES 0
#endif
#ifndef READY_FIRST   // tree_mla_rows.cu, with EARLY_KEYS: registers are dealt anew, and a block's first item is loaded, before the wait for the kernel ahead
#define READY_FIRST 0
#endif
#ifndef REHEARSED     // tree_mla_merge goes through its code once, storing nothing, while it waits
#define REHEARSED 0
#endif
#ifndef STAMPS        // clocks of each block at the stations of its way; of the key tile (of an item) that STAMPS names, in detail
#define STAMPS 0
#endif

constexpr int kStamped = 256;  // blocks
#if STAMPS && !defined(KCPU)
constexpr int kStations = 32;
__device__ long long mla_stamps[kStamped * kStations];
// `who`: whether this thread is the one that notes it. Predicated, not branched around: products may be under way.
__device__ __forceinline__ void stamp(int station, bool who) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 t;\nsetp.ne.s32 p, %1, 0;\nmov.u64 t, %%clock64;\n@p st.global.b64 [%0], t;\n}" ::"l"(
                   mla_stamps + (blockIdx.x * kStations + station)),
               "r"((int)who) : "memory");
}
// Nanoseconds of a clock that all blocks share.
__device__ __forceinline__ void stamp_common(int station, bool who) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 t;\nsetp.ne.s32 p, %1, 0;\nmov.u64 t, %%globaltimer;\n@p st.global.b64 [%0], t;\n}" ::"l"(
                   mla_stamps + (blockIdx.x * kStations + station)),
               "r"((int)who) : "memory");
}
#else
__device__ __forceinline__ void stamp(int, bool) {}
__device__ __forceinline__ void stamp_common(int, bool) {}
#endif

namespace prim {
#ifdef KCPU
inline void cp_async_arrive_more(smem_t) {}
inline uint2 ldg64_cg(const void* p) { uint2 v; memcpy(&v, p, 8); return v; }
#else
// As cp_async_arrive, beyond the arrivals that the barrier counts: one more until they have landed. PTX ISA, "cp.async.mbarrier.arrive" without noinc.
__device__ __forceinline__ void cp_async_arrive_more(smem_t b) { asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(b) : "memory"); }
// As ldg128_cg, 8 bytes.
__device__ __forceinline__ uint2 ldg64_cg(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
#endif
}  // namespace prim
