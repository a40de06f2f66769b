// Draws the token after each output row where ranks hold a share of the vocabulary each: sample.cu's tokens, bit for bit, on every rank.
//
// Logits never travel. The block of a row waits for the blocks of the same number on the other ranks alone, and wherever sample.cu adds
// or compares over its block, this does so over the team (prim/team.cuh): exchanges of a row
//
//   first      all rows: is it finite, the best token as adjusted; with log-probabilities its raw logit, the largest raw logit, the sum of
//              exponentials below that, and the K likeliest
//   filters    top_k: bins, list; top_p: its mass, bins, list. Sums of integers: the cut is the whole vocabulary's. min_p: none
//   last       a draw: the best score. It can not ride in the first, for d = (logit - largest) / temperature is rounded: only with the
//              largest of all ranks has a share sample.cu's bits
//
// so argmax takes one exchange, a draw two, all filters seven. A bin that holds more tokens than a list of 511 a rank and 2,048 in all is
// searched digit by digit, five exchanges of up to four stretches of bins: slow and right.
//
// Every rank writes the same results. A row that is not finite on any rank draws token 0 with NaN for log-probabilities; its request ends.
// Log-probabilities: sums of floats by rank, then in rank order, 5e-6 off.
//
// Grids are equal on all ranks and all their blocks resident; block b has rows b, b + grid, ... . Inequality at 8 ranks, V = 163,840: a
// pass reads 82 KB a row, 0.8 us of one SM; an exchange takes some 2 us. The gather that this replaces moved 655,360 B a row.
// Limits: those of sample.cu for the whole vocabulary; shares of a multiple of 4 tokens; K <= 28.
// Source: as sample.cu; arXiv 1909.08053 section 3.
#include "prim/draw.cuh"
#include "prim/team.cuh"

using namespace prim;

#ifndef WORLD
#error "build with -DTHREADS= -DWORLD= -DBLOCKS="
#endif
static_assert(WORLD >= 2 && WORLD <= 8, "ranks of one host");
constexpr int kWords = 32, kHeader = 4;                   // of the first exchange: a header, then the likeliest tokens
using Region = TeamRegion<WORLD, BLOCKS>;
using State = TeamState<BLOCKS>;
using Seat = TeamSeat<WORLD, BLOCKS>;
using Ranks = RankTeam<THREADS, WORLD, BLOCKS>;

struct Shared {
  SelectRoom room;
  uint64_t told[kWords], first[WORLD * kWords];           // the first exchange
  uint64_t word[2], heard[2 * WORLD];                     // the others
  int span[5];
  uint32_t lost;
};

__device__ __forceinline__ uint64_t pair_of(float a, float b) { return (uint64_t)__float_as_uint(a) << 32 | __float_as_uint(b); }
__device__ __forceinline__ float upper(uint64_t v) { return __uint_as_float((uint32_t)(v >> 32)); }
__device__ __forceinline__ float lower(uint64_t v) { return __uint_as_float((uint32_t)v); }

// told[2], told[3], told[4 ...]: what log-probabilities take of this rank. best: its best token as adjusted.
__device__ __forceinline__ void tell_raw(const Row& row, Shared& sh, uint64_t best, float largest) {
  const Params& p = row.p;
  float sum = 0.f;
  row.each_raw([&](uint32_t, float v) { sum += expf(v - largest); });
  sum = block_sum<THREADS>(reinterpret_cast<float*>(sh.room.warp), sum);
  if (threadIdx.x == 0) {
    sh.told[2] = pair_of(largest, sum);
    sh.told[3] = pair_of(row.raw(rank_id(best) - row.first), 0.f);
  }
  if (p.K == 0) return;
  for (int k = threadIdx.x; k < p.K; k += THREADS) sh.told[kHeader + k] = 0;
  auto each = [&](auto f) {
    row.each_raw([&](uint32_t id, float v) { f(~ordered(plus_zero(v)), coarse_bin(largest - v), id); });
  };
  const Cut cut = first_to_reach<THREADS>(sh.room, (uint64_t)p.K, each, [](uint32_t) { return (uint64_t)1; });
  in_order<THREADS>(sh.room, cut, p.K, each, [&](int rank, uint32_t key, uint32_t id) {
    sh.told[kHeader + rank] = rank_of(unordered(~key), id);
  });
}

// What all ranks told: log-probabilities of the token, whose raw logit is `value`, and of the K likeliest. n: words of a rank.
__device__ __forceinline__ void write_logprobs(const Params& p, const Shared& sh, int n, float value, int i) {
  float largest = upper(sh.first[2]), total = 0.f;
  for (int s = 1; s < WORLD; ++s) largest = fmaxf(largest, upper(sh.first[s * n + 2]));
  for (int s = 0; s < WORLD; ++s) total += lower(sh.first[s * n + 2]) * expf(upper(sh.first[s * n + 2]) - largest);
  const float log_total = logf(total);
  if (threadIdx.x == 0) p.logp[i] = (value - largest) - log_total;
  for (int c = threadIdx.x; c < WORLD * p.K; c += THREADS) {
    const uint64_t mine = sh.first[c / p.K * n + kHeader + c % p.K];
    int above = 0;
    for (int s = 0; s < WORLD; ++s)
      for (int k = 0; k < p.K; ++k) above += sh.first[s * n + kHeader + k] > mine;
    if (!mine || above >= p.K) continue;                  // no two tokens have one rank
    p.top_ids[(size_t)i * p.K + above] = (int)rank_id(mine);
    p.top_logp[(size_t)i * p.K + above] = (rank_value(mine) - largest) - log_total;
  }
}

