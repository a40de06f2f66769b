// The sum over tensor-parallel ranks, in rank order, and the residual add and RMS norm that always follow it.
//
//   one_shot   every rank sends its rows to every other; data carry their own flag, so no barrier exists     small M
//   two_shot   row m's owner collects it, sums it, and sends the sum to all                                  large M
//
// Partition: a block is a unit. one_shot: unit = a row, or one of `parts` equal pieces of it; where a norm follows they are a cluster,
// and a warp tells its sum of squares to all of them (cluster.cuh). Before sm_90 a normed row is one block. two_shot: block b has
// rows b, b + grid, ...; the j-th of them is owned by rank (b + j) mod WORLD. Block b waits for block b of the other ranks and for
// its cluster, so ranks launch equal grids, all of whose blocks are resident.
//
// one_shot's packets (16 bytes): {4 bytes of data, epoch, 4 bytes of data, epoch}. A reader polls the packet itself. Places take
// turns by the epoch's parity: a place is written again at epoch e + 2, when this block has had everybody's data of e + 1, which
// they sent after they were done with e. Twice the bytes on the link, half the latency.
// A warp's 32 vectors lie as 32 first halves, then 32 second ones, so a store fills whole lines of the link.
// two_shot: data, then one flag a block. Its places need no turns: a rank sends for the next call only after it has had every
// flag of this one, and a flag follows the reads of its sender.
//
// Epochs count calls of a block, live in device memory, and never go back: a captured launch needs no argument that changes.
// Waits are bounded: a rank that does not come within `spins` polls leaves its number + 1 in `failed` (device) and `told` (host),
// and later calls wait no more; sums are garbage then, and the host must look.
//
// Inequality, M rows of H = 7168 bf16 (14 KiB), W = 2, link 360 GB/s each way: one_shot sends 2 x 14 KiB a row, 0.08 us, after
// 1.3 us one way; two_shot 14 KiB a row. At 128 rows 10.2 us against 5.1 + one latency more. Sums in f32, rounded once: the bits
// of runtime.shared_comm. The norm is dense.cu's: squares of 32 vectors by one warp, then one 32 after the other, whatever the
// partition. So its bits are the same for all configurations and ways, and those of dense.cu with a vector a thread.
//
// What a norm adds to a sum of one row, cycles, estimated: residual added and packed 60, squares 32, butterfly 135, to the other
// blocks 210, seen there 40, 28 numbers added 150, root and quotient 90, scaled and packed 40: 760, 0.4 us at 1.9 GHz. Measured at
// 59ea8d6: 1.3 us for one row of four blocks, and more for each further vector of a thread (+0.7 and +2.4 us at 448x2 and 224x4 of
// 4 rows): some 10 cycles an instruction that follows the last packet, as where instructions have to be
// fetched. So between two ranks one_shot can run through its code once, storing nothing, while the kernel before it runs. Of many
// rows a norm adds their bytes: x read, x and out written for the sum, 28 KiB a row: 0.8 us at 128 rows, 6.5 at 1,024, at 4.54 TB/s.
//
// Dead rows (seq[m] = -1; seq may be null) are skipped by all ranks alike.
#include "prim/bf16.cuh"
#include "prim/cluster.cuh"
#include "prim/peer.cuh"
#include "prim/pipeline.cuh"
#include "prim/rehearse.cuh"

using namespace prim;

#ifndef WORLD
#error "build with -DWORLD= -DBLOCKS= -DROWS= -DROW_VECTORS= -DTHREADS= -DVECS="
#endif
static_assert(WORLD >= 2 && WORLD <= 8, "ranks of one host");
static_assert(THREADS % 32 == 0 && THREADS * VECS >= ROW_VECTORS, "a row in registers");
constexpr int kGroups = (ROW_VECTORS + 31) / 32;          // of 32 vectors, a warp's; each gives the norm one sum of squares
constexpr int kRegisters = 65536 / ((THREADS + 127) / 128 * 128);  // of a thread, as blocks are given them
constexpr int kPolled = (kRegisters - 24) / 8 / (WORLD - 1);       // packets a sender that can be in flight and kept beside them
constexpr int kAtOnce = kPolled >= 2 * VECS ? VECS : 1;   // vectors polled together: each further poll is an L2 latency
constexpr int kHalves = kPolled >= 2 ? 1 : 2;             // of their packets
constexpr bool kRehearsed = kRehearses && WORLD == 2;    // more ranks leave no registers for addresses that both runs keep
constexpr size_t kPlace = 2 * 32 * kGroups;               // packets of a unit

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
  int rows, parts, rehearsals;                            // rehearsals: how often one_shot is run through before its data are there
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

