// out = x w^T for few rows on sm_90a: the weights stream past once, through a ring that never runs dry. Defined by
// kernels_np/dense.py: linear, linear_f32; per head also the products of mla_query and mla_value.
//
//   box          64 GROUPS TALL weight rows x 64 inputs, swizzled, by the copy engine; beside it the same inputs of x
//   grid         persistent blocks, at most two an SM; box q = tile * steps + step of all boxes goes to block q / each
//   block        GROUPS warpgroups that multiply, each TALL times 64 weight rows; one warp that asks for boxes
//   product      wgmma with the weights as its 64 rows and x as its 8 OCTETS columns, both from shared memory, sums in float32
//
// All blocks stream as many boxes, to within one; a tile whose boxes two blocks share is cut. Sums of cut tiles go to `part`;
// whoever comes last to a tile adds them in the order of k, its own among them, so a result does not depend on who that was.
// A block does the end of a tile first and the start of another last: when it comes to that, the neighbour that had the tile's
// end has often finished, and the sum need not be written. A grid that divides the tiles cuts none.
//
// The ring is filled before the kernel waits for its predecessor (programmatic dependent launch): weights do not depend on it.
// Its successor may start when the last box has been asked for, not before: what has a ring of its own, in the other half of shared
// memory, then fills it while this one's last boxes arrive, are summed and stored; started early, it would have filled it long since,
// and memory would rest meanwhile.
//
// Inequality at N = K = 7168: 102.8 MB of weights, 22.7 us at 4.52 TB/s. A slot of 128 rows has 16 KB of weights and 2 KB of x at 16
// columns: one byte in nine comes from L2 a second time. In flight must be 4.52 TB/s * 1 us / 132 = 34 KB an SM.
// A column is one row of x and touches no other: the same bits at every M and beside any neighbours, NaN included. Dead rows
// (seq -1, seq may be null) are not written. Limits: M <= 8 OCTETS, K a multiple of 64.
#include "prim/hopper.cuh"

using namespace prim;

