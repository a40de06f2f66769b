// Routing, and the sort of (token, expert) choices that moe_w4.cu works through.
//
//   moe_route_sort   logits -> expert, weight, work list     one launch: the last block to finish its tokens sorts
//   moe_sort         expert -> work list                     for choices that another op has made
//
// Route: s = sigmoid(logit); the k largest of s + bias, ties to the lower expert; weight = s / (sum s + 1e-20) * scale.
// Sort: counts by expert in shared memory, exclusive scan, scatter. An expert's rows start at a multiple of eight (pads: choice
// -1) and are cut into chunks of at most chunk_rows, evenly and in eights: 33 rows at 32 a chunk become 24 + 9. A row's results
// do not depend on its place in a chunk.
// Dead rows have expert -1 (moe_route_sort: live < 0) and take no place.
// At M = 1 this kernel is latency alone, so choices stay in shared memory where one block sees them all, and nothing reads a
// logit twice. Limits: E <= MAX_EXPERTS <= 1024, k <= 32, M k <= 2^17, 2^13 chunks.
// Source: DeepSeek-V3, arXiv 2412.19437 section 2.1.2 (bias for selection alone).
#include "prim/memory.cuh"
#include "prim/mma.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

#ifndef MAX_EXPERTS
#error "build with -DMAX_EXPERTS="
#endif
static_assert(MAX_EXPERTS % 32 == 0 && MAX_EXPERTS <= 1024, "scores a lane keeps, and shared counters");
constexpr int kThreads = 512, kWarps = kThreads / 32, kMine = MAX_EXPERTS / 32, kMaxTopK = 32;

struct Sorted {
  int4* chunks;      // [n] {expert, first sorted row, rows, first chunk of the expert | its chunks << 18}
  int* total;        // [1]
  int2* rows;        // [rows] sorted row -> {choice, or -1 for a pad; bits of its router weight}
  int* octets;       // [1] rows / 8, pads included
  int* claim;        // [1] zeroed
  int* ready;        // [n] zeroed
  int* arrived;      // [1] blocks that have routed their tokens; zeroed again by the last
  int chunk_rows;
};

constexpr int kBlockTokens = 4, kBlockTopK = 8;           // what route_by_block takes

struct Shared {
  int count[MAX_EXPERTS], next[MAX_EXPERTS], last;
  uint32_t warp_sum[kWarps];
  int expert[kWarps * kMaxTopK];
  float weight[kWarps * kMaxTopK];
  uint32_t key[kBlockTokens][kWarps * kBlockTopK];        // route_by_block: the best of each warp, by rank
  int who[kBlockTokens][kWarps * kBlockTopK];
  float score[kBlockTokens][kWarps * kBlockTopK];
};

// Inclusive sum over lanes.
__device__ __forceinline__ uint32_t lane_sums(uint32_t v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t x = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += x;
  }
  return v;
}

// Rows and chunks before this thread's expert (both in one number: rows below 2^18, chunks above), and the block's total.
constexpr int kChunkBit = 18;
__device__ __forceinline__ uint32_t exclusive_sum(Shared& sh, uint32_t mine, uint32_t& total, int warp, int lane) {
  const uint32_t sum = lane_sums(mine, lane);
  if (lane == 31) sh.warp_sum[warp] = sum;
  __syncthreads();
  const uint32_t warps = lane_sums(lane < kWarps ? sh.warp_sum[lane] : 0u, lane);
  const uint32_t before = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  total = __shfl_sync(0xffffffffu, warps, 31);
  return sum - mine + (warp ? before : 0u);
}

__device__ __forceinline__ void clear_counts(Shared& sh) {
  for (int e = threadIdx.x; e < MAX_EXPERTS; e += kThreads) sh.count[e] = 0;
}
// Choices are taken eight a thread: eight loads in flight, then eight atomics, then eight stores. One block sorts 8192 choices,
// so latencies would add up (the compiler moves no load over an atomic).
constexpr int kBatch = 8;
__device__ __forceinline__ void load_batch(const int* expert, int choices, int i0, int (&e)[kBatch]) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) e[b] = i0 + b * kThreads < choices ? expert[i0 + b * kThreads] : -1;
}
__device__ __forceinline__ void count_choices(Shared& sh, const int* expert, int choices) {
  for (int i0 = threadIdx.x; i0 < choices; i0 += kBatch * kThreads) {
    int e[kBatch];
    load_batch(expert, choices, i0, e);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (e[b] >= 0) atomicAdd(&sh.count[e[b]], 1);
  }
}
__device__ __forceinline__ void place_choices(Shared& sh, const Sorted& s, const int* expert, const float* weight, int choices) {
  for (int i0 = threadIdx.x; i0 < choices; i0 += kBatch * kThreads) {
    int e[kBatch], at[kBatch];
    float w[kBatch];
    load_batch(expert, choices, i0, e);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) w[b] = e[b] >= 0 ? weight[i0 + b * kThreads] : 0.f;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) at[b] = e[b] >= 0 ? atomicAdd(&sh.next[e[b]], 1) : 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (e[b] >= 0) s.rows[at[b]] = make_int2(i0 + b * kThreads, (int)__float_as_uint(w[b]));
  }
}

