// out = x w^T for few rows on sm_90a: the weights stream past once, through a ring that never runs dry. Defined by
// kernels_np/dense.py: linear, linear_f32; per head also the products of mla_query and mla_value.
//
//   box          64 GROUPS TALL weight rows x 64 inputs, swizzled, by the copy engine; beside it the same inputs of x
//   grid         persistent blocks, at most two an SM; box q = tile * steps + step of all boxes goes to block q / each
//   block        GROUPS warpgroups that multiply, each TALL times 64 weight rows; one warp that asks for boxes
//   product      wgmma with the weights as its 64 rows and x as its 8 OCTETS columns, both from shared memory, sums in float32
//
// All blocks stream as many boxes, to within one; a tile whose boxes several blocks share is cut. A block goes through its boxes from
// the last to the first, so that it does the start of a tile first and the end of another last. The end's block has the tile: it adds
// the others' sums to its own, in descending order of k, whoever was first, and the others, all of lower number, have mostly been done
// for long. They hand over by cells (prim/across.cuh) in `sums`, one tile's a block. Blocks wait for lower numbers alone, which
// were started before them: the grid need not fit. A grid that divides the tiles cuts none.
//
// From launch to launch: weights depend on no predecessor, so a block fills its ring and brings `ahead` boxes more to L2 before it waits
// (programmatic dependent launch); `ahead` < 0: so many of the ring it leaves until after the wait, behind the first of x. A block lets
// its successor start when it has `early` boxes still to ask for. What that then fetches must last while this one's last boxes arrive,
// are summed and stored, while its writes settle and while x comes: some 5 us (docs/linear.md); a ring of half an SM lasts 3.2 us.
// x, `out` and `sums` are touched after the wait only, and a grid that has waited saw its predecessor end with all cells empty: one array
// of cells serves all launches of a stream.
//
// Inequality at N = K = 7168: 102.8 MB of weights, 22.7 us at 4.52 TB/s. A slot of 128 rows has 16 KB of weights and 2 KB of x at 16
// columns: one byte in nine comes from L2 a second time. In flight must be 4.52 TB/s * 1 us / 132 = 34 KB an SM.
// A column is one row of x and touches no other: the same bits at every M and beside any neighbours, NaN included. Dead rows
// (seq -1, seq may be null) are not written. Limits: M <= 8 OCTETS, K a multiple of 64.
#include "prim/across.cuh"

using namespace prim;

#if !defined(OCTETS) || !defined(GROUPS) || !defined(TALL) || !defined(SLOTS)
#error "build with -DOCTETS= -DGROUPS= -DTALL= -DSLOTS="
#endif
static_assert(OCTETS >= 1 && OCTETS <= 9 && TALL >= 1 && GROUPS >= 1 && 64 * GROUPS * TALL <= 256, "a box has at most 256 rows");
static_assert(SLOTS >= 2 && SLOTS <= 32, "a lane asks for a slot's boxes");
constexpr int kRows = 64 * GROUPS * TALL, kWeights = kRows * 128, kSlot = kWeights + OCTETS * 1024, kMultiply = 128 * GROUPS, kThreads = kMultiply + 32;
constexpr int kFull = SLOTS * kSlot, kEmpty = kFull + 8 * SLOTS;
constexpr int kUnits = TALL * OCTETS;                     // fours of a thread's sum
constexpr bool kAlone = SLOTS * (kSlot + 16) + 16 > 113 * 1024;  // by its ring
constexpr int kBlocks = kAlone || kUnits > 4 || (kThreads > 300 && kUnits > 2) ? 1 : 2;  // an SM's, for the registers that they have
constexpr int kRegisters = 512 / ((kBlocks * kThreads / 32 + 3) / 4) / 8 * 8;  // a thread's; 512 a lane in each quarter of an SM
constexpr int kHeld = kUnits % 4 || (kUnits > 4 && kRegisters < 100) ? kUnits % 3 ? kUnits % 2 ? 1 : 2 : 3 : 4;  // added up at a time
constexpr int kSpare = (kRegisters - 4 * kUnits - (kUnits > 8 ? 96 : 56)) / (4 * kHeld);
constexpr int kMost = kHeld > 2 ? 24 / kHeld : 16 / kHeld;  // the square's tiles of 256 rows have five neighbours
constexpr int kAtOnce = kSpare < 1 ? 1 : kSpare > kMost ? kMost : kSpare;  // neighbours' sums under way at a time
constexpr int kSum = kMultiply * kUnits * 4;              // numbers of a cut tile's sum

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Params {
  char* out;                                              // [M, heads, N], by out_row and out_head
  float* sums;                                            // [blocks, TALL, OCTETS, threads that multiply, 4] zero before and after
  const int* seq;                                         // [M] or null
  long long out_row, out_head;                            // in numbers
  int x_head, N, M, tiles, steps;                         // tiles: of a head; steps: boxes along K
  int each, more;                                         // boxes of a block; so many blocks have one more
  int early, ahead;                                       // boxes: yet to ask for when the successor may start; SLOTS + ahead before the wait
};

