// Shared memory of the attention kernels and what fills it: a ring of boxes of 64 keys x 64 columns (a key tile is nine, rope first),
// the queries, the weights P. Built with SLOTS boxes.
#pragma once
#include "mla_items.cuh"

[[maybe_unused]] constexpr int kBox = 8192, kBoxes = 9, kQBox = kN * 128;
// Ring, Q, P, then the tail: barriers and what a kernel keeps besides.
[[maybe_unused]] constexpr int kQAt = SLOTS * kBox, kPAt = kQAt + kBoxes * kQBox, kTailAt = kPAt + kQBox;
[[maybe_unused]] constexpr int kFull = 0, kEmpty = 8 * SLOTS, kReady = 16 * SLOTS, kTaken = kReady + 8, kQFree = kReady + 16, kMoved = kReady + 24;
constexpr float kNever = -1e30f, kSlack = 8.f;  // a maximum before any key; what a score may pass a maximum by, in powers of two

struct Cursor {  // the ring's slot of a tile's first box
  int slot;
  uint32_t phase;
  __device__ __forceinline__ Cursor plus(int n) const {
    Cursor c{slot + n, phase};
    if (c.slot >= SLOTS) { c.slot -= SLOTS; c.phase ^= 1; }
    return c;
  }
};

#if USE_WGMMA
// One thread asks for the copies of all items of this block.
__device__ __forceinline__ void fill_ring(const Params& p, const TensorMap& keys, const TensorMap& queries, smem_t base, int count) {
  const smem_t tail = base + kTailAt;
  if (threadIdx.x != 256) return;
  const uint64_t once = policy_evict_first(), again = policy_evict_normal();
  Cursor at{0, 1};
  uint32_t q_phase = 1;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Item it = p.items[i];
    if (!it.tiles) continue;
    const uint64_t policy = it.stride > 1 ? again : once;
    bar_wait(tail + kQFree, q_phase);
    q_phase ^= 1;
    for (int j = 0; j < it.tiles; ++j) {
      const int position = (it.tile0 + j) * kTile;
      int rows[4];
      const int pieces = kTile / p.box_keys;              // 1, 2 or 4
#pragma unroll
      for (int k = 0; k < 4; ++k) rows[k] = k < pieces ? slot_of(p, it.seq, position + k * p.box_keys) : 0;
#pragma unroll 1
      for (int x = 0; x < kBoxes; ++x) {
        const smem_t full = tail + kFull + 8 * at.slot, box = base + at.slot * kBox;
        const int column = x ? (x - 1) * 64 : kValue;
        bar_wait(tail + kEmpty + 8 * at.slot, at.phase);
        bar_expect(full, kBox + (j ? 0 : kQBox));
        if (!j) tensor_copy(base + kQAt + x * kQBox, queries, full, column, it.first, again);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (k < pieces) tensor_copy(box + k * p.box_keys * 128, keys, full, column, rows[k], policy);
        at = at.plus(1);
      }
    }
  }
}
#endif

// Weights of the splits of a tile for `width` of its columns from c0 on, at base + (split * width + column) * 4. Warps 0-7 call it.
__device__ __forceinline__ void weigh_splits(const Params& p, const Item& it, smem_t base, int c0, int width, int warp, int lane) {
  for (int c = warp; c < width; c += 8) {
    const float2* stats = reinterpret_cast<const float2*>(p.stats) + (size_t)it.slot * kN + c0 + c;
    const size_t step = (size_t)it.stride * kN;
    float high = kNever, sum = 0.f;
    for (int i = lane; i < it.splits; i += 32) high = fmaxf(high, load_f32x2_cg(stats + i * step).x);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
    for (int i = lane; i < it.splits; i += 32) {
      const float2 v = load_f32x2_cg(stats + i * step);
      sum += exp2_fast(v.x - high) * v.y;
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    for (int i = lane; i < it.splits; i += 32) sts_f32(base + (i * width + c) * 4, exp2_fast(load_f32x2_cg(stats + i * step).x - high) * (1.f / sum));
  }
  named_barrier(4, 256);
}
// Non-finite values of the step's own positions become 0, so that a weight of 0 removes them: a key that a row does see has
// given it a NaN weight already. This group's four boxes, keys from `from` on.
__device__ __forceinline__ void scrub(smem_t base, const Cursor& at, int group, int from) {
  const int t = threadIdx.x & 127, piece = t & 7;
  for (int k = 0; k < 4; ++k) {
    const smem_t box = base + at.plus(1 + group * 4 + k).slot * kBox;
    for (int key = t >> 3; key < kTile; key += 16) {
      if (key < from) continue;
      uint4 v = lds128(box + in_box(key, piece));
      auto clean = [](uint32_t x) { return ((x & 0x7f80u) == 0x7f80u ? 0u : x & 0xffffu) | ((x & 0x7f800000u) == 0x7f800000u ? 0u : x & 0xffff0000u); };
      const uint4 c = make_uint4(clean(v.x), clean(v.y), clean(v.z), clean(v.w));
      if ((c.x ^ v.x) | (c.y ^ v.y) | (c.z ^ v.z) | (c.w ^ v.w)) sts128(box + in_box(key, piece), c);
    }
  }
  fence_async_proxy();
  named_barrier(1 + group, 128);
}