// Writes the work list from the counts and the choices (in global or shared memory).
__device__ __forceinline__ void sort_choices(Shared& sh, const Sorted& s, const int* expert, const float* weight, int choices, int E) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  uint32_t base = 0;
  __syncthreads();                                        // counts are complete
  for (int e0 = 0; e0 < E; e0 += kThreads) {
    const int e = e0 + tid, rows = e < E ? sh.count[e] : 0, chunks = (rows + s.chunk_rows - 1) / s.chunk_rows, padded = (rows + 7) / 8 * 8;
    uint32_t total;
    if (e0) __syncthreads();
    const uint32_t before = base + exclusive_sum(sh, (uint32_t)padded | (uint32_t)chunks << kChunkBit, total, warp, lane);
    const int row = before & ((1u << kChunkBit) - 1), chunk = before >> kChunkBit;
    base += total;
    if (e < E) sh.next[e] = row;
    if (chunks) {
      const int each = ((rows + chunks - 1) / chunks + 7) / 8 * 8;
      for (int i = 0; i < chunks; ++i) {
        const int first = i * each, last = first + each < rows ? first + each : rows;
        s.chunks[chunk + i] = make_int4(e, row + first, last - first, chunk | chunks << 18);
        s.ready[chunk + i] = 0;
      }
      for (int i = rows; i < padded; ++i) s.rows[row + i] = make_int2(-1, 0);
    }
  }
  if (tid == 0) { *s.total = base >> kChunkBit; *s.octets = (base & ((1u << kChunkBit) - 1)) / 8; *s.claim = 0; }
  __syncthreads();
  place_choices(sh, s, expert, weight, choices);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_sort(const int* expert, const float* weight, int choices, int E, const __grid_constant__ Sorted s) {
  __shared__ Shared sh;
  clear_counts(sh);
  pdl_trigger();
  pdl_wait();
  __syncthreads();
  count_choices(sh, expert, choices);
  sort_choices(sh, s, expert, weight, choices, E);
}