struct Share {                                            // boxes [from, to) of a block
  int from, to;
};
__device__ __forceinline__ Share share_of(const Params& p, int block) {
  const int from = block * p.each + (block < p.more ? block : p.more);
  return {from, from + p.each + (block < p.more)};
}
__device__ __forceinline__ int block_of(const Params& p, int box) {
  const int wide = p.more * (p.each + 1);
  return box < wide ? box / (p.each + 1) : p.more + (box - wide) / p.each;
}

// Lane i asks for what comes to slot i, as soon as its place is free. A block's n-th box is the n-th from its end.
__device__ __forceinline__ void fill_ring(const Params& p, const TensorMap& weights, const TensorMap& rows, smem_t base) {
  const int lane = threadIdx.x & 31;
  const Share share = share_of(p, blockIdx.x);
  const int count = share.to - share.from;
  const smem_t full = base + kFull + 8 * lane, slot = base + lane * kSlot;
  const uint64_t once = policy_evict_first(), again = policy_evict_normal();
  struct Place { int column, row, x; };
  auto place_of = [&](int n) {
    const int box = share.to - 1 - n, tile = box / p.steps, head = tile / p.tiles;
    const int column = (box - tile * p.steps) * 64;
    return Place{column, head * p.N + (tile - head * p.tiles) * kRows, head * p.x_head + column};
  };
  auto ask_weights = [&](int n, const Place& at) {
    bar_expect(full, kSlot);
    tensor_copy(slot, weights, full, at.column, at.row, once);
    if (n + 1 + p.early >= count) pdl_trigger();          // the first of a block counts
  };
  auto ask_rows = [&](const Place& at) { tensor_copy(slot + kWeights, rows, full, at.x, 0, again); };
  const int end = lane < SLOTS ? count : 0, before = SLOTS + p.ahead, under_way = before < SLOTS ? before : SLOTS;
  int box = lane;
  const bool asked = box < end && box < under_way;
  Place next = place_of(box);
  if (asked) ask_weights(box, next);
  for (int n = SLOTS + lane; n < before && n < count; n += 32) {
    const Place at = place_of(n);
    tensor_prefetch(weights, at.column, at.row, again);   // not the first to leave: the copy that reads it makes it so
  }
  pdl_wait();
  if (asked) ask_rows(next);
  uint32_t phase = 1;                                     // a slot that was never filled is free
  for (int first = 0; first < count; first += SLOTS, box += SLOTS, phase ^= 1) {
    bool due = box >= under_way && box < end;
    next = place_of(box);                                 // before its slot is free: two divisions
    while (__any_sync(0xffffffffu, due)) {
      if (!due || !bar_test(base + kEmpty + 8 * lane, phase)) continue;
      due = false;
      ask_weights(box, next);
      ask_rows(next);
    }
  }
}

// What a warpgroup's thread holds: sum[t][n][i] is weight row t * 64 + 16 warp + g + i / 2 * 8 of the group's, column 8 n + 2 c + i % 2.
struct Product {
  const Params& p;
  smem_t base;
  int tid, group, warp, g, c, lane;
  uint32_t live;                                          // bit 2 n + e: column 8 n + 2 c + e is written
  int slot;
  uint32_t phase;
  float sum[TALL][OCTETS][4];

  __device__ __forceinline__ void look_at_rows() {
    live = 0;
#pragma unroll
    for (int i = 0; i < 2 * OCTETS; ++i) {
      const int m = i / 2 * 8 + 2 * c + i % 2;
      if (m < p.M && !(p.seq && p.seq[m] < 0)) live |= 1u << i;
    }
  }

