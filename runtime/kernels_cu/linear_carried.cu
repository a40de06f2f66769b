// linear_stream.cu with x carried by a warp of its own (CARRIED), for few rows; and with weights that have no hurry to leave L2 (KEPT).
// The same boxes, blocks, products and order of adding, hence the same bits. linear_stream.cu includes none of this: it stays, to the
// byte, what its times were measured of, and this file is measured by itself (docs/linear.md).
//
//   weights      one warp asks the copy engine for them and for nothing else. No predecessor writes them: a lane's first box is asked
//                for as soon as its own barriers stand, before the block meets and before the launch ahead has ended
//   x            another warp waits for the launch ahead, copies the M rows that there are, 128 M bytes a box, with cp.async, and
//                hands a box on once it has landed; rows beyond M are zeroed once, while the launch ahead is still at it
//
// Why: the copy engine serves an SM in order, so x stands behind all weights asked for meanwhile, 192 KB or 5.6 us of an SM's share at
// 4.5 TB/s with a whole SM's ring, and a box of x costs it 8 or 16 rows whether they hold anything: the square was as slow at M = 1 as
// at 8. PTX ISA, "Async proxy": cp.async writes as ordinary stores do and wgmma reads as the copy engine does, so the carrier fences
// between what has landed and the arrival that those who multiply wait for.
#include "prim/across.cuh"

#if !defined(CARRIED) || !defined(KEPT)
#error "build with -DCARRIED= -DKEPT= and what linear_stream.cu wants"
#endif
#if KEPT
#define policy_evict_first policy_evict_normal           // all that asks for weights below
#endif
#include "linear_stream.cu"

#if CARRIED
constexpr int kLanded = kEmpty + 8 * SLOTS, kCarriedThreads = kThreads + 32;
constexpr int kCarriedBlocks = SLOTS * (kSlot + 24) + 16 > 113 * 1024 ? 1 : kBlocks;

struct Rows {
  const char* x;                                          // [M, heads, K] by x_head
  long long bytes;                                        // from row to row
};

// Lane i asks for the weights of slot i: at once, then as soon as its place is free.
struct Asking {
  const Params& p;
  const TensorMap& weights;
  smem_t base;
  int lane;
  Share share;
  uint64_t once;

  struct Place { int column, row; };
  __device__ __forceinline__ Place place_of(int n) const {
    const int box = share.to - 1 - n, tile = box / p.steps, head = tile / p.tiles;
    return {(box - tile * p.steps) * 64, head * p.N + (tile - head * p.tiles) * kRows};
  }
  __device__ __forceinline__ int count() const { return lane < SLOTS ? share.to - share.from : 0; }
  __device__ __forceinline__ void ask(int n, const Place& at) const {
    const smem_t full = base + kFull + 8 * lane;
    bar_expect(full, kWeights);
    tensor_copy(base + lane * kSlot, weights, full, at.column, at.row, once);
    if (n + 1 + p.early >= share.to - share.from) pdl_trigger();  // the first of a block counts
  }
  // Before the block meets: a lane's barriers are its own until then.
  __device__ __forceinline__ void begin() const {
    if (lane == 0) prefetch_map(weights);
    if (lane < SLOTS) {
      bar_init(base + kFull + 8 * lane, 2);               // weights asked for; x handed on
      bar_init(base + kEmpty + 8 * lane, 4 * GROUPS);
      bar_init(base + kLanded + 8 * lane, 32);
    }
    bar_init_fence();
    fence_async_shared();
    if (lane < count()) ask(lane, place_of(lane));
  }
  __device__ __forceinline__ void go_on() const {
    const int most = share.to - share.from, end = count();
    uint32_t phase = 0;
    for (int first = SLOTS, box = SLOTS + lane; first < most; first += SLOTS, box += SLOTS, phase ^= 1) {
      bool due = box < end;
      const Place next = place_of(box);                   // before its slot is free: two divisions
      while (__any_sync(0xffffffffu, due)) {
        if (!due || !bar_test(base + kEmpty + 8 * lane, phase)) continue;
        due = false;
        ask(box, next);
      }
    }
  }
};

