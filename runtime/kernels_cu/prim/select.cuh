// Block-wide selection: the first element, in the order of (key, id), at which the weights of all up to it reach a number.
//
// With weight 1 that is the n-th smallest; with probability masses it is the edge of a nucleus. Weights are integers, so the
// result does not depend on the order of summation, and ties end at a definite id.
//
// One pass over the elements adds up coarse bins (any function that never falls as the key rises; the caller chooses one that
// spreads its elements: equal bins mean equal addresses, and shared atomics on one address go one by one). A second pass
// lists the elements of the bin in question. On the list, five rounds fix 11, 11 and 10 bits of the key and 11 and 10 of the
// id. If the bin holds more than the list (all logits equal, say), the rounds go over all elements instead: slow and right.
//
// Elements may be spread over ranks: a team adds their bins up and joins their lists (prim/team.cuh), and all find the same cut.
#pragma once
#include "exact.cuh"

namespace prim {

constexpr int kBins = 2048, kListRoom = 2048;
constexpr uint32_t kMostIds = 1u << 21;
constexpr uint32_t kNoBin = 0xffffffffu;
constexpr int kCoarse = -2, kList = -1, kLast = 4;      // rounds: coarse bins, the list, then the digits of (key, id)

struct Cut {
  uint32_t key, id;
};
__device__ __forceinline__ bool within(Cut c, uint32_t key, uint32_t id) { return key < c.key || (key == c.key && id <= c.id); }
__device__ __forceinline__ Cut earlier(Cut a, Cut b) { return within(b, a.key, a.id) ? a : b; }

struct SelectRoom {
  uint32_t low[kBins], high[kBins];   // 64-bit sums in halves: shared memory adds 32 bits natively, 64 in a loop
  uint32_t key[kListRoom], id[kListRoom];
  uint64_t warp[32];
  uint64_t left;                      // of what was wanted, inside the bin found
  uint32_t bin, count;
};

template <int BLOCK> __device__ __forceinline__ void clear_bins(SelectRoom& r) {
  for (int i = threadIdx.x; i < kBins; i += BLOCK) r.low[i] = r.high[i] = 0;
  if (threadIdx.x == 0) r.bin = kNoBin;
}
// Exact in any order: every wrap of the low half is seen by exactly one adder.
__device__ __forceinline__ void add_to_bin(SelectRoom& r, uint32_t bin, uint64_t weight) {
  const uint32_t low = (uint32_t)weight;
  uint32_t high = (uint32_t)(weight >> 32);
  if (low && add_shared(&r.low[bin], low) > 0xffffffffu - low) ++high;
  if (high) add_shared(&r.high[bin], high);
}

// The bin in which the running sum reaches `wanted`, to r.bin and r.left; r.bin stays kNoBin if none does. All threads call it.
template <int BLOCK> __device__ __forceinline__ void locate(SelectRoom& r, uint64_t wanted) {
  constexpr int kEach = kBins / BLOCK;
  static_assert(kEach * BLOCK == kBins, "threads must divide the bins");
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  uint64_t mine = 0;
  for (int i = 0; i < kEach; ++i) mine += (uint64_t)r.high[tid * kEach + i] << 32 | r.low[tid * kEach + i];
  uint64_t sum = mine;
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t x = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += x;
  }
  if (lane == 31) r.warp[warp] = sum;
  __syncthreads();
  uint64_t before = sum - mine;
  for (int w = 0; w < warp; ++w) before += r.warp[w];
  if (before < wanted && wanted <= before + mine) {
    for (int i = 0; i < kEach; ++i) {
      const uint64_t here = (uint64_t)r.high[tid * kEach + i] << 32 | r.low[tid * kEach + i];
      if (wanted <= before + here) {
        r.bin = tid * kEach + i;
        r.left = wanted - before;
        break;
      }
      before += here;
    }
  }
  __syncthreads();
}

// A team of one: its bins are all there is.
struct Alone {
  __device__ __forceinline__ uint64_t sum(uint64_t v) { return v; }
  __device__ __forceinline__ void add_bins(SelectRoom&, uint64_t) {}
  __device__ __forceinline__ bool join_lists(SelectRoom&, uint32_t&) { return false; }
};