  // The next boxes, all of a tile; one product in flight while the next box is awaited.
  __device__ __forceinline__ void multiply(int boxes) {
#pragma unroll
    for (int t = 0; t < TALL; ++t)
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) sum[t][n][0] = sum[t][n][1] = sum[t][n][2] = sum[t][n][3] = 0.f;
    smem_t done = base;
    int box = 0;
#pragma unroll 1
    do {                                                  // where none might run, ptxas copied the sums at the loop's end, before the wait
      bar_wait(base + kFull + 8 * slot, phase);
      const uint64_t a = box_operand(base + slot * kSlot + group * TALL * 8192, 16, 1024), b = box_operand(base + slot * kSlot + kWeights, 16, 1024);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int t = 0; t < TALL; ++t) wgmma_boxes<OCTETS, 0>(sum[t], a + 512 * t + 2 * k, b + 2 * k, 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (lane == 0 && box) bar_arrive(done);
      done = base + kEmpty + 8 * slot;
      if (++slot == SLOTS) {
        slot = 0;
        phase ^= 1;
      }
    } while (++box < boxes);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i) {                // no read of a sum moves before the wait
      float& v = sum[i / 4 / OCTETS][i / 4 % OCTETS][i % 4];
      v = held(v);
    }
    if (lane == 0) bar_arrive(done);
  }

  __device__ __forceinline__ float* cells_of(int block) const { return p.sums + (size_t)block * kSum + 4 * tid; }

  // For the block that has the end of the tile.
  __device__ __forceinline__ void send() const {
    float* cells = cells_of(blockIdx.x);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const float(&v)[4] = sum[u / OCTETS][u % OCTETS];
      store_cell(cells + u * 4 * kMultiply, uint4{never_zero(v[0]), never_zero(v[1]), never_zero(v[2]), never_zero(v[3])});
    }
  }

  // Adds what blocks [first, this one) sent, the last of them first: in descending order of k. kAtOnce of them are awaited together.
  __device__ __forceinline__ void take(int first) {
#pragma unroll
    for (int u0 = 0; u0 < kUnits; u0 += kHeld)
#pragma unroll 1
      for (int block = blockIdx.x - 1; block >= first; block -= kAtOnce) {
        uint4 v[kAtOnce][kHeld];                          // ones where there is no block: full
#pragma unroll
        for (int i = 0; i < kAtOnce * kHeld; ++i) v[i / kHeld][i % kHeld] = uint4{~0u, ~0u, ~0u, ~0u};
        uint32_t least = 0;                               // of all their numbers
        for (int tries = 0; !least; ++tries) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int u = 0; u < kHeld; ++u)
              if (block - i >= first) v[i][u] = load_cell(cells_of(block - i) + (u0 + u) * 4 * kMultiply);
          least = ~0u;
#pragma unroll
          for (int i = 0; i < kAtOnce * kHeld; ++i) least = least_of(least, v[i / kHeld][i % kHeld]);
          if (!least) try_again(tries);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (block - i < first) break;
#pragma unroll
          for (int u = 0; u < kHeld; ++u) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[(u0 + u) / OCTETS][(u0 + u) % OCTETS][e] += __uint_as_float(comp(v[i][u], e));
            store_cell(cells_of(block - i) + (u0 + u) * 4 * kMultiply, uint4{0, 0, 0, 0});
          }
        }
      }
  }

  template <bool FLOAT_OUT> __device__ __forceinline__ void store(int tile) const {
    const int head = tile / p.tiles, row = (tile - head * p.tiles) * kRows + group * TALL * 64 + warp * 16 + g;
#pragma unroll
    for (int n = 0; n < OCTETS; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(live >> (2 * n + e) & 1)) continue;
        const long long at = (8 * n + 2 * c + e) * p.out_row + head * p.out_head + row;
#pragma unroll
        for (int t = 0; t < TALL; ++t)
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const int below = 64 * t + 8 * eight;
            if (row + below >= p.N) continue;
            const float v = sum[t][n][2 * eight + e];
            if (FLOAT_OUT) reinterpret_cast<float*>(p.out)[at + below] = v;
            else reinterpret_cast<unsigned short*>(p.out)[at + below] = (unsigned short)pack_bf16(v, 0.f);
          }
      }
  }
};

template <bool FLOAT_OUT> __device__ __forceinline__ void linear(const Params& p, const TensorMap& weights, const TensorMap& rows, smem_t base) {
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  if (warp == 4 * GROUPS) {
    if (lane == 0) prefetch_map(weights);
    if (lane < SLOTS) {
      bar_init(base + kFull + 8 * lane, 1);
      bar_init(base + kEmpty + 8 * lane, 4 * GROUPS);
    }
    bar_init_fence();
    fence_async_shared();
    if (lane == 0) prefetch_map(rows);
  }
  __syncthreads();
  if (warp == 4 * GROUPS) {
    fill_ring(p, weights, rows, base);
    return;
  }
  pdl_wait();
  Product product{p, base, tid, warp >> 2, warp & 3, lane >> 2, lane & 3, lane, 0, 0, 0};
  product.look_at_rows();
  const Share share = share_of(p, blockIdx.x);
  for (int to = share.to; to > share.from;) {
    const int tile = (to - 1) / p.steps, begin = tile * p.steps, end = begin + p.steps;
    const int from = begin > share.from ? begin : share.from;
    product.multiply(to - from);
    if (to < end) {
      product.send();
    } else {
      if (from > begin) product.take(block_of(p, begin));
      product.store<FLOAT_OUT>(tile);
    }
    to = from;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
linear_stream(const __grid_constant__ Params p, const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows) {
  DYNAMIC_SMEM_1024(shared);
  linear<false>(p, weights, rows, smem(shared));
}
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
linear_stream_f32(const __grid_constant__ Params p, const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows) {
  DYNAMIC_SMEM_1024(shared);
  linear<true>(p, weights, rows, smem(shared));
}
