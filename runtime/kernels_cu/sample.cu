// Draws the token after each output row, exactly as runtime/sampling.py and kernels_np/sample.py define it.
//
//   token = argmax of (logit - largest) / temperature - log(E) over what min_p, top_k and top_p keep, E ~ Exp(1) keyed by
//   (seed, position, token); below GREEDY_TEMPERATURE the argmax. Log-probabilities are the raw distribution's.
//
//   one block a row:   scan        finite? largest raw, largest adjusted logit
//                      filters     each is a Cut: a place in the one order (d falling, id rising); the earliest counts
//                      race        Philox block for four tokens, best score
//                      raw         log-sum-exp, top_n        (only where the row asks for log-probabilities)
//
// Every number that decides is an integer or one rounded float32 operation after the other (prim/exact.cuh), so the token
// is NumPy's bit for bit, whatever the order in which threads run. Log-probabilities are sums of floats: one order, 5e-6 off.
//
// Adjusted logits are never stored. A mask applies as a logit is read (-inf where a token is forbidden); the adjusted tokens
// of a row are marked in two bit maps, and each pass takes the unmarked ones from the logits, the marked ones from the tables:
// every token once.
//
// Inequality at V = 163,840: 0.66 MB a row, read once: 0.14 us of an H200's bandwidth. One block draws it through one SM at
// about 100 GB/s (an estimate), so a pass costs a row some 6 us: latency binds below 132 rows, L2 traffic above. Passes: 1 for
// argmax, 2 for a plain draw, 7 with all filters; 1 more with adjustments or a mask, 1 for the token's log-probability, 3 for
// top_n. Splitting a row over blocks is open.
// Limits: V <= 2^21, top_n <= kListRoom; adjust_seq rises by sequence, adjust_row and mask_rows by row.
// Source: Gumbel-max, arXiv 1411.0030; Philox4x32-10, doi 10.1145/2063384.2063405; top-p, arXiv 1904.09751.
#include "prim/draw.cuh"

using namespace prim;

struct Shared {
  SelectRoom room;
  int span[5];                                            // the row's entries: adjust_seq from, to; adjust_row from, to; its mask
};

// Log-probability of the token, and the K likeliest tokens, in the raw distribution.
__device__ __forceinline__ void write_logprobs(const Row& row, SelectRoom& room, float largest, uint32_t token, int i) {
  const Params& p = row.p;
  float sum = 0.f;
  row.each_raw([&](uint32_t, float v) { sum += expf(v - largest); });
  const float log_total = logf(block_sum<THREADS>(reinterpret_cast<float*>(room.warp), sum));
  if (threadIdx.x == 0) p.logp[i] = (row.raw(token) - largest) - log_total;
  if (p.K == 0) return;
  auto each = [&](auto f) {
    row.each_raw([&](uint32_t id, float v) { f(~ordered(plus_zero(v)), coarse_bin(largest - v), id); });
  };
  const Cut cut = first_to_reach<THREADS>(room, (uint64_t)p.K, each, [](uint32_t) { return (uint64_t)1; });
  in_order<THREADS>(room, cut, p.K, each, [&](int rank, uint32_t key, uint32_t id) {
    p.top_ids[(size_t)i * p.K + rank] = (int)id;
    p.top_logp[(size_t)i * p.K + rank] = (unordered(~key) - largest) - log_total;
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(raw);
  Shared& sh = *reinterpret_cast<Shared*>(raw);
  const int i = blockIdx.x;
  pdl_trigger();
  pdl_wait();
  if (i >= *p.live) return;
  const int m = p.out_rows[i], s = m < 0 ? -1 : p.seq[m];
  if (s < 0) return;
  uint32_t* maps = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
  Row row = {p, p.logits + (size_t)i * p.V, maps, maps + (p.V + 31) / 32, 0, 0, 0, 0, nullptr, true};

  Scan scan;
  row.each_raw([&](uint32_t id, float v) { scan(id, v); });
  row.finite = block_sum<THREADS>(sh.room.warp, scan.bad) == 0;
  uint64_t best = row.finite ? block_max<THREADS>(sh.room.warp, scan.best) : rank_of(0.f, 0);
  const float largest_raw = rank_value(best);
  mark_adjusted(row, sh.span, m, s);
  if (row.adjusted() || row.mask) best = best_adjusted(row, sh.room);
  const float largest = rank_value(best), temperature = p.temperature[s];
  uint32_t token = rank_id(best);
  if (temperature >= kGreedy) {
    Alone alone;
    const Cut cut = filter(row, sh.room, largest, temperature, s, p.V, alone);
    best = race(row, sh.room, cut, largest, temperature, (uint64_t)((long long)p.pos[m] + 1), p.seed[s]);
    if (best) token = rank_id(best);
  }
  if (threadIdx.x == 0) {
    p.target[i] = (int)token;
    p.finite[i] = row.finite;
  }
  if (p.logprobs[s] >= 0) write_logprobs(row, sh.room, largest_raw, token, i);
}
