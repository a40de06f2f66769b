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

#if OWNERS
// Tells of each item's parts as they are stored: a release takes 0.7 us, which whoever goes on to the next item need not wait.
__device__ __forceinline__ void tell_parts(const Params& p, int count, int lane) {
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Item& it = p.items[i];
    if (!it.tiles) continue;
    named_barrier(6, 288);
    if (lane == 0 && (it.splits > 1 || it.split > 0)) add_release(p.arrived + it.counter, 1);
  }
}
// Parts come through the ring behind the item's last key tile: O where its values would be, maxima and sums in the place of rope. A warp of
// its own brings them: the copier's 40 registers are full. A lane at a time, as they were stored, so no fence between proxies is needed.
__device__ __forceinline__ void fetch_parts(const Params& p, smem_t base, int count) {
  const int lane = threadIdx.x & 31;
  Cursor at{0, 1};
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Item& it = p.items[i];
    const int n = it.tiles ? parts_awaited(it) : 0;
    at = after(at, it.tiles);
    if (!n) continue;
    named_barrier(5, 64);                                  // the last key tile is asked for: places' phases are this round's
    if (lane == 0) {
      wait_count(p.arrived + it.counter, n);
      p.arrived[it.counter] = 0;                           // for the next launch
    }
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < n * kPartTiles; ++k, at = at.plus(kBoxes)) {
      const uint8_t* part = reinterpret_cast<const uint8_t*>(p.part) + (size_t)it.slot * kPartBytes + (size_t)k * (8 * kBox) + 16 * lane;
      const float* stats = p.stats + ((size_t)it.slot + k / kPartTiles) * (2 * kN) + 4 * lane;
#pragma unroll 1
      for (int j = 0; j < kBoxes; ++j) {
        const int x = landing(j);
        const smem_t full = base + kTailAt + kFull + 8 * (at.slot + x), box = base + (at.slot + x) * kBox + 16 * lane;
        bar_wait(base + kTailAt + kEmpty + 8 * (at.slot + x), at.phase);
        if (x == 0) {
          cp_async16(box, stats);
        } else {
#pragma unroll
          for (int b = 0; b < kBox; b += 512) cp_async16(box + b, part + (x - 1) * kBox + b);
        }
        cp_async_arrive_more(full);
        __syncwarp();
        if (lane == 0) bar_arrive(full);
      }
    }
    named_barrier(5, 64);
  }
}
#endif

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

// A split adds up its share of a tile's rows, in the order of the keys. A warp takes ROWS rows at a time and asks for SPLITS parts of each
// before it adds any: 16 bytes a lane each, straight from L2. Through shared memory, a part behind the other, two splits took 5 us.
template <int ROWS, int SPLITS> __device__ __forceinline__ void add_rows(const Params& p, const Item& it, int from, int to, int warp, int lane) {
  constexpr int kPieces = PART_F32 ? 4 : 2, kEach = 16 / kPieces;  // of 16 bytes a lane and row; numbers of O in each
#pragma unroll 1
  for (int row0 = from + warp; row0 < to; row0 += 8 * ROWS) {
    auto place = [&](int k, int split) { return ((size_t)it.slot + (size_t)split * it.stride) * kN + least(row0 + 8 * k, to - 1); };
    auto stats = [&](int k, int split) {                   // maximum and sum of weights
      const uint2 v = ldg64_cg(p.stats + 2 * place(k, least(split, it.splits - 1)));
      return split < it.splits ? pair(__uint_as_float(v.x), __uint_as_float(v.y)) : pair(kNever, 0.f);
    };
    float2 own[ROWS];                                      // of split `lane`, then `lane` + 32, ...
    float high[ROWS], part[ROWS], sum[ROWS][16];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) own[k] = stats(k, lane);
#pragma unroll 1
    for (int first = 0; first < it.splits; first += SPLITS) {
      uint4 v[ROWS][SPLITS][kPieces];
#pragma unroll
      for (int k = 0; k < ROWS; ++k)
#pragma unroll
        for (int i = 0; i < SPLITS; ++i)
#pragma unroll
          for (int x = 0; x < kPieces; ++x) {
            const size_t at = place(k, least(first + i, it.splits - 1)) * kValue + x * 32 * kEach + lane * kEach;
            v[k][i][x] = ldg128_cg(reinterpret_cast<const uint8_t*>(p.part) + at * (PART_F32 ? 4 : 2));
          }
      if (first == 0) {
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
          float most = own[k].x, total = 0.f;
#pragma unroll 1
          for (int i = lane + 32; i < it.splits; i += 32) most = fmaxf(most, stats(k, i).x);
#pragma unroll
          for (int d = 1; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
          total = exp2_fast(own[k].x - most) * own[k].y;
#pragma unroll 1
          for (int i = lane + 32; i < it.splits; i += 32) {
            const float2 other = stats(k, i);
            total += exp2_fast(other.x - most) * other.y;
          }
#pragma unroll
          for (int d = 1; d < 32; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
          high[k] = most;
          part[k] = 1.f / total;
#pragma unroll
          for (int e = 0; e < 16; ++e) sum[k][e] = 0.f;
        }
      } else if (first % 32 == 0) {
#pragma unroll
        for (int k = 0; k < ROWS; ++k) own[k] = stats(k, first + lane);
      }
#pragma unroll
      for (int i = 0; i < SPLITS; ++i) {
        if (first + i >= it.splits) break;
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
          const float f = __shfl_sync(0xffffffffu, exp2_fast(own[k].x - high[k]) * part[k], (first + i) & 31);
#pragma unroll
          for (int e = 0; e < 16; ++e) {
            const uint4& w = v[k][i][e / kEach];
#if PART_F32
            const float x = __uint_as_float(e % 4 == 0 ? w.x : e % 4 == 1 ? w.y : e % 4 == 2 ? w.z : w.w);
#else
            const uint32_t two = e % 8 < 2 ? w.x : e % 8 < 4 ? w.y : e % 8 < 6 ? w.z : w.w;
            const float x = e % 2 ? high_half(two) : low_half(two);
#endif
            sum[k][e] = fmaf(f, x, sum[k][e]);
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const int row = row0 + 8 * k;
      if (row >= to || row >= it.columns) continue;
      uint8_t* out = p.out + (((size_t)it.first + row) * kValue + lane * kEach) * 2;
#pragma unroll
      for (int x = 0; x < kPieces; ++x) {
        const float* n = sum[k] + x * kEach;
#if PART_F32
        *reinterpret_cast<uint2*>(out + x * 64 * kEach) = uint2{pack_bf16(n[0], n[1]), pack_bf16(n[2], n[3])};
#else
        *reinterpret_cast<uint4*>(out + x * 64 * kEach) = make_uint4(pack_bf16(n[0], n[1]), pack_bf16(n[2], n[3]), pack_bf16(n[4], n[5]), pack_bf16(n[6], n[7]));
#endif
      }
    }
  }
}
// Once all splits have arrived.
__device__ __forceinline__ void combine(const Params& p, const Item& it, int warp, int lane) {
  const int from = kN * it.split / it.splits, to = kN * (it.split + 1) / it.splits;
  if (threadIdx.x == 0) wait_count(p.arrived + it.counter, it.splits);
  named_barrier(4, 256);
  stamp(8, threadIdx.x == 0);
  if (PART_F32) add_rows<2, 2>(p, it, from, to, warp, lane);
  else if (it.splits <= 2) add_rows<2, 2>(p, it, from, to, warp, lane);
  else add_rows<2, 4>(p, it, from, to, warp, lane);
  leave(p, it);
}
