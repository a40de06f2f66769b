// Ways of doing things that await a measurement: all 0 in what is served. `tools/bench_mla.py --variants` builds and times them; what
// gains becomes the rule, what does not goes, and this file with it.
#pragma once

#ifndef EARLY_KEYS    // the copier asks for committed keys before the kernel ahead of this one has ended (docs/mla.md says when it may)
#define EARLY_KEYS 0
#endif
#ifndef MERGE_LATER   // parts of O are added up by tree_mla_merge, a launch of its own: no fence, no count, no waiting for one another
#define MERGE_LATER 0
#endif
#ifndef BRISK_COPIER  // barriers made by as many threads as there are; looks for free places without branches; two warps copy, where two are idle
#define BRISK_COPIER 0
#endif
#ifndef P_IN_ROPE     // tree_mla.cu, 18 places: weights lie where the tile's rope was, so that 72 columns have a ring of two tiles; rope is scored last
#define P_IN_ROPE 0
#endif
#ifndef FEW_REGISTERS // tree_mla.cu, few columns: none dealt anew, so a block takes what it needs and the merge of the layer before fits beside it
#define FEW_REGISTERS 0
#endif
#ifndef NEXT_IN_L2    // so many key tiles ahead of the ring are fetched from memory into L2: 1 or 2
#define NEXT_IN_L2 0
#endif
#ifndef AS_THEY_LAND  // tree_mla.cu: scores take a tile's boxes in the order in which they land
#define AS_THEY_LAND 0
#endif
#ifndef HOLD_MAXIMA   // tree_mla.cu: maxima in registers through a tile's softmax: an octet's load behind the last one's store is 100 clocks each
#define HOLD_MAXIMA 0
#endif
#ifndef STRAIGHT      // tree_mla.cu: so many boxes are waited for before the first is multiplied: products without branches in between
#define STRAIGHT 0
#endif
#ifndef SOFTEN_FIRST  // tree_mla_rows.cu: the softmax of an odd tile really runs behind the product of the even one
#define SOFTEN_FIRST 0
#endif
#ifndef OWN_FIRST     // tree_mla_rows.cu: an owner's product is under way before its weights are written out for the other group
#define OWN_FIRST 0
#endif
#ifndef SEE_EARLY     // tree_mla_rows.cu: a group looks for the boxes of the other's tile while it waits for something else anyway
#define SEE_EARLY 0
#endif
#ifndef KEYS_STAY     // keys that one column tile reads leave L2 in their turn, not first
#define KEYS_STAY 0
#endif
#ifndef STAMPS        // clocks of each block at the stations of its way; of the key tile (of an item) that STAMPS names, in detail
#define STAMPS 0
#endif

#if STAMPS && !defined(KCPU)
constexpr int kStations = 32;
__device__ long long mla_stamps[256 * kStations];
// `who`: whether this thread is the one that notes it. Predicated, not branched around: products may be under way.
__device__ __forceinline__ void stamp(int station, bool who) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 t;\nsetp.ne.s32 p, %1, 0;\nmov.u64 t, %%clock64;\n@p st.global.b64 [%0], t;\n}" ::"l"(
                   mla_stamps + (blockIdx.x * kStations + station)),
               "r"((int)who) : "memory");
}
#else
__device__ __forceinline__ void stamp(int, bool) {}
#endif

namespace prim {
#ifdef KCPU
inline void tensor_prefetch(const TensorMap&, int, int, uint64_t) {}
inline uint2 ldg64_cg(const void* p) { uint2 v; memcpy(&v, p, 8); return v; }
#else
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// tensor_copy's box into L2 alone. PTX ISA, "cp.async.bulk.prefetch.tensor".
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map, int column, int row, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%0, {%1, %2}], %3;" ::"l"(&map), "r"(column), "r"(row), "l"(policy) : "memory");
}
#endif
// As ldg128_cg, 8 bytes.
__device__ __forceinline__ uint2 ldg64_cg(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
#endif
}  // namespace prim
