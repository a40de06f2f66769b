// What drawing a token needs, for one GPU (sample.cu) and for ranks that hold a share of the vocabulary each (sample_ranks.cu): the
// arithmetic of runtime/sampling.py, a row as the passes see it, its filters and its race. Defined by runtime/sampling.py.
#pragma once
#include "pipeline.cuh"
#include "select.cuh"

#ifndef THREADS
#error "build with -DTHREADS="
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && 2048 % THREADS == 0, "whole warps that share the bins evenly");

namespace prim {

constexpr uint32_t kTokenDraw = 0x544F4B4Eu;             // "TOKN"
constexpr float kHopeless = -26.f, kGreedy = 1e-5f;
constexpr int kMassBits = 40;

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Params {
  const float* logits;                                    // [I, V]
  const int* out_rows;                                    // [I] rows of the plan
  const int* seq;                                         // [M] -1: dead
  const int* pos;                                         // [M]
  const float* temperature;                               // [B]
  const float* top_p;                                     // [B]
  const float* min_p;                                     // [B]
  const int* top_k;                                       // [B]
  const uint64_t* seed;                                   // [B]
  const int* logprobs;                                    // [B] -1: none wanted
  const int* adjust_seq;                                  // [a, 2] (sequence, token)
  const float* adjust_seq_by;                             // [a, 2] (scale, add)
  const int* adjust_row;                                  // [c, 2] (row, token)
  const float* adjust_row_by;                             // [c, 2]
  const int* mask_rows;                                   // [g] rows whose token is constrained, rising
  const uint32_t* masks;                                  // [g, words] bit i % 32 of word i / 32: token i may be drawn
  const int* live;                                        // [1] output rows of this step, in device memory
  const int* live_seq;                                    // [1] a
  const int* live_row;                                    // [1] c
  const int* live_masks;                                  // [1] g
  int* target;                                            // [I]
  float* logp;                                            // [I]
  uint8_t* finite;                                        // [I]
  int* top_ids;                                           // [I, K]
  float* top_logp;                                        // [I, K]
  int V, K, words;
};

// ---------------------------------------------------------------- the arithmetic of runtime/sampling.py

// log of a positive normal number: x = 2^e m, m in [sqrt(1/2), sqrt(2)), log m = 2 atanh((m - 1) / (m + 1)).
__device__ __forceinline__ float log_exact(float x) {
  const int root_half = 0x3f3504f3;
  const int bits = (int)__float_as_uint(x) - root_half, exponent = bits >> 23;
  float s = sub_rn(__uint_as_float((uint32_t)((bits & 0x7fffff) + root_half)), 1.f);
  s = div_rn(s, add_rn(s, 2.f));
  const float square = mul_rn(s, s);
  float series = mul_rn(square, (float)(1.0 / 9));
  series = mul_rn(add_rn(series, (float)(1.0 / 7)), square);
  series = mul_rn(add_rn(series, (float)(1.0 / 5)), square);
  series = mul_rn(add_rn(series, (float)(1.0 / 3)), square);
  series = mul_rn(add_rn(mul_rn(series, s), s), 2.f);
  return add_rn(mul_rn((float)exponent, 0.6931471805599453f), series);
}

// E = -log(1 - v), v = (word + 1/2) / 2^32; what rounding 1 - v loses is put back.
__device__ __forceinline__ float exponential(uint32_t word) {
  const float v = fminf(mul_rn(add_rn(from_u32(word), 0.5f), 2.3283064365386963e-10f), 0.99999994f);
  const float s = sub_rn(1.f, v);
  return -add_rn(sub_rn(sub_rn(1.f, s), v), log_exact(s));
}

// floor(2^40 exp(-below)) as NumPy computes it; below >= 0.
__device__ __forceinline__ uint64_t mass(float below) {
  const float t = fminf(mul_rn(below, 1.4426950408889634f), 100.f), n = round_even(t);
  const float x = mul_rn(sub_rn(n, t), 0.6931471805599453f);
  float weight = mul_rn(x, (float)(1.0 / 720));
  weight = mul_rn(add_rn(weight, (float)(1.0 / 120)), x);
  weight = mul_rn(add_rn(weight, (float)(1.0 / 24)), x);
  weight = mul_rn(add_rn(weight, (float)(1.0 / 6)), x);
  weight = mul_rn(add_rn(weight, 0.5f), x);
  weight = add_rn(mul_rn(add_rn(weight, 1.f), x), 1.f);
  return (uint64_t)__uint_as_float(__float_as_uint(weight) - ((uint32_t)((int)n - kMassBits) << 23));
}

// Philox4x32-10 of counter (block, pos, "TOKN") under the seed: the words of tokens 4 block .. 4 block + 3.
__device__ __forceinline__ uint4 philox(uint32_t block, uint64_t pos, uint64_t seed) {
  uint32_t x0 = block, x1 = (uint32_t)pos, x2 = (uint32_t)(pos >> 32), x3 = kTokenDraw, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t h0 = mul_high(0xD2511F53u, x0), l0 = 0xD2511F53u * x0, h1 = mul_high(0xCD9E8D57u, x2), l1 = 0xCD9E8D57u * x2;
    x0 = h1 ^ x1 ^ k0;
    x1 = l1;
    x2 = h0 ^ x3 ^ k1;
    x3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(x0, x1, x2, x3);
}

__device__ __forceinline__ float adjusted_by(float v, const float* by) { return add_rn(v > 0.f ? div_rn(v, by[0]) : mul_rn(v, by[0]), by[1]); }
__device__ __forceinline__ bool marked(const uint32_t* map, uint32_t id) { return map[id / 32] >> (id % 32) & 1; }

// The first entry of a rising table [n, columns] whose first number is not below `value`.
__device__ __forceinline__ int first_entry(const int* table, int columns, int n, int value) {
  int low = 0;
  while (low < n) {
    const int middle = (low + n) / 2;
    if (table[columns * middle] < value) low = middle + 1;
    else n = middle;
  }
  return low;
}

// ---------------------------------------------------------------- one row

// The tokens of a row as the passes see them.
struct Row {
  const Params& p;
  const float* logits;                                    // [V]
  uint32_t *in_seq, *in_row;                              // bit maps of the adjusted tokens
  int seq_from, seq_to, row_from, row_to;
  const uint32_t* mask;                                   // [words] or null: every token is allowed
  bool finite;                                            // otherwise every raw logit counts as 0
  uint32_t first = 0;                                     // the id of logits[0], a multiple of 4: where ranks cut the vocabulary

