// The drafter's own small ops; its attention is block_attention.cu. Defined by kernels_np/draft.py.
//
//   head_norm_rope   warp = a head of a row      out = rope(rms_norm(x over J)), halves (j, j + J/2) rotated in float32
//   kv_write         thread = 8 numbers          k_cache[slot] = k, v_cache[slot] = v
//   top_logprobs     block = a row               the K likeliest tokens, log-softmax over the whole vocabulary
//
// Inequality: head_norm_rope at 64 heads of 128 moves 33 KB a row, kv_write at 8 heads 8 KB a row: latency below 100 rows.
// top_logprobs at V = 163,840: 0.66 MB a row, 0.14 us of an H200's bandwidth; a block reads it five times through one SM, about
// 30 us. 70 rows (10 streams, 7 depths) fit the device at once.
// Dead rows have a negative number in `alive` (a slot or sequence of -1; null: none is dead), top_logprobs: at or beyond *live.
// Source: Qwen3, arXiv 2505.09388; RoPE, arXiv 2104.09864; DFlash, arXiv 2602.06036; DDTree, arXiv 2604.12989 lemma 1.
#include "prim/bf16.cuh"
#include "prim/pipeline.cuh"
#include "prim/select.cuh"

using namespace prim;

#ifndef THREADS
#error "build with -DTHREADS= and -DHEAD="
#endif
#ifndef HEAD
#error "build with -DHEAD=: the width of a head"
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && 2048 % THREADS == 0, "whole warps that share the bins evenly");
static_assert(HEAD % 64 == 0 && HEAD <= 512, "a lane holds whole pairs, and the same places of both halves");
constexpr int kSlice = 128, kWords = HEAD / 64, kHalf = HEAD / 2;

// Lane l holds numbers l HEAD/32 ... of the head; the other half's same places are 16 lanes away.
extern "C" __global__ void __launch_bounds__(kSlice) head_norm_rope(const uint32_t* x, const uint32_t* w, const float* cos_sin, const int* pos,
                                                                    const int* alive, uint32_t* out, int heads, float eps) {
  const int m = blockIdx.y, lane = threadIdx.x % 32, head = blockIdx.x * (kSlice / 32) + threadIdx.x / 32;
  pdl_trigger();                                          // x, out [M, A, J] bf16, w [J] bf16, cos_sin [X, J] f32
  pdl_wait();
  if (head >= heads || (alive && alive[m] < 0)) return;   // a whole warp
  const size_t at = ((size_t)m * heads + head) * (HEAD / 2) + lane * kWords;
  float value[2 * kWords], squares = 0.f;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const uint32_t both = x[at + j];
    value[2 * j] = __uint_as_float(both << 16);
    value[2 * j + 1] = __uint_as_float(both & 0xffff0000u);
    squares += value[2 * j] * value[2 * j] + value[2 * j + 1] * value[2 * j + 1];
  }
  const float scale = 1.f / sqrtf(warp_sum(squares) / (float)HEAD + eps);
  const float* table = cos_sin + (size_t)pos[m] * HEAD + (lane % 16) * 2 * kWords;
  float turned[2 * kWords];
#pragma unroll
  for (int j = 0; j < 2 * kWords; ++j) {
    const uint32_t weight = w[lane * kWords + j / 2];
    const float mine = value[j] * scale * __uint_as_float(j % 2 ? weight & 0xffff0000u : weight << 16);
    const float other = __shfl_xor_sync(0xffffffffu, mine, 16);
    turned[j] = mine * table[j] + (lane < 16 ? -other : other) * table[kHalf + j];
  }
#pragma unroll
  for (int j = 0; j < kWords; ++j) out[at + j] = pack_bf16(turned[2 * j], turned[2 * j + 1]);
}

extern "C" __global__ void __launch_bounds__(kSlice) kv_write(const uint4* k, const uint4* v, const int* slot, uint4* k_cache, uint4* v_cache, int vectors) {
  const int m = blockIdx.y, i = blockIdx.x * kSlice + threadIdx.x;
  pdl_trigger();                                          // k, v [M, Z, J], caches [S, Z, J]
  pdl_wait();
  if (i >= vectors || slot[m] < 0) return;
  k_cache[(size_t)slot[m] * vectors + i] = k[(size_t)m * vectors + i];
  v_cache[(size_t)slot[m] * vectors + i] = v[(size_t)m * vectors + i];
}

// A key that rises as the logit falls, NaN last; a row with NaN has NaN for every log-probability.
__device__ __forceinline__ uint32_t falling(float v) { return v != v ? 0xffffffffu : ~ordered(plus_zero(v)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) top_logprobs(const float* logits, const int* live, int* ids, float* logp, int V, int K) {
  DYNAMIC_SMEM(raw);
  SelectRoom& room = *reinterpret_cast<SelectRoom*>(raw);
  const int m = blockIdx.x;                               // logits [M, V], ids and logp [M, K]
  const float* row = logits + (size_t)m * V;
  pdl_trigger();
  pdl_wait();
  if (m >= *live) return;
  auto each_value = [&](auto f) {
    for (int id = 4 * threadIdx.x; id < V; id += 4 * THREADS) {
      float v[4];
      if (V % 4 == 0) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + id);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __uint_as_float(comp(words, j));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = id + j < V ? row[id + j] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (id + j < V) f((uint32_t)(id + j), v[j]);
    }
  };
  uint64_t best = 0;
  each_value([&](uint32_t id, float v) {
    const uint64_t rank = rank_of(v == v ? v : __uint_as_float(0x7f800000u), id);
    best = rank > best ? rank : best;
  });
  const float largest = rank_value(block_max<THREADS>(room.warp, best));
  float sum = 0.f;
  each_value([&](uint32_t, float v) { sum += expf(v - largest); });
  const float log_total = logf(block_sum<THREADS>(reinterpret_cast<float*>(room.warp), sum));
  auto each = [&](auto f) {
    each_value([&](uint32_t id, float v) {
      f(falling(v), v != v ? (uint32_t)kBins - 1 : (uint32_t)fminf(fmaxf((largest - v) * 64.f, 0.f), (float)(kBins - 1)), id);
    });
  };
  const Cut cut = first_to_reach<THREADS>(room, (uint64_t)K, each, [](uint32_t) { return (uint64_t)1; });
  in_order<THREADS>(room, cut, K, each, [&](int rank, uint32_t, uint32_t id) {
    ids[(size_t)m * K + rank] = (int)id;
    logp[(size_t)m * K + rank] = (row[id] - largest) - log_total;
  });
}
