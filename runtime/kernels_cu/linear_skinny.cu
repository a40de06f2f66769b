// out = x w^T for at most 16 rows: the weights stream past once, and that is the cost. Defined by kernels_np/dense.py: linear,
// linear_f32; per head (z) also the products of mla_query and mla_value.
//
//   grid         (tiles of 16 WN weight rows, splits of K, heads)
//   block        WN warps along weight rows x WK warps along K; the block's slice of x stands in shared memory
//   warp         16 weight rows x 8 NB columns (= rows of x), mma.m16n8k16 with the weights as A, straight from memory
//
// A lane takes 16 contiguous bytes of a weight row, eight neighbours of K, and of a column the same eight: which k a fragment's
// place means is free, as long as A and B agree. So a row's 32 inputs are 64 contiguous bytes, and nothing is shuffled or staged.
// Two batches of DEPTH chunks (32 inputs each) are in registers: one on its way while the other is multiplied. The first batch
// is asked for before the kernel waits for its predecessor (programmatic dependent launch): weights do not depend on it.
//
//   splits of K  sums of fragments go to `part`; the block that arrives last at its tile adds them in the order of the splits,
//                so a result never depends on who was last. Warps along K meet in shared memory, in order, before that.
//
// Inequality at N = K = 7168: 102.8 MB of weights, 23.9 us at 4.3 TB/s; 1.6 Gflop at M = 16, 2 us: bandwidth binds by ten. What
// limits is bytes in flight: an SM needs some 36 KB on their way; 16 warps with DEPTH 4 have 64.
// A column is one row of x and touches no other: the same bits at every M and beside any neighbours, NaN included. Dead rows
// (seq -1, seq may be null) are not written. Limits: M <= 8 NB <= 16, N a multiple of 16, K of 32.
#include "prim/pipeline.cuh"
#include "prim/stream.cuh"

using namespace prim;

#ifndef NB
#error "build with -DNB= -DWN= -DWK= -DDEPTH="
#endif
static_assert(NB == 1 || NB == 2, "eight or sixteen columns");
static_assert(WN >= 1 && WK >= 1 && WN * WK <= 16, "warps of a block");
static_assert(DEPTH >= 1 && DEPTH <= 8, "chunks of a batch in registers");
constexpr int kThreads = 32 * WN * WK, kChunk = 32, kColumns = 8 * NB, kTile = 16 * WN, kFrag = 128, kPad = 64;

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Params {
  const uint8_t* w;                                       // [heads, N, K] bf16
  const uint8_t* x;                                       // [M, heads, K] bf16, by x_row and x_head
  char* out;                                              // [M, heads, N], by out_row and out_head
  float* part;                                            // [heads, tiles, splits, WN, NB, 32 lanes, 4]
  int* arrived;                                           // [heads, tiles] zero before and after
  const int* seq;                                         // [M] or null
  long long x_row, x_head, out_row, out_head;             // in numbers
  int N, K, M, splits;
};