  __device__ __forceinline__ bool adjusted() const { return seq_from < seq_to || row_from < row_to; }
  // Below, tokens count from `first`; what f gets are ids.
  __device__ __forceinline__ bool allowed(uint32_t id) const { return !mask || marked(mask, first + id); }
  __device__ __forceinline__ float raw(uint32_t id) const { return finite ? logits[id] : 0.f; }
  // Four neighbours; vectors where every row starts at a multiple of 16 bytes. NaN beyond V.
  __device__ __forceinline__ void quad(uint32_t id, float (&v)[4]) const {
    if (p.V % 4 == 0) {
      const uint4 words = *reinterpret_cast<const uint4*>(logits + id);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = __uint_as_float(comp(words, j));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = id + j < (uint32_t)p.V ? logits[id + j] : 0.f;
    }
    if (!finite) v[0] = v[1] = v[2] = v[3] = 0.f;
  }
  // f(id, value) for every raw logit.
  template <class F> __device__ __forceinline__ void each_raw(F f) const {
    for (uint32_t id = 4 * threadIdx.x; id < (uint32_t)p.V; id += 4 * THREADS) {
      float v[4];
      quad(id, v);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (id + j < (uint32_t)p.V) f(first + id + j, v[j]);
    }
  }
  // f(id, value) for every adjusted token. A token of both tables gets the sequence's entry, then the row's; the mask is last.
  template <class F> __device__ __forceinline__ void each_entry(F f) const {
    const float never = __uint_as_float(0xff800000u);
#pragma unroll 1
    for (int i = seq_from + (int)threadIdx.x; i < seq_to; i += THREADS) {
      const uint32_t id = p.adjust_seq[2 * i + 1] - first;
      if (id < (uint32_t)p.V && !marked(in_row, id)) f(first + id, allowed(id) ? adjusted_by(raw(id), p.adjust_seq_by + 2 * i) : never);
    }
#pragma unroll 1
    for (int i = row_from + (int)threadIdx.x; i < row_to; i += THREADS) {
      const uint32_t id = p.adjust_row[2 * i + 1] - first;
      if (id >= (uint32_t)p.V) continue;
      float v = raw(id);
      if (marked(in_seq, id)) {
        for (int k = seq_from; k < seq_to; ++k)
          if ((uint32_t)p.adjust_seq[2 * k + 1] - first == id) v = adjusted_by(v, p.adjust_seq_by + 2 * k);
      }
      f(first + id, allowed(id) ? adjusted_by(v, p.adjust_row_by + 2 * i) : never);
    }
  }
  // Which of the four tokens from id on exist and stand in no table: 4 bits.
  __device__ __forceinline__ uint32_t plain(uint32_t id) const {
    const uint32_t left = (uint32_t)p.V - id, there = left < 4 ? (1u << left) - 1 : 15u;
    return adjusted() ? there & ~((in_seq[id / 32] | in_row[id / 32]) >> (id % 32)) : there;
  }
  __device__ __forceinline__ void masked_quad(uint32_t id, float (&v)[4]) const {
    quad(id, v);
    if (!mask) return;
    const uint32_t may = mask[(first + id) / 32] >> ((first + id) % 32);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!(may >> j & 1)) v[j] = __uint_as_float(0xff800000u);
  }
  // f(id, value) for every logit as adjusted.
  template <class F> __device__ __forceinline__ void each(F f) const {
    for (uint32_t id = 4 * threadIdx.x; id < (uint32_t)p.V; id += 4 * THREADS) {
      float v[4];
      masked_quad(id, v);
      const uint32_t here = plain(id);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (here >> j & 1) f(first + id + j, v[j]);
    }
    if (adjusted()) each_entry(f);
  }
};