// The warp that brings x.
struct Carrying {
  const Params& p;
  const Rows& rows;
  smem_t base;
  int lane;
  Share share;

  // Before the block meets. Rows that no row of x fills: their columns are multiplied and never read, and zeros cost least power.
  __device__ __forceinline__ void begin() const {
    for (int slot = 0; slot < SLOTS; ++slot)
      for (int i = 8 * p.M + lane; i < 64 * OCTETS; i += 32) sts128(base + slot * kSlot + kWeights + 16 * i, uint4{0, 0, 0, 0});
    fence_async_shared();
  }
  __device__ __forceinline__ void copy(int n, int slot) const {
    const int box = share.to - 1 - n, tile = box / p.steps, column = tile / p.tiles * p.x_head + (box - tile * p.steps) * 64;
    const smem_t to = base + slot * kSlot + kWeights;
    for (int i = lane; i < 8 * p.M; i += 32) cp_async16(to + in_box(i / 8, i % 8), rows.x + i / 8 * rows.bytes + 2 * column + i % 8 * 16);
    cp_async_arrive(base + kLanded + 8 * slot);
  }
  __device__ __forceinline__ bool over(smem_t barrier, uint32_t parity) const { return !__any_sync(0xffffffffu, !bar_test(barrier, parity)); }
  __device__ __forceinline__ void go_on() const {
    const int count = share.to - share.from;
    int asked = 0, passed = 0, to = 0, from = 0;          // boxes, and their slots
    uint32_t free = 1, landed = 0;                        // parities; a slot that was never filled is free
    while (passed < count) {
      if (asked < count && over(base + kEmpty + 8 * to, free)) {
        copy(asked++, to);
        if (++to == SLOTS) {
          to = 0;
          free ^= 1;
        }
      }
      if (passed < asked && over(base + kLanded + 8 * from, landed)) {
        fence_async_shared();
        if (lane == 0) bar_arrive(base + kFull + 8 * from);
        ++passed;
        if (++from == SLOTS) {
          from = 0;
          landed ^= 1;
        }
      }
    }
  }
};

// linear() of linear_stream.cu, but for who asks for what and when.
template <bool FLOAT_OUT> __device__ __forceinline__ void carried(const Params& p, const TensorMap& weights, const Rows& rows, smem_t base) {
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const Share share = share_of(p, blockIdx.x);
  const Asking asking{p, weights, base, lane, share, policy_evict_first()};
  const Carrying carrying{p, rows, base, lane, share};
  if (warp == 4 * GROUPS) asking.begin();
  if (warp == 4 * GROUPS + 1) carrying.begin();
  __syncthreads();
  if (warp == 4 * GROUPS) {
    asking.go_on();
    return;
  }
  pdl_wait();                                             // x; and for those who multiply seq, `out` and the cells
  if (warp == 4 * GROUPS + 1) {
    carrying.go_on();
    return;
  }
  Product product{p, base, tid, warp >> 2, warp & 3, lane >> 2, lane & 3, lane, 0, 0, 0};
  product.look_at_rows();
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

extern "C" __global__ void __launch_bounds__(kCarriedThreads, kCarriedBlocks)
linear_carried(const __grid_constant__ Params p, const __grid_constant__ TensorMap weights, const __grid_constant__ Rows rows) {
  DYNAMIC_SMEM_1024(shared);
  carried<false>(p, weights, rows, smem(shared));
}
extern "C" __global__ void __launch_bounds__(kCarriedThreads, kCarriedBlocks)
linear_carried_f32(const __grid_constant__ Params p, const __grid_constant__ TensorMap weights, const __grid_constant__ Rows rows) {
  DYNAMIC_SMEM_1024(shared);
  carried<true>(p, weights, rows, smem(shared));
}
#endif
