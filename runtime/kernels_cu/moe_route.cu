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
// logit twice. Limits: E <= MAX_EXPERTS <= 1024, k <= 32.
// Source: DeepSeek-V3, arXiv 2412.19437 section 2.1.2 (bias for selection alone).
#include "prim/memory.cuh"
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
  int* choice;       // [rows] sorted row -> choice, -1 for a pad
  float* weight;     // [rows] router weight by sorted row
  int* octets;       // [1] rows / 8, pads included
  int* claim;        // [1] zeroed
  int* ready;        // [n] zeroed
  int* arrived;      // [1] blocks that have routed their tokens; zeroed again by the last
  int chunk_rows;
};

struct Shared {
  int count[MAX_EXPERTS], next[MAX_EXPERTS], warp_rows[kWarps], warp_chunks[kWarps], last;
  int expert[kWarps * kMaxTopK];
  float weight[kWarps * kMaxTopK];
};

// Inclusive sum over lanes.
__device__ __forceinline__ int lane_sums(int v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += x;
  }
  return v;
}

// Rows and chunks before this thread's expert; the block's totals go on to the next round's base.
__device__ __forceinline__ void exclusive_sums(Shared& sh, int& rows, int& chunks, int& base_rows, int& base_chunks, int warp, int lane) {
  const int my_rows = rows, my_chunks = chunks, a = lane_sums(rows, lane), b = lane_sums(chunks, lane);
  if (lane == 31) { sh.warp_rows[warp] = a; sh.warp_chunks[warp] = b; }
  __syncthreads();
  const int wa = lane_sums(lane < kWarps ? sh.warp_rows[lane] : 0, lane), wb = lane_sums(lane < kWarps ? sh.warp_chunks[lane] : 0, lane);
  const int before_a = __shfl_sync(0xffffffffu, wa, (warp + 31) % 32), before_b = __shfl_sync(0xffffffffu, wb, (warp + 31) % 32);
  rows = base_rows + a - my_rows + (warp ? before_a : 0);
  chunks = base_chunks + b - my_chunks + (warp ? before_b : 0);
  base_rows += __shfl_sync(0xffffffffu, wa, 31);
  base_chunks += __shfl_sync(0xffffffffu, wb, 31);
}

__device__ __forceinline__ void clear_counts(Shared& sh) {
  for (int e = threadIdx.x; e < MAX_EXPERTS; e += kThreads) sh.count[e] = 0;
}
__device__ __forceinline__ void count_choices(Shared& sh, const int* expert, int choices) {
#pragma unroll 8
  for (int i = threadIdx.x; i < choices; i += kThreads)
    if (expert[i] >= 0) atomicAdd(&sh.count[expert[i]], 1);
}

// Writes the work list from the counts and the choices (in global or shared memory).
__device__ __forceinline__ void sort_choices(Shared& sh, const Sorted& s, const int* expert, const float* weight, int choices, int E) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  int base_rows = 0, base_chunks = 0;
  __syncthreads();                                        // counts are complete
  for (int e0 = 0; e0 < E; e0 += kThreads) {
    const int e = e0 + tid, rows = e < E ? sh.count[e] : 0, chunks = (rows + s.chunk_rows - 1) / s.chunk_rows, padded = (rows + 7) / 8 * 8;
    int row = padded, chunk = chunks;
    if (e0) __syncthreads();
    exclusive_sums(sh, row, chunk, base_rows, base_chunks, warp, lane);
    if (e < E) sh.next[e] = row;
    if (chunks) {
      const int each = ((rows + chunks - 1) / chunks + 7) / 8 * 8;
      for (int i = 0; i < chunks; ++i) {
        const int first = i * each, last = first + each < rows ? first + each : rows;
        s.chunks[chunk + i] = make_int4(e, row + first, last - first, chunk | chunks << 18);
        s.ready[chunk + i] = 0;
      }
      for (int i = rows; i < padded; ++i) s.choice[row + i] = -1;
    }
  }
  if (tid == 0) { *s.total = base_chunks; *s.octets = base_rows / 8; *s.claim = 0; }
  __syncthreads();
#pragma unroll 8
  for (int i = tid; i < choices; i += kThreads) {
    const int e = expert[i];
    if (e >= 0) {
      const int n = atomicAdd(&sh.next[e], 1);
      s.choice[n] = i;
      s.weight[n] = weight[i];
    }
  }
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

// The k best of one token, by one warp: each lane keeps E / 32 scores, k rounds of a warp-wide best. Lane j returns choice j.
__device__ __forceinline__ void best_experts(const float* logits, const float* bias, int E, int top_k, float scale, int lane, int& expert, float& weight) {
  float score[kMine], key[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {                       // all loads first: one latency, not one each
    const int e = i * 32 + lane;
    score[i] = logits[e < E ? e : 0];
    key[i] = bias[e < E ? e : 0];
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    score[i] = 1.f / (1.f + expf(-score[i]));
    const float k = score[i] + key[i];
    key[i] = i * 32 + lane >= E ? -2e30f : k == k ? k : -1e30f;  // NaN comes last, but an expert it stays
  }
  float sum = 0.f, mine = 0.f;
  expert = -1;
  for (int k = 0; k < top_k; ++k) {
    float best = -2e30f;
    int at = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (key[i] > best) { best = key[i]; at = i * 32 + lane; }
    const uint32_t top = warp_max(ordered(best));
    at = warp_min(ordered(best) == top ? (uint32_t)at : 0x7fffffffu);
    float chosen = 0.f;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (i * 32 + lane == at) { chosen = score[i]; key[i] = -2e30f; }
    chosen = __shfl_sync(0xffffffffu, chosen, at & 31);
    sum += chosen;
    if (lane == k) { expert = at; mine = chosen; }
  }
  weight = mine / (sum + 1e-20f) * scale;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_route_sort(const float* logits, const float* bias, const int* live, int* expert, float* weight, float scale, int M, int E, int top_k,
               const __grid_constant__ Sorted s) {
  __shared__ Shared sh;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, m = blockIdx.x * kWarps + warp;
  const bool alone = gridDim.x == 1;
  clear_counts(sh);
  pdl_trigger();
  pdl_wait();
  __syncthreads();
  if (m < M) {
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