// Where the first of a vector's two packets lies among those of its unit; the second is 32 further.
__device__ __forceinline__ int packet_of(int vector) { return vector / 32 * 64 + vector % 32; }

constexpr float kAbsent = -1.f;                           // no sum of squares

// What the norm of a row needs beside the sum, read before the sum is there.
struct Residual {
  uint4 x[VECS], w[VECS];
};
__device__ __forceinline__ void read_x(Residual& have, const Rows& r, size_t at, int count) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < count) have.x[k] = r.x[at + i];
}
__device__ __forceinline__ void read_w(Residual& have, const Rows& r, int first, int count) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < count) have.w[k] = r.w[first + i];
}

// A summed row or piece of one, held by the block (vector threadIdx.x + k blockDim.x in sum[k]), is added to x, which becomes have.x;
// `value` is that as numbers, and squares[k] the warp's sum of its squares.
__device__ __forceinline__ void add_row(int count, const uint4 (&sum)[VECS], Residual& have, float (&value)[VECS][kEight], float (&squares)[VECS]) {
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    squares[k] = 0.f;
    if (i >= count) continue;
    unpack8(have.x[k], value[k]);
    add8(value[k], sum[k]);
    have.x[k] = pack8(value[k]);
    unpack8(have.x[k], value[k]);
    squares[k] = sum_of_squares(value[k]);
  }
#pragma unroll
  for (int k = 0; k < VECS; ++k) squares[k] = warp_sum(squares[k]);
}

// body(k, group) for the groups of 32 vectors that this warp holds.
template <class Body>
__device__ __forceinline__ void each_group(int count, Body body) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int first = threadIdx.x / 32 * 32 + k * blockDim.x; first < count) body(k, first / 32);
}

__device__ __forceinline__ void write_x(const Residual& have, const Rows& r, size_t at, int count, bool real) {
#pragma unroll
  for (int k = 0; k < VECS; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < count) store_if(real, r.x + at + i, have.x[k]);
}

// The rest of the norm, once `part` holds the sums of all groups of the row.
__device__ __forceinline__ void scale_row(const float* part, const Rows& r, size_t at, int count, const float (&value)[VECS][kEight], const Residual& have,
                                          bool real) {
  float squares = real ? 0.f : 1.f - kGroups * kAbsent;   // a rehearsal takes no way of negative numbers
#pragma unroll
  for (int g = 0; g < kGroups; ++g) squares += part[g];
  const float scale = 1.f / sqrtf(squares / (float)(kEight * ROW_VECTORS) + r.eps);
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < count) store_if(real, r.out + at + i, scaled8(value[k], scale, have.w[k]));
  }
}

// ---------------------------------------------------------------- one shot

// Sums kAtOnce vectors, of which the n-th has its first packet at `from` + 2 n blockDim.x of every sender's place and this rank's own part
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
        load_words(from + s * (BLOCKS * kPlace) + 2 * n * blockDim.x + 32 * (half * kTogether + q), got[n][s][q][0], got[n][s][q][1]);
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
  const int unit = blockIdx.x, row = unit / r.parts, piece = unit % r.parts, count = ROW_VECTORS / r.parts, lane = threadIdx.x % 32;
  const size_t at = (size_t)row * ROW_VECTORS + piece * count;
  Residual have = {};
  pdl_trigger();
  if (NORM) {
    for (int i = threadIdx.x; i < kGroups; i += blockDim.x) part[i] = kAbsent;
    cluster_arrive();
    read_w(have, r, piece * count, count);                // a constant: no kernel before writes it
    cluster_wait();                                       // all blocks of the row run, and their `part` is cleared
  }
  uint32_t epoch = 0;
