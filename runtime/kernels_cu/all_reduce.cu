// The sum over tensor-parallel ranks, in rank order, and the residual add and RMS norm that always follow it.
//
//   one_shot   every rank sends its rows to every other; data carry their own flag, so no barrier exists     small M
//   two_shot   row m's owner collects it, sums it, and sends the sum to all                                  large M
//
// Partition: a block is a unit. one_shot: unit = a row, or one of `parts` equal pieces of a row where no norm follows. two_shot:
// block b has rows b, b + grid, ...; the j-th of them is owned by rank (b + j) mod WORLD. Block b waits for block b of the other
// ranks and for nothing else, so ranks launch equal grids, all of whose blocks are resident.
//
// one_shot's packets (16 bytes): {4 bytes of data, epoch, 4 bytes of data, epoch}. A reader polls the packet itself. Places take
// turns by the epoch's parity: a place is written again at epoch e + 2, when this block has had everybody's data of e + 1, which
// they sent after they were done with e. Twice the bytes on the link, half the latency.
// two_shot: data, then one flag a block. Its places need no turns: a rank sends for the next call only after it has had every
// flag of this one, and a flag follows the reads of its sender.
//
// Epochs count calls of a block, live in device memory, and never go back: a captured launch needs no argument that changes.
// Waits are bounded: a rank that does not come within `spins` polls leaves its number + 1 in `failed` (device) and `told` (host),
// and later calls wait no more; sums are garbage then, and the host must look.
//
// Inequality, M rows of H = 7168 bf16 (14 KiB), W = 2, link 360 GB/s each way: one_shot sends 2 x 14 KiB a row, 0.08 us, after
// 1.3 us one way; two_shot 14 KiB a row. At 128 rows 10.2 us against 5.1 + one latency more. Sums in f32, rounded once: the bits
// of runtime.shared_comm. The norm is dense.cu's; with as many threads it sums in the same order.
//
// Dead rows (seq[m] = -1; seq may be null) are skipped by all ranks alike.
#include "prim/bf16.cuh"
#include "prim/peer.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

#ifndef WORLD
#error "build with -DWORLD= -DBLOCKS= -DROWS= -DROW_VECTORS= -DTHREADS= -DVECS="
#endif
static_assert(WORLD >= 2 && WORLD <= 8, "ranks of one host");
static_assert(THREADS % 32 == 0 && THREADS * VECS >= ROW_VECTORS, "a row in registers");
constexpr int kWarps = THREADS / 32;
constexpr int kRegisters = 65536 / ((THREADS + 127) / 128 * 128);  // of a thread, as blocks are given them
constexpr int kPolled = (kRegisters - 24) / 8 / (WORLD - 1);       // packets a sender that can be in flight and kept beside them
constexpr int kAtOnce = kPolled >= 2 * VECS ? VECS : 1;   // vectors polled together: each further poll is an L2 latency
constexpr int kHalves = kPolled >= 2 ? 1 : 2;             // of their packets
constexpr size_t kPlace = 2 * ROW_VECTORS;                // packets of a unit

// A rank's region, the same on all of them; other ranks write into it.
struct Region {
  uint4 packets[2][WORLD][BLOCKS][kPlace];                // by parity, sender, unit
  uint32_t flags[2][BLOCKS][WORLD];                       // by phase, block, sender
  uint4 parts[WORLD][ROWS][ROW_VECTORS];                  // two_shot: rows to be summed, by sender
  uint4 sums[ROWS][ROW_VECTORS];                          // two_shot: summed rows
};

// This rank's own notes, in device memory.
struct State {
  uint32_t one[BLOCKS], two[BLOCKS];                      // epochs
  uint32_t failed;
};

struct Group {
  Region* of[8];                                          // every rank's region as this process sees it, its own included
  State* state;
  uint32_t* told;                                         // in host memory
  int rank, spins;
};