#if !defined(OCTETS) || !defined(GROUPS) || !defined(TALL) || !defined(SLOTS)
#error "build with -DOCTETS= -DGROUPS= -DTALL= -DSLOTS="
#endif
static_assert(OCTETS >= 1 && OCTETS <= 9 && TALL >= 1 && GROUPS >= 1 && 64 * GROUPS * TALL <= 256, "a box has at most 256 rows");
static_assert(SLOTS >= 2 && SLOTS <= 32, "a lane asks for a slot's boxes");
constexpr int kRows = 64 * GROUPS * TALL, kWeights = kRows * 128, kSlot = kWeights + OCTETS * 1024, kMultiply = 128 * GROUPS, kThreads = kMultiply + 32;
constexpr int kFull = SLOTS * kSlot, kEmpty = kFull + 8 * SLOTS, kLast = kEmpty + 8 * SLOTS;
constexpr int kUnits = TALL * OCTETS, kHeld = kUnits % 4 ? kUnits % 3 ? kUnits % 2 ? 1 : 2 : 3 : 4;  // fours of a thread's sum; added up at a time
constexpr int kBlocks = kUnits > 4 || (kThreads > 300 && kUnits > 2) ? 1 : 2;                       // an SM's, for the registers that they have
constexpr int kPart = kMultiply * kUnits * 4;             // numbers of a cut tile's sum

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Params {
  char* out;                                              // [M, heads, N], by out_row and out_head
  float* part;                                            // [blocks, 2, TALL, OCTETS, threads that multiply, 4]
  int* arrived;                                           // [heads * tiles] zero before and after
  const int* seq;                                         // [M] or null
  long long out_row, out_head;                            // in numbers
  int x_head, N, M, tiles, steps;                         // tiles: of a head; steps: boxes along K
  int each, more;                                         // boxes of a block; so many blocks have one more
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

// Lane i asks for what comes to slot i, as soon as its place is free.
__device__ __forceinline__ void fill_ring(const Params& p, const TensorMap& weights, const TensorMap& rows, smem_t base) {
  const int lane = threadIdx.x & 31;
  const Share share = share_of(p, blockIdx.x);
  const smem_t full = base + kFull + 8 * lane, slot = base + lane * kSlot;
  const uint64_t once = policy_evict_first(), again = policy_evict_normal();
  auto ask_weights = [&](int box) {
    const int tile = box / p.steps, head = tile / p.tiles;
    bar_expect(full, kSlot);
    tensor_copy(slot, weights, full, (box - tile * p.steps) * 64, head * p.N + (tile - head * p.tiles) * kRows, once);
  };
  auto ask_rows = [&](int box) {
    const int tile = box / p.steps;
    tensor_copy(slot + kWeights, rows, full, tile / p.tiles * p.x_head + (box - tile * p.steps) * 64, 0, again);
  };
  const int end = lane < SLOTS ? share.to : 0;
  int box = share.from + lane;
  if (box < end) ask_weights(box);
  pdl_wait();
  if (box < end) ask_rows(box);
  uint32_t phase = 0;
  for (int first = share.from + SLOTS; first < share.to; first += SLOTS, phase ^= 1) {
    box += SLOTS;
    bool due = box < end;
    while (__any_sync(0xffffffffu, due)) {
      if (!due || !bar_test(base + kEmpty + 8 * lane, phase)) continue;
      due = false;
      ask_weights(box);
      ask_rows(box);
    }
  }
  pdl_trigger();
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

  // Boxes [from, to) of a tile, one product in flight while the next box is awaited.
  __device__ __forceinline__ void multiply(int from, int to) {
#pragma unroll
    for (int t = 0; t < TALL; ++t)
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) sum[t][n][0] = sum[t][n][1] = sum[t][n][2] = sum[t][n][3] = 0.f;
    smem_t done = base;
#pragma unroll 1
    for (int box = from; box < to; ++box) {
      bar_wait(base + kFull + 8 * slot, phase);
      const uint64_t a = box_operand(base + slot * kSlot + group * TALL * 8192, 16, 1024), b = box_operand(base + slot * kSlot + kWeights, 16, 1024);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int t = 0; t < TALL; ++t) wgmma_boxes<OCTETS, 0>(sum[t], a + 512 * t + 2 * k, b + 2 * k, 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (lane == 0 && box > from) bar_arrive(done);
      done = base + kEmpty + 8 * slot;
      if (++slot == SLOTS) {
        slot = 0;
        phase ^= 1;
      }
    }
    wgmma_wait<0>();
    if (lane == 0) bar_arrive(done);
  }

  __device__ __forceinline__ float* part_of(int block, int tile) const {
    const int which = share_of(p, block).from / p.steps != tile;  // a block has at most two cut tiles, its first and its last
    return p.part + (size_t)(2 * block + which) * kPart + 4 * tid;
  }

  // The tile's other sums are added to this one; false where others are still to come, who will do it.
  __device__ __forceinline__ bool meet(int tile, int first, int last) {
    int* counter = p.arrived + tile;
    if (named_any(1, kMultiply, load_acquire(counter) < last - first)) {
      float* own = part_of(blockIdx.x, tile);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float(&v)[4] = sum[u / OCTETS][u % OCTETS];
        *reinterpret_cast<float4*>(own + u * 4 * kMultiply) = float4{v[0], v[1], v[2], v[3]};
      }
      named_barrier(1, kMultiply);
      if (tid == 0) {                                     // for all: the barrier is behind their stores
        __threadfence();
        sts32(base + kLast, atomicAdd(counter, 1) == last - first);
        __threadfence();
      }
      named_barrier(1, kMultiply);
      if (!lds_u32(base + kLast)) return false;
    }
    if (tid == 0) *counter = 0;
#pragma unroll
    for (int u0 = 0; u0 < kUnits; u0 += kHeld) {
      float total[kHeld][4] = {};
#pragma unroll 2
      for (int block = first; block <= last; ++block) {
        const float* part = part_of(block, tile);
        const bool own = block == (int)blockIdx.x;
        uint4 v[kHeld];
#pragma unroll
        for (int u = 0; u < kHeld; ++u) v[u] = ldg128_cg(part + (u0 + u) * 4 * kMultiply);
#pragma unroll
        for (int u = 0; u < kHeld; ++u)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[u][i] += own ? sum[(u0 + u) / OCTETS][(u0 + u) % OCTETS][i] : __uint_as_float(comp(v[u], i));
      }
#pragma unroll
      for (int u = 0; u < kHeld; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[(u0 + u) / OCTETS][(u0 + u) % OCTETS][i] = total[u][i];
    }
    return true;
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
  for (int box = share.from; box < share.to;) {
    const int tile = box / p.steps, begin = tile * p.steps, end = begin + p.steps;
    const int to = end < share.to ? end : share.to;
    product.multiply(box, to);
    bool whole = true;
    if (box > begin || to < end) whole = product.meet(tile, block_of(p, begin), block_of(p, end - 1));
    if (whole) product.store<FLOAT_OUT>(tile);
    box = to;
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