#pragma unroll 1
  for (int before = kRehearsed ? r.rehearsals : 0; before >= 0; --before) {
    const bool real = before == 0;
    bool wait = false;
    uint4 mine[VECS] = {};
    if (real) {
      pdl_wait();
      epoch = *(const volatile uint32_t*)&g.state->one[unit] + 1;  // volatile: else it is read after seq, a second latency
      wait = g.state->failed == 0;
      const bool skip = dead(r.seq, row);
#pragma unroll
      for (int k = 0; k < VECS; ++k)                      // together with the words above: one latency, not two
        if (const int i = threadIdx.x + k * blockDim.x; i < count) mine[k] = r.part[at + i];
      if (skip) return;
    }
#pragma unroll
    for (int k = 0; k < VECS; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= count || !real) continue;
#pragma unroll
      for (int turn = 1; turn < WORLD; ++turn) {          // ranks begin with different peers
        const int peer = (g.rank + turn) % WORLD;
        uint4* to = &g.of[peer]->packets[epoch & 1][g.rank][unit][packet_of(i)];
        store_words(to, word(mine[k].x, epoch), word(mine[k].y, epoch));
        store_words(to + 32, word(mine[k].z, epoch), word(mine[k].w, epoch));
      }
    }
    if (NORM && real) read_x(have, r, at, count);
#pragma unroll
    for (int k = 0; k < VECS; k += kAtOnce) {
      const int i = threadIdx.x + k * blockDim.x;
      const int live = i < count && real ? (count - i + (int)blockDim.x - 1) / (int)blockDim.x : 0;
      collect(g, &g.of[g.rank]->packets[epoch & 1][0][unit][packet_of(i)], mine + k, live, epoch, wait);
    }
    if (NORM) {
      float value[VECS][kEight], squares[VECS];
      add_row(count, mine, have, value, squares);
      each_group(count, [&](int k, int group) {
        if (lane < r.parts && real) store_shared(part + piece * count / 32 + group, lane, squares[k]);
      });
      write_x(have, r, at, count, real);                  // while the other blocks' sums come
      for (int group = lane; group < kGroups; group += 32)
        while (load_shared(part + group) == kAbsent && real) {}  // a block of this row: it comes, or has given up within `spins`
      __syncwarp();
      scale_row(part, r, at, count, value, have, real);
    } else {
#pragma unroll
      for (int k = 0; k < VECS; ++k)
        if (const int i = threadIdx.x + k * blockDim.x; i < count) store_if(real, r.part + at + i, mine[k]);
    }
  }
  if (!NORM) __syncthreads();                             // everybody has read the epoch; a norm's sums of all warps say so too
  if (threadIdx.x == 0) g.state->one[unit] = epoch;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_one(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  one_shot<false>(nullptr, g, r);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_one_norm(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  __shared__ __align__(16) float part[kGroups];
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
      if (NORM) { read_x(have[t], r, (size_t)row * ROW_VECTORS, ROW_VECTORS); read_w(have[t], r, 0, ROW_VECTORS); }
    }
#pragma unroll
    for (int t = 0; t < kFinished; ++t) {
      if (!live(t)) continue;
      const size_t at = (size_t)(m + t * grid) * ROW_VECTORS;
      if (NORM) {
        float value[VECS][kEight], squares[VECS];
        add_row(ROW_VECTORS, sum[t], have[t], value, squares);
        write_x(have[t], r, at, ROW_VECTORS, true);
        each_group(ROW_VECTORS, [&](int k, int group) {
          if (threadIdx.x % 32 == 0) part[group] = squares[k];
        });
        __syncthreads();
        scale_row(part, r, at, ROW_VECTORS, value, have[t], true);
        __syncthreads();                                  // `part` is free for the next row
      } else {
#pragma unroll
        for (int k = 0; k < VECS; ++k)
          if (const int i = threadIdx.x + k * blockDim.x; i < ROW_VECTORS) r.part[at + i] = sum[t][k];
      }
    }
  });
  if (threadIdx.x == 0) g.state->two[block] = epoch;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  two_shot<false>(nullptr, g, r);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_norm(__grid_constant__ const Group g, __grid_constant__ const Rows r) {
  __shared__ __align__(16) float part[kGroups];
  two_shot<true>(part, g, r);
}