// each(f) calls f(key, coarse bin, id) once for every element, over all threads; weight(key) -> u64. ids below kMostIds.
// The last element of all, and beyond, if the weights never reach `wanted`.
template <int BLOCK, class Each, class Weight, class Team>
__device__ __forceinline__ Cut first_to_reach(SelectRoom& r, uint64_t wanted, Each each, Weight weight, Team& team) {
  const int tid = threadIdx.x;
  constexpr Cut kAll = {0xffffffffu, 0xffffffffu};
  uint32_t chosen = 0, listed = 0;
  uint64_t prefix = 0;
  bool joined = false;                                    // the list holds all ranks' elements
#pragma unroll 1
  for (int round = kCoarse; round <= kLast; ++round) {    // one loop, so that the elements' code exists once
    const int shift = round == 0 ? 53 : round == 1 ? 42 : round == 2 ? 32 : round == 3 ? 10 : 0;
    const int bits = round == 2 || round == 4 ? 10 : 11;
    if (round == 3) prefix <<= 11;                        // ids have 21 bits: the 11 above are zero
    __syncthreads();
    if (round == kList) {
      if (tid == 0) r.count = 0;
    } else {
      clear_bins<BLOCK>(r);
    }
    __syncthreads();
    auto add = [&](uint32_t key, uint32_t coarse, uint32_t id) {
      const uint64_t whole = (uint64_t)key << 32 | id;
      if (round > 0 && whole >> (shift + bits) != prefix) return;
      add_to_bin(r, round == kCoarse ? coarse : (uint32_t)(whole >> shift) & ((1u << bits) - 1), weight(key));
    };
    if (round >= 0 && listed <= kListRoom) {
      for (uint32_t i = tid; i < listed; i += BLOCK) add(r.key[i], 0, r.id[i]);
    } else {
      each([&](uint32_t key, uint32_t coarse, uint32_t id) {
        if (round != kCoarse && coarse != chosen) return;
        if (round != kList) {
          add(key, coarse, id);
          return;
        }
        const uint32_t at = add_shared(&r.count, 1);
        if (at < kListRoom) { r.key[at] = key; r.id[at] = id; }
      });
    }
    __syncthreads();
    if (round == kList) {
      listed = r.count;
      joined = team.join_lists(r, listed);
      continue;
    }
    if (!joined) team.add_bins(r, wanted);
    locate<BLOCK>(r, wanted);
    if (r.bin == kNoBin) return kAll;
    wanted = r.left;
    if (round == kCoarse) chosen = r.bin;
    else prefix = prefix << bits | r.bin;
  }
  return {(uint32_t)(prefix >> 32), (uint32_t)prefix};
}

template <int BLOCK, class Each, class Weight>
__device__ __forceinline__ Cut first_to_reach(SelectRoom& r, uint64_t wanted, Each each, Weight weight) {
  Alone alone;
  return first_to_reach<BLOCK>(r, wanted, each, weight, alone);
}

// out(rank, key, id) once for each of the `count` <= kListRoom elements up to the cut, rank by (key, id); over all threads.
template <int BLOCK, class Each, class Out> __device__ __forceinline__ void in_order(SelectRoom& r, Cut cut, int count, Each each, Out out) {
  __syncthreads();
  if (threadIdx.x == 0) r.count = 0;
  __syncthreads();
  each([&](uint32_t key, uint32_t, uint32_t id) {
    if (!within(cut, key, id)) return;
    const uint32_t at = add_shared(&r.count, 1);
    if (at < kListRoom) { r.key[at] = key; r.id[at] = id; }
  });
  __syncthreads();
  count = (int)r.count < count ? (int)r.count : count;
  for (int a = threadIdx.x; a < count; a += BLOCK) {      // listed in any order: the rank is how many stand before
    int before = 0;
    for (int b = 0; b < count; ++b) before += b != a && within({r.key[a], r.id[a]}, r.key[b], r.id[b]);
    out(before, r.key[a], r.id[a]);
  }
}

// The best of all threads' numbers, in every thread.
template <int BLOCK> __device__ __forceinline__ uint64_t block_max(uint64_t* room, uint64_t v) {
  for (int d = 16; d; d /= 2) {
    const uint64_t o = __shfl_xor_sync(0xffffffffu, v, d);
    v = o > v ? o : v;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  for (int w = 0; w < BLOCK / 32; ++w) v = room[w] > v ? room[w] : v;
  return v;
}
// The sum of integers, in every thread.
template <int BLOCK> __device__ __forceinline__ uint64_t block_sum(uint64_t* room, uint64_t v) {
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < BLOCK / 32; ++w) v += room[w];
  return v;
}
// The sum of floats, in one order: warps by butterfly, then warp after warp. In every thread.
template <int BLOCK> __device__ __forceinline__ float block_sum(float* room, float v) {
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.f;
  for (int w = 0; w < BLOCK / 32; ++w) v += room[w];
  return v;
}

}  // namespace prim
