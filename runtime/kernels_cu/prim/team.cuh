// The blocks of one number on all ranks, as a team: words that each tells the others, and what selection needs of them (prim/select.cuh).
//
// A packet is all_reduce.cu's one-shot packet: {low half, epoch, high half, epoch} of a 64-bit word, so data carry their own flag and no
// barrier exists. Places take turns by the epoch's parity: one is written again at epoch e + 2, when this block has heard everybody's
// packet 0 of e + 1, which they sent after they were done with e. Hence the rules: every exchange tells packet 0 and hears it of all, and
// ends with a barrier of the block; packet i is told by thread i mod kThreads.
//
// All ranks make the same exchanges: what decides on one is a plan's number or a sum over ranks. A rank that does not come within `spins`
// polls leaves its number + 1 in `failed` and `told`, and nobody waits any more; what comes out is garbage then, and the host must look.
//
// Inequality at 8 ranks over 360 GB/s: an exchange of a word takes the link's 1.3 us and a poll's L2 latency; a stretch of bins is 4 KiB a
// peer, 28 KiB a row: 0.08 us of the link, 5 us at 64 rows.
#pragma once
#include "peer.cuh"
#include "select.cuh"

namespace prim {

constexpr int kPackets = 512;                             // of a place: a stretch of bins, or a header and a list
constexpr int kStretch = 256;                             // bins that an exchange adds up: 4 of log-probability

template <int kWorld, int kBlocks> struct TeamRegion {      // a rank's, written by the others
  uint4 packets[2][kWorld][kBlocks][kPackets];              // by parity, sender, block
};
template <int kBlocks> struct TeamState {                  // a rank's own notes, in device memory
  uint32_t epoch[kBlocks];
  uint32_t failed;
};
template <int kWorld, int kBlocks> struct TeamSeat {
  TeamRegion<kWorld, kBlocks>* of[8];                       // every rank's region as this process sees it, its own included
  TeamState<kBlocks>* state;
  uint32_t* told;                                         // in host memory
  int rank, spins;
};

template <int kThreads, int kWorld, int kBlocks> struct RankTeam {
  static_assert(kStretch <= kPackets && kBins % kStretch == 0 && kThreads >= kWorld, "what a place holds, and who asks");
  const TeamSeat<kWorld, kBlocks>& seat;
  uint64_t* word;                                         // [1] shared: what is told next
  uint64_t* heard;                                        // [kWorld] shared
  uint32_t* lost;                                         // shared: 0, or nobody is waited for
  uint32_t epoch;

  __device__ __forceinline__ uint4* place(int at, int sender) const { return seat.of[at]->packets[epoch & 1][sender][blockIdx.x]; }
  __device__ __forceinline__ void tell(int i, uint64_t v) const {
    const uint64_t flag = (uint64_t)epoch << 32;
#pragma unroll 1
    for (int turn = 1; turn < kWorld; ++turn) {            // ranks begin with different peers
      const int peer = (seat.rank + turn) % kWorld;
      store_words(place(peer, seat.rank) + i, flag | (uint32_t)v, flag | (v >> 32));
    }
  }
  // Packet i of another rank. Threads ask for different packets, so many are in flight.
  __device__ __forceinline__ uint64_t hear(int sender, int i) const {
    const uint4* from = place(seat.rank, sender) + i;
    uint64_t low, high;
    int polls = 0;
#pragma unroll 1
    while (true) {
      load_words(from, low, high);
      if ((uint32_t)(low >> 32) == epoch && (uint32_t)(high >> 32) == epoch) break;
      if (*(volatile uint32_t*)lost) break;
      if (++polls >= seat.spins) {
        *lost = 1;
        seat.state->failed = sender + 1;
        *seat.told = sender + 1;
        break;
      }
      peer_pause();
    }
    return high << 32 | (uint32_t)low;
  }

  // to[s * n + i] = rank s's from[i], i < n <= kPackets; shared or global memory. All threads call it.
  __device__ __forceinline__ void swap(const uint64_t* from, uint64_t* to, int n) {
    __syncthreads();
    ++epoch;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) tell(i, from[i]);
#pragma unroll 1
    for (int j = threadIdx.x; j < kWorld * n; j += kThreads) to[j] = j / n == seat.rank ? from[j % n] : hear(j / n, j % n);
    __syncthreads();
  }
  // The sum over ranks of a number that all threads of a rank hold.
  __device__ __forceinline__ uint64_t sum(uint64_t v) {
    if (threadIdx.x == 0) *word = v;
    swap(word, heard, 1);
    v = 0;
    for (int s = 0; s < kWorld; ++s) v += heard[s];
    return v;
  }
  // Bins become their sums over ranks, as far as it takes to reach `wanted`: a stretch of them at a time.
  __device__ __forceinline__ void add_bins(SelectRoom& r, uint64_t wanted) {
    uint64_t before = 0;
#pragma unroll 1
    for (int first = 0; first < kBins && before < wanted; first += kStretch) {
      ++epoch;
#pragma unroll 1
      for (int i = threadIdx.x; i < kStretch; i += kThreads) tell(i, (uint64_t)r.high[first + i] << 32 | r.low[first + i]);
      __syncthreads();                                    // own bins are told, others' may be added
#pragma unroll 1
      for (int j = threadIdx.x; j < (kWorld - 1) * kStretch; j += kThreads)
        add_to_bin(r, first + j % kStretch, hear((seat.rank + 1 + j / kStretch) % kWorld, j % kStretch));
      __syncthreads();
      uint64_t total = 0;
      for (int i = threadIdx.x; i < kStretch; i += kThreads) total += (uint64_t)r.high[first + i] << 32 | r.low[first + i];
      before += block_sum<kThreads>(r.warp, total);
    }
  }
  // The list (`listed` elements) becomes all ranks' together, where that has room; false: the list is as it was.
  __device__ __forceinline__ bool join_lists(SelectRoom& r, uint32_t& listed) {
    ++epoch;
    const uint32_t told = listed < kPackets ? listed : 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i <= told; i += kThreads) tell(i, i ? (uint64_t)r.key[i - 1] << 32 | r.id[i - 1] : listed);
    if (threadIdx.x < kWorld) heard[threadIdx.x] = (int)threadIdx.x == seat.rank ? listed : hear(threadIdx.x, 0);
    __syncthreads();
    uint64_t total = 0, most = 0;
    for (int s = 0; s < kWorld; ++s) {
      total += heard[s];
      most = heard[s] > most ? heard[s] : most;
    }
    const bool joined = most < kPackets && total <= kListRoom;
#pragma unroll 1
    for (int s = threadIdx.x / 32; joined && s < kWorld; s += kThreads / 32) {  // a warp a sender
      if (s == seat.rank) continue;
      uint32_t at = listed;
      for (int before = 0; before < s; ++before) at += before == seat.rank ? 0 : (uint32_t)heard[before];
#pragma unroll 1
      for (uint32_t i = threadIdx.x % 32; i < heard[s]; i += 32) {
        const uint64_t v = hear(s, 1 + i);
        r.key[at + i] = (uint32_t)(v >> 32);
        r.id[at + i] = (uint32_t)v;
      }
    }
    if (joined) listed = (uint32_t)total;
    __syncthreads();
    return joined;
  }
};

}  // namespace prim