__device__ __forceinline__ void write_broken(const Params& p, bool asked, int i) {
  const float nan = __uint_as_float(0x7fc00000u);
  if (threadIdx.x == 0) {
    p.target[i] = 0;
    p.finite[i] = 0;
    if (asked) p.logp[i] = nan;
  }
  for (int k = threadIdx.x; asked && k < p.K; k += THREADS) {
    p.top_ids[(size_t)i * p.K + k] = k;
    p.top_logp[(size_t)i * p.K + k] = nan;
  }
}

// Row i, which is row m of the plan, of sequence s.
__device__ __forceinline__ void draw_row(const Params& p, Shared& sh, uint32_t* maps, Ranks& ranks, int i, int m, int s) {
  Row row = {p, p.logits + (size_t)i * p.V, maps, maps + (p.V + 31) / 32, 0, 0, 0, 0, nullptr, true, (uint32_t)(ranks.seat.rank * p.V)};
  const bool asked = p.logprobs[s] >= 0;
  Scan scan;
  row.each_raw([&](uint32_t id, float v) { scan(id, v); });
  row.finite = block_sum<THREADS>(sh.room.warp, scan.bad) == 0;
  uint64_t best = row.finite ? block_max<THREADS>(sh.room.warp, scan.best) : rank_of(0.f, row.first);
  const float largest_raw = rank_value(best);
  mark_adjusted(row, sh.span, m, s);
  if (row.adjusted() || row.mask) best = best_adjusted(row, sh.room);
  if (threadIdx.x == 0) {
    sh.told[0] = row.finite;
    sh.told[1] = best;
  }
  if (asked) tell_raw(row, sh, best, largest_raw);
  const int n = asked ? kHeader + p.K : 2;
  ranks.swap(sh.told, sh.first, n);

  bool finite = true;
  int owner = 0;
  for (int r = 0; r < WORLD; ++r) {
    finite &= sh.first[r * n] != 0;
    if (sh.first[r * n + 1] > sh.first[owner * n + 1]) owner = r;
  }
  if (!finite) {
    write_broken(p, asked, i);
    return;
  }
  best = sh.first[owner * n + 1];
  float value = asked ? upper(sh.first[owner * n + 3]) : 0.f;
  uint32_t token = rank_id(best);
  const float largest = rank_value(best), temperature = p.temperature[s];
  if (temperature >= kGreedy) {
    const Cut cut = filter(row, sh.room, largest, temperature, s, WORLD * p.V, ranks);
    best = race(row, sh.room, cut, largest, temperature, (uint64_t)((long long)p.pos[m] + 1), p.seed[s]);
    if (threadIdx.x == 0) {
      sh.word[0] = best;
      sh.word[1] = pair_of(best ? row.raw(rank_id(best) - row.first) : 0.f, 0.f);
    }
    ranks.swap(sh.word, sh.heard, 2);
    owner = 0;
    for (int r = 1; r < WORLD; ++r)
      if (sh.heard[2 * r] > sh.heard[2 * owner]) owner = r;
    if (sh.heard[2 * owner]) {
      token = rank_id(sh.heard[2 * owner]);
      value = upper(sh.heard[2 * owner + 1]);
    }
  }
  if (threadIdx.x == 0) {
    p.target[i] = (int)token;
    p.finite[i] = 1;
  }
  if (asked) write_logprobs(p, sh, n, value, i);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_ranks(const __grid_constant__ Params p, const __grid_constant__ Seat seat) {
  DYNAMIC_SMEM(raw);
  Shared& sh = *reinterpret_cast<Shared*>(raw);
  pdl_trigger();
  pdl_wait();
  Ranks ranks = {seat, sh.word, sh.heard, &sh.lost, seat.state->epoch[blockIdx.x]};
  if (threadIdx.x == 0) sh.lost = seat.state->failed;
  uint32_t* maps = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
  for (int i = blockIdx.x; i < *p.live; i += gridDim.x) {
    const int m = p.out_rows[i], s = m < 0 ? -1 : p.seq[m];
    if (s < 0) continue;
    __syncthreads();                                      // the row before is written
    draw_row(p, sh, maps, ranks, i, m, s);
  }
  __syncthreads();                                        // everybody has read the epoch
  if (threadIdx.x == 0) seat.state->epoch[blockIdx.x] = ranks.epoch;
}