// What reads a row once: its best raw logit, and whether any is NaN or infinite.
struct Scan {
  uint64_t best = 0, bad = 0;
  __device__ __forceinline__ void operator()(uint32_t id, float v) {
    bad |= (__float_as_uint(v) & 0x7f800000u) == 0x7f800000u;
    const uint64_t rank = rank_of(v, id);
    best = rank > best ? rank : best;
  }
};

// The best token as adjusted, in every thread.
__device__ __forceinline__ uint64_t best_adjusted(const Row& row, SelectRoom& room) {
  uint64_t best = 0;
  row.each([&](uint32_t id, float v) {
    const uint64_t rank = rank_of(v, id);
    best = rank > best ? rank : best;
  });
  return block_max<THREADS>(room.warp, best);
}

// Finds the row's mask and entries, and marks the entries' tokens. All threads call it.
__device__ __forceinline__ void mark_adjusted(Row& row, int* span, int m, int s) {
  const Params& p = row.p;
  if (threadIdx.x < 2) span[threadIdx.x] = first_entry(p.adjust_seq, 2, *p.live_seq, s + (int)threadIdx.x);
  else if (threadIdx.x < 4) span[threadIdx.x] = first_entry(p.adjust_row, 2, *p.live_row, m + (int)threadIdx.x - 2);
  else if (threadIdx.x == 4) span[4] = first_entry(p.mask_rows, 1, *p.live_masks, m);
  __syncthreads();
  row.seq_from = span[0];
  row.seq_to = span[1];
  row.row_from = span[2];
  row.row_to = span[3];
  const int mine = span[4];
  if (mine < *p.live_masks && p.mask_rows[mine] == m) row.mask = p.masks + (size_t)mine * p.words;
  if (!row.adjusted()) return;
  for (int i = threadIdx.x; i < (p.V + 31) / 32; i += THREADS) row.in_seq[i] = row.in_row[i] = 0;
  __syncthreads();
  auto mark = [&](uint32_t* map, uint32_t token) { const uint32_t id = token - row.first; if (id < (uint32_t)p.V) or_shared(&map[id / 32], 1u << (id % 32)); };
  for (int i = row.seq_from + (int)threadIdx.x; i < row.seq_to; i += THREADS) mark(row.in_seq, p.adjust_seq[2 * i + 1]);
  for (int i = row.row_from + (int)threadIdx.x; i < row.row_to; i += THREADS) mark(row.in_row, p.adjust_row[2 * i + 1]);
  __syncthreads();
}

