// Attention of the drafter's blocks: each stream's T rows see its ctx context keys and their whole own block, without a mask.
//
//   block_attention_part    block = (split of the keys, kv head, stream)   softmax(q k^T) v over the split's keys, unnormalised
//   block_attention_merge   block = (4 rows, kv head, stream)              the splits put together, in order
//
//   rows      the T rows of the G heads that share a kv head are one matrix: T G rows, sixteen a warp (Kimi: 8 x 8, 4 warps)
//   keys      32 a tile, STAGES tiles of keys and values on their way (cp.async on mbarriers); tiles t0 .. t1 of a split
//   product   S[16 x 32] = Q K^T and O[16 x J] += P V by mma.m16n8k16, P in registers as it is, V through transposed ldmatrix
//
// Inequality at 8 kv heads of 128, context 4096: 16.8 MB of keys and values a stream and layer, 3.5 us of an H200's bandwidth, and
// 0.27 Gflop at T G = 64: 64 flops a byte, so bandwidth binds. Splits fill the device where streams do not.
// How long the context is, is read from ctx[b] in device memory: a split beyond the keys writes an empty sum. Dead streams:
// ctx[b] = -1; they write nothing. Cache slots that no position of the stream names are not read.
// Source: DFlash, arXiv 2602.06036; GQA, arXiv 2305.13245; online softmax, arXiv 2205.14135. Defined by kernels_np/draft.py.
#include "prim/attention.cuh"

using namespace prim;

#ifndef HEAD
#error "build with -DHEAD= -DFRAGS= -DSTAGES="
#endif
static_assert(HEAD % 64 == 0 && HEAD <= 256, "whole swizzled rows, and sums that fit the registers");
static_assert(FRAGS >= 1 && FRAGS <= 16 && STAGES >= 2 && STAGES <= 4, "warps of a block; tiles on their way");
constexpr int kThreads = 32 * FRAGS, kKeys = 32, kRowBytes = 2 * HEAD, kPieces = HEAD / 8, kTileBytes = kKeys * kRowBytes;
constexpr int kMergeThreads = 128, kRows = 16 * FRAGS, kWords = HEAD / 2;

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Params {
  const uint32_t* q;                                      // [B T, A, J] bf16
  const uint8_t* k;                                       // [B T, Z, J] bf16, the block's own
  const uint8_t* v;                                       // [B T, Z, J]
  const uint8_t* k_cache;                                 // [S, Z, J]
  const uint8_t* v_cache;                                 // [S, Z, J]
  const int* pages;                                       // [B, P]
  const int* ctx;                                         // [B] -1: dead
  float* part;                                            // [B, Z, splits, kRows, J] sums
  float* stats;                                           // [B, Z, splits, kRows, 2] largest score, sum of weights
  uint32_t* out;                                          // [B T, A, J] bf16
  int T, A, Z, P, page_size, splits;
  float scale;                                            // of the scores, times log2 e
};

// Byte of a 16-byte piece of a key's row: eight rows of one piece lie in eight bank groups.
__device__ __forceinline__ int swizzled(int key, int piece) { return key * kRowBytes + ((piece ^ (key & 7)) << 4); }