struct Rows {
  uint4* part;                                            // [M, H] this rank's part; plain: becomes the sum
  uint4* x;                                               // [M, H] NORM: += sum
  const uint4* w;                                         // [H]
  const int* seq;                                         // [M] or null
  uint4* out;                                             // [M, H] NORM: norm(x) w
  int rows, parts;
  float eps;
};

__device__ __forceinline__ bool dead(const int* seq, int row) { return seq && seq[row] < 0; }

__device__ __forceinline__ void fail(const Group& g, int rank) {
  g.state->failed = rank + 1;
  *g.told = rank + 1;
}

__device__ __forceinline__ uint64_t word(uint32_t data, uint32_t epoch) { return (uint64_t)epoch << 32 | data; }

__device__ __forceinline__ void add8(float (&sum)[kEight], const uint4& v) {
  float more[kEight];
  unpack8(v, more);
#pragma unroll
  for (int j = 0; j < kEight; ++j) sum[j] += more[j];
}

// The block's sum of one number a thread, in the order of dense.cu. `part` is free again after the next barrier.
__device__ __forceinline__ float block_sum(float* part, float v) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.f;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) v += part[w];
  return v;
}

// What the norm of a row needs beside the sum, read before the sum is there.
struct Residual {
  uint4 x[VECS], w[VECS];
};
__device__ __forceinline__ void read_x(Residual& have, const Rows& r, size_t at, int count) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < count) have.x[k] = r.x[at + i];
}
__device__ __forceinline__ void read_w(Residual& have, const Rows& r, int count) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < count) have.w[k] = r.w[i];
}

// A summed row, held by the block (vector threadIdx.x + k blockDim.x in sum[k]): stored as it is, or added to x and normed.
template <bool NORM>
__device__ __forceinline__ void finish_row(float* part, const Rows& r, size_t at, int count, const uint4 (&sum)[VECS], const Residual& have) {
  float value[VECS][kEight], squares = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= count) continue;
    if (!NORM) { r.part[at + i] = sum[k]; continue; }
    unpack8(have.x[k], value[k]);
    add8(value[k], sum[k]);
    const uint4 stored = pack8(value[k]);
    r.x[at + i] = stored;
    unpack8(stored, value[k]);                            // the norm is of what was stored
    squares += sum_of_squares(value[k]);
  }
  if (!NORM) return;
  const float scale = 1.f / sqrtf(block_sum(part, squares) / (float)(kEight * count) + r.eps);
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < count) r.out[at + i] = scaled8(value[k], scale, have.w[k]);
  }
}

// ---------------------------------------------------------------- one shot

// Sums kAtOnce vectors, of which the n-th has its packets at `from` + 2 n blockDim.x of every sender's place and this rank's own part
// in mine[n]; `live` of them exist.
__device__ __forceinline__ void collect(const Group& g, const uint4* from, uint4* mine, int live, uint32_t epoch, bool wait) {
  uint32_t data[kAtOnce][WORLD][4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    constexpr int kTogether = 2 / kHalves;
    uint64_t got[kAtOnce][WORLD][kTogether][2];
    int missing, polls = 0;
    auto each_packet = [&](auto body) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int s = 0; s < WORLD; ++s)
#pragma unroll
          for (int q = 0; q < kTogether; ++q)
            if (n < live && s != g.rank) body(n, s, q);
    };
    do {
      missing = -1;
      each_packet([&](int n, int s, int q) {
        load_words(from + s * (BLOCKS * kPlace) + 2 * n * blockDim.x + half * kTogether + q, got[n][s][q][0], got[n][s][q][1]);
      });
      each_packet([&](int n, int s, int q) {
        if ((uint32_t)(got[n][s][q][0] >> 32) != epoch || (uint32_t)(got[n][s][q][1] >> 32) != epoch) missing = s;
      });
      if (missing < 0 || !wait) break;
      peer_pause();
    } while (++polls < g.spins);
    if (missing >= 0 && wait) fail(g, missing);
    each_packet([&](int n, int s, int q) {
      data[n][s][2 * (half * kTogether + q)] = (uint32_t)got[n][s][q][0];
      data[n][s][2 * (half * kTogether + q) + 1] = (uint32_t)got[n][s][q][1];
    });
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    float sum[kEight];
#pragma unroll
    for (int s = 0; s < WORLD; ++s) {
      const uint4 v = s == g.rank ? mine[n] : make_uint4(data[n][s][0], data[n][s][1], data[n][s][2], data[n][s][3]);
      if (s == 0) unpack8(v, sum);
      else add8(sum, v);
    }
    mine[n] = pack8(sum);
  }
}