// 64 bins for each unit of log-probability: a vocabulary spreads over hundreds of them.
__device__ __forceinline__ uint32_t coarse_bin(float below) { return (uint32_t)fminf(fmaxf(below * 64.f, 0.f), (float)(kBins - 1)); }

// Where the filters cut: tokens (bits of -d, id) up to it stay. Every filter cuts the one order, so the earliest cut is all.
// vocab: tokens of all ranks; team: what adds the ranks up.
template <class Team>
__device__ __forceinline__ Cut filter(const Row& row, SelectRoom& room, float largest, float temperature, int s, int vocab, Team& team) {
  const Params& p = row.p;
  const float top_p = p.top_p[s], min_p = p.min_p[s];
  const int top_k = p.top_k[s];
  Cut cut = {0xffffffffu, 0xffffffffu};
  auto each = [&](auto f) {
    row.each([&](uint32_t id, float v) {
      const float below = plus_zero(-div_rn(sub_rn(v, largest), temperature));
      f(__float_as_uint(below), coarse_bin(below), id);
    });
  };
  if (min_p > 0.f) cut.key = __float_as_uint(plus_zero(-log_exact(fmaxf(min_p, 1e-37f))));
  if (top_k > 0 && top_k < vocab) cut = earlier(cut, first_to_reach<THREADS>(room, (uint64_t)top_k, each, [](uint32_t) { return (uint64_t)1; }, team));
  if (top_p < 1.f) {
    uint64_t kept = 0;
    each([&](uint32_t key, uint32_t, uint32_t id) { if (within(cut, key, id)) kept += mass(__uint_as_float(key)); });
    kept = team.sum(block_sum<THREADS>(room.warp, kept));
    const uint64_t wanted = ceil_product((double)top_p, kept);
    cut = earlier(cut, first_to_reach<THREADS>(room, wanted, each, [](uint32_t key) { return mass(__uint_as_float(key)); }, team));
  }
  return cut;
}

// The best score among the tokens that stay, as a rank; 0 if none does. All threads return it.
__device__ __forceinline__ uint64_t race(const Row& row, SelectRoom& room, Cut cut, float largest, float temperature, uint64_t pos, uint64_t seed) {
  uint64_t best = 0;
  auto score = [&](uint32_t id, float d, uint32_t word) {
    const uint64_t rank = rank_of(sub_rn(d, log_exact(exponential(word))), id);
    best = rank > best ? rank : best;
  };
  auto stays = [&](uint32_t id, float d) { return d >= kHopeless && within(cut, __float_as_uint(plus_zero(-d)), id); };
  for (uint32_t id = 4 * threadIdx.x; id < (uint32_t)row.p.V; id += 4 * THREADS) {
    float d[4];
    row.masked_quad(id, d);
    const uint32_t here = row.plain(id);
    uint32_t staying = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      d[j] = div_rn(sub_rn(d[j], largest), temperature);
      if (here >> j & 1 && stays(row.first + id + j, d[j])) staying |= 1u << j;
    }
    if (!staying) continue;
    const uint4 words = philox((row.first + id) / 4, pos, seed);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (staying >> j & 1) score(row.first + id + j, d[j], comp(words, j));
  }
  if (row.adjusted()) {
    row.each_entry([&](uint32_t id, float v) {
      const float d = div_rn(sub_rn(v, largest), temperature);
      if (stays(id, d)) score(id, d, comp(philox(id / 4, pos, seed), id % 4));
    });
  }
  return block_max<THREADS>(room.warp, best);
}

}  // namespace prim