extern "C" __global__ void __launch_bounds__(kThreads) block_attention_part(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(raw);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
  const int split = blockIdx.x, z = blockIdx.y, b = blockIdx.z, group = p.A / p.Z;
  const smem_t barriers = smem(raw), tiles_at = barriers + 128;
  if (tid == 0) {
    for (int s = 0; s < STAGES; ++s) bar_init(barriers + 8 * s, kThreads);
    bar_init_fence();
  }
  pdl_trigger();
  pdl_wait();
  __syncthreads();
  const int ctx = p.ctx[b];
  if (ctx < 0) return;
  const int keys = ctx + p.T, tiles = (keys + kKeys - 1) / kKeys, each = (tiles + p.splits - 1) / p.splits;
  const int first = split * each, last = first + each < tiles ? first + each : tiles;

  // A position's row of keys or values: the cache's below ctx, the block's own above. Beyond the last key, the last key again.
  auto row_of = [&](const uint8_t* cached, const uint8_t* own, int position) {
    position = position < keys ? position : keys - 1;
    const bool committed = position < ctx;
    const int place = committed ? p.pages[(size_t)b * p.P + position / p.page_size] * p.page_size + position % p.page_size : b * p.T + position - ctx;
    return (committed ? cached : own) + ((size_t)place * p.Z + z) * kRowBytes;
  };
  auto fetch = [&](int tile) {
    const int stage = (tile - first) % STAGES;
    const smem_t at = tiles_at + stage * 2 * kTileBytes;
    for (int i = tid; i < 2 * kKeys * kPieces; i += kThreads) {
      const int value = i / (kKeys * kPieces), key = i / kPieces % kKeys, piece = i % kPieces;
      const uint8_t* row = value ? row_of(p.v_cache, p.v, tile * kKeys + key) : row_of(p.k_cache, p.k, tile * kKeys + key);
      cp_async16(at + value * kTileBytes + swizzled(key, piece), row + 16 * piece);
    }
    cp_async_arrive(barriers + 8 * stage);
  };

  // Rows g and g + 8 of the warp's sixteen, as fragments of all J inputs; zeros beyond T G.
  uint32_t q[HEAD / 16][4];
  const int row0 = 16 * warp + g;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 8 * h;
    const bool live = row < p.T * group;
    const uint32_t* from = p.q + ((size_t)(b * p.T + row / group) * p.A + z * group + row % group) * kWords;
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
      q[step][h] = live ? from[8 * step + c] : 0u;
      q[step][2 + h] = live ? from[8 * step + 4 + c] : 0u;
    }
  }
  float sum[HEAD / 8][4] = {}, largest[2] = {__uint_as_float(0xff800000u), __uint_as_float(0xff800000u)}, weight[2] = {0.f, 0.f};

  auto attend = [&](int tile) {
    const smem_t keys_at = tiles_at + (tile - first) % STAGES * 2 * kTileBytes, values_at = keys_at + kTileBytes;
    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t k[4];
        ldmatrix_x4(k, keys_at + swizzled(16 * n + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
        mma_bf16(score[2 * n], q[step], k[0], k[1]);
        mma_bf16(score[2 * n + 1], q[step], k[2], k[3]);
      }
    }
    float now[2] = {largest[0], largest[1]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (tile * kKeys + 8 * n + 2 * c + i % 2 >= keys) score[n][i] = __uint_as_float(0xff800000u);
        now[i / 2] = fmaxf(now[i / 2], score[n][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
      const float keep = exp2_fast((largest[h] - now[h]) * p.scale);
      largest[h] = now[h];
      weight[h] *= keep;
#pragma unroll
      for (int n = 0; n < HEAD / 8; ++n) {
        sum[n][2 * h] *= keep;
        sum[n][2 * h + 1] *= keep;
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = exp2_fast((score[n][i] - largest[i / 2]) * p.scale);
        weight[i / 2] += score[n][i];
      }
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint32_t a[4] = {pack_bf16(score[2 * step][0], score[2 * step][1]), pack_bf16(score[2 * step][2], score[2 * step][3]),
                             pack_bf16(score[2 * step + 1][0], score[2 * step + 1][1]), pack_bf16(score[2 * step + 1][2], score[2 * step + 1][3])};
#pragma unroll
      for (int n = 0; n < HEAD / 16; ++n) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, values_at + swizzled(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
        mma_bf16(sum[2 * n], a, v[0], v[1]);
        mma_bf16(sum[2 * n + 1], a, v[2], v[3]);
      }
    }
  };

  for (int t = first; t < first + STAGES - 1 && t < last; ++t) fetch(t);
  for (int t = first; t < last; ++t) {
    bar_wait(barriers + 8 * ((t - first) % STAGES), (t - first) / STAGES & 1);
    __syncthreads();                                      // everyone has left the stage that is filled next
    if (t + STAGES - 1 < last) fetch(t + STAGES - 1);
    attend(t);
  }

  const size_t at = (((size_t)b * p.Z + z) * p.splits + split) * kRows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 8 * h;
    weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], 1);
    weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], 2);
    if (c == 0) {
      p.stats[2 * (at + row)] = largest[h];
      p.stats[2 * (at + row) + 1] = weight[h];
    }
    if (first >= last) continue;                          // an empty split: no weight, and its sums are not read
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
      p.part[(at + row) * HEAD + 8 * n + 2 * c] = sum[n][2 * h];
      p.part[(at + row) * HEAD + 8 * n + 2 * c + 1] = sum[n][2 * h + 1];
    }
  }
}

// One warp a row; a lane has the pairs lane, lane + 32, ... of J.
extern "C" __global__ void __launch_bounds__(kMergeThreads) block_attention_merge(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32, z = blockIdx.y, b = blockIdx.z;
  const int group = p.A / p.Z;
  pdl_trigger();
  pdl_wait();
  if (p.ctx[b] < 0 || row >= p.T * group) return;
  const size_t at = ((size_t)b * p.Z + z) * p.splits * kRows + row;
  float largest = __uint_as_float(0xff800000u), total = 0.f, mixed[HEAD / 32] = {};
  for (int s = 0; s < p.splits; ++s) largest = fmaxf(largest, p.stats[2 * (at + (size_t)s * kRows)]);
  for (int s = 0; s < p.splits; ++s) {
    const size_t here = at + (size_t)s * kRows;
    const float weight = p.stats[2 * here + 1];
    if (weight == 0.f) continue;
    const float factor = exp2_fast((p.stats[2 * here] - largest) * p.scale);
    total += weight * factor;
#pragma unroll
    for (int j = 0; j < HEAD / 32; ++j) mixed[j] += factor * p.part[here * HEAD + 2 * (lane + j / 2 * 32) + j % 2];
  }
  uint32_t* to = p.out + ((size_t)(b * p.T + row / group) * p.A + z * group + row % group) * kWords;
#pragma unroll
  for (int j = 0; j < HEAD / 64; ++j) to[lane + 32 * j] = pack_bf16(mixed[2 * j] / total, mixed[2 * j + 1] / total);
}