// The k best of one token, by one warp: each lane keeps E / 32 keys, k rounds of a warp-wide best. Lane j returns choice j. The
// chosen scores are computed again at the end: cheaper than carrying all of them through the rounds.
__device__ __forceinline__ void best_experts(const float* logits, const float* bias, int E, int top_k, float scale, int lane, int& expert, float& weight) {
  float score[kMine], offset[kMine];
  uint32_t key[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {                       // all loads first: one latency, not one each
    const int e = i * 32 + lane;
    score[i] = logits[e < E ? e : 0];
    offset[i] = bias[e < E ? e : 0];
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float k = divide_fast(1.f, 1.f + expf(-score[i])) + offset[i];
    key[i] = i * 32 + lane >= E ? 0u : ordered(k == k ? k : -1e30f);  // NaN comes last, but an expert it stays
  }
  expert = -1;
  for (int k = 0; k < top_k; ++k) {
    uint32_t best = key[0];
#pragma unroll
    for (int i = 1; i < kMine; ++i) best = key[i] > best ? key[i] : best;
    const uint32_t top = warp_max(best);
    uint32_t mine = 0xffffu;
#pragma unroll
    for (int i = kMine - 1; i >= 0; --i)
      if (key[i] == top) mine = i * 32 + lane;
    const uint32_t at = warp_min(mine);                   // ties to the lower expert
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (i * 32 + lane == (int)at) key[i] = 0;
    if (lane == k) expert = at;
  }
  const float chosen = lane < top_k ? divide_fast(1.f, 1.f + expf(-logits[expert])) : 0.f;
  float sum = 0.f;
  for (int k = 0; k < top_k; ++k) sum += __shfl_sync(0xffffffffu, chosen, k);
  weight = chosen / (sum + 1e-20f) * scale;
}

// A few tokens by the whole block: a thread an expert. Each warp finds its 32 experts' best k of every token, then warp m the
// best of token m among the warps' (at most 128 candidates, four a lane). Few instructions, because a launch meets cold
// instruction caches; the warp-a-token way above took 4 us at M = 1.
__device__ __forceinline__ void route_by_block(Shared& sh, const float* logits, const float* bias, const int* live, int M, int E, int top_k, float scale) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, candidates = (E + 31) / 32 * top_k;
  float logit[kBlockTokens];
#pragma unroll
  for (int m = 0; m < kBlockTokens; ++m) logit[m] = tid < E && m < M ? logits[(size_t)m * E + tid] : 0.f;
  const float b = tid < E ? bias[tid] : 0.f;
#pragma unroll
  for (int m = 0; m < kBlockTokens; ++m) {
    if (m >= M) break;
    const float score = divide_fast(1.f, 1.f + expf(-logit[m])), k = score + b;
    uint32_t key = tid < E ? ordered(k == k ? k : -1e30f) : 0u;
    for (int r = 0; r < top_k; ++r) {
      const uint32_t best = warp_max(key);
      const int winner = warp_min(key == best ? (uint32_t)lane : 32u);
      if (lane == winner) {
        sh.key[m][warp * top_k + r] = key;
        sh.who[m][warp * top_k + r] = tid;
        sh.score[m][warp * top_k + r] = score;
        key = 0;
      }
    }
  }
  __syncthreads();
  if (warp >= M) return;
  const int m = warp;
  uint32_t key[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) key[i] = i * 32 + lane < candidates ? sh.key[m][i * 32 + lane] : 0u;
  float sum = 0.f, mine = 0.f;
  int chosen = -1;
  for (int r = 0; r < top_k; ++r) {
    uint32_t best = key[0];
    int at = lane;
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if (key[i] > best) { best = key[i]; at = i * 32 + lane; }
    const uint32_t top = warp_max(best);
    at = warp_min(best == top ? (uint32_t)at : 0xffffu);  // candidates lie by warp, then by rank: ties to the lower expert
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i * 32 + lane == at) key[i] = 0;
    const float score = sh.score[m][at];
    sum += score;
    if (lane == r) { chosen = sh.who[m][at]; mine = score; }
  }
  if (lane >= top_k) return;
  const bool alive = !live || live[m] >= 0;
  sh.expert[m * top_k + lane] = alive ? chosen : -1;
  sh.weight[m * top_k + lane] = alive ? mine / (sum + 1e-20f) * scale : 0.f;
  if (alive) atomicAdd(&sh.count[chosen], 1);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_route_sort(const float* logits, const float* bias, const int* live, int* expert, float* weight, float scale, int M, int E, int top_k,
               const __grid_constant__ Sorted s) {
  __shared__ Shared sh;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, each = (M + gridDim.x - 1) / gridDim.x, m = blockIdx.x * each + warp;
  const bool alone = gridDim.x == 1;
  clear_counts(sh);
  pdl_trigger();
  pdl_wait();
  __syncthreads();
  if (M <= kBlockTokens && E <= kThreads && top_k <= kBlockTopK) {
    route_by_block(sh, logits, bias, live, M, E, top_k, scale);
    __syncthreads();
    for (int i = tid; i < M * top_k; i += kThreads) { expert[i] = sh.expert[i]; weight[i] = sh.weight[i]; }
    sort_choices(sh, s, sh.expert, sh.weight, M * top_k, E);
    return;
  }
  if (warp < each && m < M) {
    int e = -1;
    float w = 0.f;
    if (!live || live[m] >= 0) best_experts(logits + (size_t)m * E, bias, E, top_k, scale, lane, e, w);
    if (lane < top_k) {
      expert[m * top_k + lane] = e;
      weight[m * top_k + lane] = w;
      if (alone) {
        sh.expert[m * top_k + lane] = e;
        sh.weight[m * top_k + lane] = w;
        if (e >= 0) atomicAdd(&sh.count[e], 1);
      }
    }
  }
  if (alone) {
    sort_choices(sh, s, sh.expert, sh.weight, M * top_k, E);
    return;
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) sh.last = atomicAdd(s.arrived, 1) == (int)gridDim.x - 1;
  __syncthreads();
  if (!sh.last) return;
  if (tid == 0) *s.arrived = 0;
  __threadfence();
  count_choices(sh, expert, M * top_k);
  sort_choices(sh, s, expert, weight, M * top_k, E);
}
