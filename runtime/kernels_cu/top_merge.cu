// A vocabulary that is cut over ranks: the K likeliest tokens of all of it, and rows of logits put together.
//
//   top_pack      block = a row    (id, logit) of this rank's K likeliest, and the log of its sum of exponentials
//   top_merge     block = a row    the K largest of WORLD x K logits, falling, of equals the lower id; logit - log of all sums
//
//   side_by_side  thread = 16 bytes    out[m] = the ranks' rows m, one after the other
//
// Instead of V logits a row travels as 8 (K + 1) bytes a rank: 136 of 655,360 at K = 16, V = 163,840, and each rank searches V / WORLD
// logits. Rows at or beyond *live are neither read nor written. A row with NaN has NaN for every log-probability.
#include "prim/memory.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

#ifndef THREADS
#error "build with -DTHREADS= -DWORLD= -DMOST="
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS) top_pack(const float* logits, const int* ids, const float* logp, const int* live, uint2* out, int share, int K,
                                                               int first) {
  const int m = blockIdx.x;                               // logits [M, share], ids and logp [M, K], out [M, K + 1]
  pdl_trigger();
  pdl_wait();
  if (m >= *live) return;
  const float* row = logits + (size_t)m * share;
  uint2* to = out + (size_t)m * (K + 1);
  for (int k = threadIdx.x; k < K; k += THREADS) {
    const int id = ids[m * K + k];
    to[k] = {(uint32_t)(id + first), __float_as_uint(row[id])};
    if (k == 0) to[K] = {0u, __float_as_uint(row[id] - logp[m * K])};
  }
}

// Rises as the logit falls, NaN last.
__device__ __forceinline__ uint32_t falling(float v) { return v != v ? 0xffffffffu : ~ordered(v == 0.f ? 0.f : v); }

extern "C" __global__ void __launch_bounds__(THREADS) top_merge(const uint2* parts, const int* live, int* ids, float* logp, int M, int K) {
  __shared__ uint32_t key[MOST], name[MOST];
  const int m = blockIdx.x, count = WORLD * K;            // parts [WORLD, M, K + 1], ids and logp [M, K]
  pdl_trigger();
  pdl_wait();
  if (m >= *live) return;
  auto part = [&](int rank, int k) { return parts[((size_t)rank * M + m) * (K + 1) + k]; };
  for (int c = threadIdx.x; c < count; c += THREADS) {
    const uint2 one = part(c / K, c % K);
    key[c] = falling(__uint_as_float(one.y));
    name[c] = one.x;
  }
  float largest = __uint_as_float(part(0, K).y), total = 0.f;
  for (int rank = 1; rank < WORLD; ++rank) {
    const float own = __uint_as_float(part(rank, K).y);
    largest = own > largest || own != own ? own : largest;
  }
  for (int rank = 0; rank < WORLD; ++rank) total += expf(__uint_as_float(part(rank, K).y) - largest);
  const float log_total = largest + logf(total);
  __syncthreads();
  for (int c = threadIdx.x; c < count; c += THREADS) {
    int before = 0;
    for (int other = 0; other < count; ++other) before += key[other] < key[c] || (key[other] == key[c] && name[other] < name[c]);
    if (before >= K) continue;
    ids[m * K + before] = (int)name[c];
    logp[m * K + before] = __uint_as_float(part(c / K, c % K).y) - log_total;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) side_by_side(const uint4* parts, uint4* out, int vectors) {
  const int m = blockIdx.y, rank = blockIdx.z, i = blockIdx.x * THREADS + threadIdx.x;
  pdl_trigger();                                          // parts [WORLD, M, vectors], out [M, WORLD, vectors]
  pdl_wait();
  if (i < vectors) out[((size_t)m * WORLD + rank) * vectors + i] = parts[((size_t)rank * gridDim.y + m) * vectors + i];
}