template <bool NORM>
__device__ __forceinline__ void one_shot(float* part, const Group& g, const Rows& r) {
  const int unit = blockIdx.x, row = unit / r.parts, count = ROW_VECTORS / r.parts;
  const size_t at = (size_t)row * ROW_VECTORS + (unit % r.parts) * count;
  Residual have;
  if (NORM) read_w(have, r, count);
  pdl_trigger();
  pdl_wait();
  if (dead(r.seq, row)) return;
  const uint32_t epoch = g.state->one[unit] + 1;
  const bool wait = g.state->failed == 0;
  uint4 mine[VECS];

#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= count) continue;
    mine[k] = r.part[at + i];
#pragma unroll
    for (int turn = 1; turn < WORLD; ++turn) {            // ranks begin with different peers
      const int peer = (g.rank + turn) % WORLD;
      uint4* to = &g.of[peer]->packets[epoch & 1][g.rank][unit][2 * i];
      store_words(to, word(mine[k].x, epoch), word(mine[k].y, epoch));
      store_words(to + 1, word(mine[k].z, epoch), word(mine[k].w, epoch));
    }
  }
  if (NORM) read_x(have, r, at, count);
#pragma unroll
  for (int k = 0; k < VECS; k += kAtOnce) {
    const int i = threadIdx.x + k * blockDim.x;
    const int live = i < count ? (count - i + (int)blockDim.x - 1) / (int)blockDim.x : 0;
    collect(g, &g.of[g.rank]->packets[epoch & 1][0][unit][2 * i], mine + k, live, epoch, wait);
  }
  finish_row<NORM>(part, r, at, count, mine, have);
  if (!NORM) __syncthreads();                             // everybody has read the epoch
  if (threadIdx.x == 0) g.state->one[unit] = epoch;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_one(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  one_shot<false>(nullptr, g, r);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_one_norm(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  __shared__ float part[kWarps];
  one_shot<true>(part, g, r);
}

// ---------------------------------------------------------------- two shot

// Tells every other rank's block of the same number that this block's stores for the phase are done.
__device__ __forceinline__ void signal(const Group& g, int phase, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x < WORLD && (int)threadIdx.x != g.rank) {
    fence_sys();
    store_release_sys(&g.of[threadIdx.x]->flags[phase][blockIdx.x][g.rank], epoch);
  }
}

// Waits until every other rank's block has signalled the phase.
__device__ __forceinline__ void meet(const Group& g, int phase, uint32_t epoch, bool wait) {
  if (threadIdx.x < WORLD && (int)threadIdx.x != g.rank && wait) {
    const uint32_t* flag = &g.of[g.rank]->flags[phase][blockIdx.x][threadIdx.x];
    int polls = 0;
    while ((int)(load_acquire_sys(flag) - epoch) < 0) {
      if (++polls >= g.spins) { fail(g, threadIdx.x); break; }
      peer_pause();
    }
  }
  __syncthreads();
}

// Rows first, first + step, ... of this block, R at a time: body(row, live) with live(t) saying whether row + t step exists. Loads of
// a batch are in flight together; one row after another would wait for memory each time.
template <int R, class Body>
__device__ __forceinline__ void each_batch(const Rows& r, int first, int step, Body body) {
  for (int m = first; m < r.rows; m += R * step)
    body(m, [&](int t) { return m + t * step < r.rows && !dead(r.seq, m + t * step); });
}

