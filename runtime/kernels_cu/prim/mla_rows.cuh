// What attention with queries as rows does beside its products: masks, outputs and partials in rows of 512, adding them up.
#pragma once
#include "mla_ring.cuh"
#include "wide.cuh"

// Bit k: the row, node `node` of its sequence, sees key j0 + k of the step's own positions; those before 0 are committed. j0 > -64.
__device__ __forceinline__ uint64_t seen_keys(const Params& p, int row, int node, int j0) {
  uint64_t seen = ~0ull;
#if !CAUSAL
  const uint64_t* word = reinterpret_cast<const uint64_t*>(p.ancestors) + (size_t)row * p.words;
  if (j0 < 0) {
    seen = word[0] << -j0 | ((1ull << -j0) - 1);
  } else {
    const int at = j0 >> 6, shift = j0 & 63;
    seen = at < p.words ? word[at] >> shift : 0;
    if (shift && at + 1 < p.words) seen |= word[at + 1] << (64 - shift);
  }
#else
  (void)p;
  (void)row;
#endif
  const int last = node - j0;
  return last >= 63 ? seen : last < 0 ? 0 : seen & ((2ull << last) - 1);
}

// The ring's place after an item of `tiles` tiles.
__device__ __forceinline__ Cursor after(const Cursor& at, int tiles) {
  const Cursor halfway = tiles & 1 ? at.plus(kBoxes) : at;
  return Cursor{halfway.slot, halfway.phase ^ (uint32_t)(tiles >> 1 & 1)};
}

// 256 columns of a row (h: the thread's first or second) times `scale` as bf16 to element `at`; lane q of four stores 16 bytes at a time.
__device__ __forceinline__ void put_row(uint8_t* to, size_t at, const float (&o)[32][4], int h, float scale, int q, bool live) {
#pragma unroll
  for (int b = 0; b < 32; b += 4) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = pack_bf16(o[b + i][2 * h] * scale, o[b + i][2 * h + 1] * scale);
    transpose_quad(v, q);
    if (live) *reinterpret_cast<uint4*>(to + 2 * (at + 8 * (b + q))) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Parts of O, [slots, 64, 512].
#if PART_F32
__device__ __forceinline__ void put_partial(void* part, size_t at, const float (&o)[32][4], int h, int q) {
  float2* to = reinterpret_cast<float2*>(reinterpret_cast<float*>(part) + at + 2 * q);
#pragma unroll
  for (int b = 0; b < 32; ++b) to[4 * b] = pair(o[b][2 * h], o[b][2 * h + 1]);
}
#else
__device__ __forceinline__ void put_partial(void* part, size_t at, const float (&o)[32][4], int h, int q) {
  put_row(reinterpret_cast<uint8_t*>(part), at, o, h, 1.f, q, true);
}
#endif
// A unit is a quarter of a row.
__device__ __forceinline__ void put_unit(const Params& p, const Item& it, int u, const float4& sum, int lane) {
  uint2 bits;
  bits.x = pack_bf16(sum.x, sum.y);
  bits.y = pack_bf16(sum.z, sum.w);
  if (u / 4 < it.columns) *reinterpret_cast<uint2*>(p.out + (((size_t)it.first + u / 4) * kValue + (u & 3) * 128 + 4 * lane) * 2) = bits;
}
__device__ __forceinline__ void combine(const Params& p, const Item& it, smem_t base, int warp, int lane) {
  combine_splits(
      p, it, base, warp, lane, 1, [](int u) { return u / 4; },
      [](float4& sum, const float4& v, smem_t weight) {
        const float f = lds_f32(weight);
        sum.x = fmaf(f, v.x, sum.x);
        sum.y = fmaf(f, v.y, sum.y);
        sum.z = fmaf(f, v.z, sum.z);
        sum.w = fmaf(f, v.w, sum.w);
      },
      [&](int u, const float4& sum) { put_unit(p, it, u, sum, lane); });
}