template <bool FLOAT_OUT> __device__ __forceinline__ void linear(const Params& p, unsigned char* raw, int& last) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4, wn = warp % WN, wk = warp / WN;
  const int tile = blockIdx.x, split = blockIdx.y, head = blockIdx.z, chunks = p.K / kChunk;
  const int from = (int)((long long)chunks * split / p.splits), to = (int)((long long)chunks * (split + 1) / p.splits);
  const int first = from + (to - from) * wk / WK, end = from + (to - from) * (wk + 1) / WK;
  const int row = tile * kTile + wn * 16;                 // the warp's first weight row
  const bool real = row < p.N;
  const uint8_t* weights = p.w + (((size_t)head * p.N + row + g) * p.K + 8 * c) * 2;
  const size_t eight_rows = (size_t)16 * p.K;

  uint4 even[DEPTH][2], odd[DEPTH][2];
  auto load = [&](uint4 (&a)[DEPTH][2], int chunk) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (!real || chunk + d >= end) continue;
      const uint8_t* at = weights + (size_t)(chunk + d) * 2 * kChunk;
      a[d][0] = ldg128_once(at);
      a[d][1] = ldg128_once(at + eight_rows);
    }
  };
  load(even, first);
  pdl_trigger();
  pdl_wait();

  // The slice of x, rows padded by 64 bytes: eight lanes read two rows of 64 bytes each, in different banks.
  const int slice = (to - from) * kChunk, row_bytes = 2 * slice + kPad;
  const smem_t slice_at = smem(raw);
  for (int i = tid; i < p.M * slice / 8; i += kThreads) {
    const int m = i / (slice / 8), v = i % (slice / 8);
    const uint8_t* at = p.x + 2 * (m * p.x_row + head * p.x_head + (long long)from * kChunk + 8 * v);
    sts128(slice_at + m * row_bytes + 16 * v, *reinterpret_cast<const uint4*>(at));
  }
  __syncthreads();

  float sum[NB][4] = {};
  auto multiply = [&](const uint4 (&a)[DEPTH][2], int chunk) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (!real || chunk + d >= end) continue;
      const uint32_t low[4] = {a[d][0].x, a[d][1].x, a[d][0].y, a[d][1].y}, high[4] = {a[d][0].z, a[d][1].z, a[d][0].w, a[d][1].w};
#pragma unroll
      for (int n = 0; n < NB; ++n) {
        const uint4 b = lds128(slice_at + (8 * n + g) * row_bytes + (chunk + d - from) * 2 * kChunk + 16 * c);
        mma_bf16(sum[n], low, b.x, b.y);
        mma_bf16(sum[n], high, b.z, b.w);
      }
    }
  };
  for (int chunk = first; chunk < end; chunk += 2 * DEPTH) {
    load(odd, chunk + DEPTH);
    multiply(even, chunk);
    load(even, chunk + 2 * DEPTH);
    multiply(odd, chunk + DEPTH);
  }

  // Warps along K meet where x stood.
  if (WK > 1) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NB; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sts_f32(slice_at + 4 * (((wk * WN + wn) * NB + n) * kFrag + lane * 4 + i), sum[n][i]);
    }
    __syncthreads();
    if (wk == 0) {
#pragma unroll
      for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          for (int k = 1; k < WK; ++k) sum[n][i] += lds_f32(slice_at + 4 * (((k * WN + wn) * NB + n) * kFrag + lane * 4 + i));
      }
    }
  }

  if (p.splits > 1) {
    float* parts = p.part + (((size_t)head * gridDim.x + tile) * p.splits * WN + wn) * NB * kFrag + lane * 4;
    const size_t each = (size_t)WN * NB * kFrag;
    if (wk == 0) {
#pragma unroll
      for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) parts[split * each + n * kFrag + i] = sum[n][i];
      }
    }
    __threadfence();
    __syncthreads();
    int* counter = p.arrived + (size_t)head * gridDim.x + tile;
    if (tid == 0) last = atomicAdd(counter, 1) == p.splits - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (tid == 0) *counter = 0;
    if (wk == 0) {
#pragma unroll
      for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
        for (int s = 0; s < p.splits; ++s) {
          const uint4 v = ldg128_cg(parts + s * each + n * kFrag);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[n][i] += __uint_as_float(comp(v, i));
        }
      }
    }
  }

  if (wk || !real) return;
#pragma unroll
  for (int n = 0; n < NB; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = 8 * n + 2 * c + i % 2;
      if (m >= p.M || (p.seq && p.seq[m] < 0)) continue;
      const long long at = m * p.out_row + head * p.out_head + row + g + i / 2 * 8;
      if (FLOAT_OUT) reinterpret_cast<float*>(p.out)[at] = sum[n][i];
      else reinterpret_cast<unsigned short*>(p.out)[at] = (unsigned short)pack_bf16(sum[n][i], 0.f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_skinny(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(raw);
  __shared__ int last;
  linear<false>(p, raw, last);
}
extern "C" __global__ void __launch_bounds__(kThreads) linear_skinny_f32(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(raw);
  __shared__ int last;
  linear<true>(p, raw, last);
}