template <bool NORM>
__device__ __forceinline__ void two_shot(float* part, const Group& g, const Rows& r) {
  constexpr int kSent = 4, kSummed = WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1, kFinished = NORM ? (VECS == 1 ? 2 : 1) : (VECS <= 2 ? 4 / VECS : 1);
  const int block = blockIdx.x, grid = gridDim.x;
  Region* own = g.of[g.rank];
  pdl_trigger();
  pdl_wait();
  const uint32_t epoch = g.state->two[block] + 1;
  const bool wait = g.state->failed == 0;
  const int owned_step = WORLD * grid;                    // between two rows of one owner
  auto first_of = [&](int owner) { return block + (owner + WORLD - block % WORLD) % WORLD * grid; };
  auto mine = [&](int m, int i) { return r.part[(size_t)m * ROW_VECTORS + i]; };

#pragma unroll
  for (int turn = 1; turn < WORLD; ++turn) {              // ranks begin with different peers
    const int owner = (g.rank + turn) % WORLD;
    each_batch<kSent>(r, first_of(owner), owned_step, [&](int m, auto live) {
      for (int i = threadIdx.x; i < ROW_VECTORS; i += blockDim.x) {
        uint4 v[kSent];
#pragma unroll
        for (int t = 0; t < kSent; ++t)
          if (live(t)) v[t] = mine(m + t * owned_step, i);
#pragma unroll
        for (int t = 0; t < kSent; ++t)
          if (live(t)) g.of[owner]->parts[g.rank][m + t * owned_step][i] = v[t];
      }
    });
  }
  signal(g, 0, epoch);
  meet(g, 0, epoch, wait);
  each_batch<kSummed>(r, first_of(g.rank), owned_step, [&](int m, auto live) {
    for (int i = threadIdx.x; i < ROW_VECTORS; i += blockDim.x) {
      uint4 v[kSummed][WORLD];
#pragma unroll
      for (int t = 0; t < kSummed; ++t)
#pragma unroll
        for (int s = 0; s < WORLD; ++s) {
          const int row = m + t * owned_step;
          if (live(t)) v[t][s] = s == g.rank ? mine(row, i) : load_peer(&own->parts[s][row][i]);
        }
#pragma unroll
      for (int t = 0; t < kSummed; ++t) {
        if (!live(t)) continue;
        float sum[kEight];
        unpack8(v[t][0], sum);
#pragma unroll
        for (int s = 1; s < WORLD; ++s) add8(sum, v[t][s]);
        const uint4 packed = pack8(sum);
#pragma unroll
        for (int peer = 0; peer < WORLD; ++peer) g.of[peer]->sums[m + t * owned_step][i] = packed;
      }
    }
  });
  signal(g, 1, epoch);
  meet(g, 1, epoch, wait);
  each_batch<kFinished>(r, block, grid, [&](int m, auto live) {
    uint4 sum[kFinished][VECS];
    Residual have[kFinished];
#pragma unroll
    for (int t = 0; t < kFinished; ++t) {
      if (!live(t)) continue;
      const int row = m + t * grid;
#pragma unroll
      for (int k = 0; k < VECS; ++k)
        if (const int i = threadIdx.x + k * blockDim.x; i < ROW_VECTORS) sum[t][k] = load_peer(&own->sums[row][i]);
      if (NORM) { read_x(have[t], r, (size_t)row * ROW_VECTORS, ROW_VECTORS); read_w(have[t], r, ROW_VECTORS); }
    }
#pragma unroll
    for (int t = 0; t < kFinished; ++t) {
      if (!live(t)) continue;
      finish_row<NORM>(part, r, (size_t)(m + t * grid) * ROW_VECTORS, ROW_VECTORS, sum[t], have[t]);
      if (NORM) __syncthreads();                          // `part` is free for the next row
    }
  });
  if (threadIdx.x == 0) g.state->two[block] = epoch;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  two_shot<false>(nullptr, g, r);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_norm(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  __shared__ float part[kWarps];
  two_shot<true>(part, g, r);
}
