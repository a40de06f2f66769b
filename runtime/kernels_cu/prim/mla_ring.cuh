// Shared memory of the attention kernels and what fills it: a ring of boxes of 64 keys x 64 columns (a key tile is nine, rope first),
// the queries, the weights P. Built with SLOTS boxes.
#pragma once
#include "hopper.cuh"
#include "mla_items.cuh"
#include "wide.cuh"

[[maybe_unused]] constexpr int kBox = 8192, kBoxes = 9, kQBox = kN * 128;
// Ring, Q, P, then the tail: barriers and what a kernel keeps besides.
[[maybe_unused]] constexpr int kQAt = SLOTS * kBox, kPAt = kQAt + kBoxes * kQBox, kTailAt = kPAt + kQBox;
[[maybe_unused]] constexpr int kFull = 0, kEmpty = 8 * SLOTS, kReady = 16 * SLOTS, kTaken = kReady + 8, kQFree = kReady + 16, kMoved = kReady + 24;
static_assert(USE_WGMMA || !EARLY_KEYS, "of the copy engine's ring");
constexpr float kNever = -1e30f, kSlack = 8.f;  // a maximum before any key; what a score may pass a maximum by, in powers of two

#ifndef EVERY_LANE_ARRIVES    // for racecheck, which does not follow a __syncwarp before one lane's arrival
#define EVERY_LANE_ARRIVES 0
#endif
// A warp has met and is done with what a barrier guards: one lane arrives for all. A barrier counts kLaneArrivals for each warp.
constexpr int kLaneArrivals = EVERY_LANE_ARRIVES ? 32 : 1;
__device__ __forceinline__ void warp_arrive(smem_t barrier, int lane) {
  if (EVERY_LANE_ARRIVES || lane == 0) bar_arrive(barrier);
}

struct Cursor {  // the ring's slot of a tile's first box
  int slot;
  uint32_t phase;
  __device__ __forceinline__ Cursor plus(int n) const {
    Cursor c{slot + n, phase};
    if (c.slot >= SLOTS) { c.slot -= SLOTS; c.phase ^= 1; }
    return c;
  }
};

// An item's queries come with its first tile's boxes, which group 1 does not look at: it waits for them here, and for the first round of
// places whose second it may ask for next.
__device__ __forceinline__ void wait_queries(smem_t base, const Cursor& first) {
#pragma unroll 1
  for (int x = 0; x < kBoxes; ++x) {
    const Cursor c = first.plus(x);
    bar_wait(base + kTailAt + kFull + 8 * c.slot, c.phase);
  }
}

#if USE_WGMMA
[[maybe_unused]] constexpr int kEarly = EARLY_BOXES < SLOTS ? EARLY_BOXES : SLOTS;
// A tile's boxes in the order in which they land with rows: rope, then those whose places were free first.
__device__ __forceinline__ constexpr int landing(int i) { return (int)(0x874365210ll >> 4 * i) & 15; }
// A block's first item and the cache rows of its first keys.
struct Start {
  Item item;
  int rows;
};
__device__ __forceinline__ int look_up(const Params& p, const Item& it, int tile, int lane) {
  return slot_of(p, it.seq, (it.tile0 + tile) * kTile + lane * p.box_keys);
}
__device__ __forceinline__ Start find_start(const Params& p, int count, int lane) {
  Start start{p.items[blockIdx.x], 0};                      // asked for beside the count: the list has as many places as there are blocks
  if ((int)blockIdx.x < count && start.item.tiles) start.rows = look_up(p, start.item, 0, lane);
  return start;
}
// The ring's place after `tiles` tiles, with rows.
__device__ __forceinline__ Cursor after(const Cursor& at, int tiles) {
  const Cursor halfway = tiles & 1 ? at.plus(kBoxes) : at;
  return Cursor{halfway.slot, halfway.phase ^ (uint32_t)(tiles >> 1 & 1)};
}
#if OWNERS
constexpr int kPartTiles = PART_F32 ? 2 : 1;               // places for key tiles that a part of O takes
constexpr size_t kPartBytes = (size_t)kPartTiles * 8 * kBox;
// Parts that an item's block waits for.
__device__ __forceinline__ int parts_awaited(const Item& it) { return it.split == 0 && it.splits < 0 ? -it.splits - 1 : 0; }
#endif
// One warp asks for the copies of all items of this block: lane x for box x of a tile, each as soon as its place is free, so that nine
// are under way in 0.6 us where one thread took 1.7. Cache rows are looked up a warp at a time, ahead of their use.
__device__ __forceinline__ void fill_ring(const Params& p, const TensorMap& keys, const TensorMap& queries, smem_t base, int count, const Start& first) {
  const smem_t tail = base + kTailAt;
  const int lane = threadIdx.x & 31, column = lane ? (lane - 1) * 64 : kValue;  // of lanes below kBoxes
  const uint64_t once = policy_evict_first(), again = policy_evict_normal();
  const int pieces = kTile / p.box_keys, batch = 32 / pieces;     // copies a box: 1, 2 or 4; tiles a look-up
  Cursor at{0, 1};
  uint32_t q_phase = 1;
#if EARLY_KEYS
  bool started = false;
#endif
  Item it = first.item;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    if (i >= (int)gridDim.x) it = p.items[i];
    if (!it.tiles) continue;
    const uint64_t policy = it.stride > 1 || (OWNERS && it.splits < 0) ? again : once;
    int rows = 0, next = i == (int)blockIdx.x ? first.rows : look_up(p, it, 0, lane);
#if EARLY_KEYS
    // Keys first: of a block's first item all committed ones that have a place, before the kernel that makes the queries has ended.
    const Cursor start = at;
    int before = started ? 1 : least(least(it.ctx / kTile - it.tile0, it.tiles), EARLY_BOXES ? parts(kEarly, kBoxes) : SLOTS / kBoxes);
    if (before < 1) {
      pdl_wait();
      before = 1;
    }
    bool asked = false;
    auto ask_queries = [&] {
      pdl_wait();
      started = asked = true;
      bar_wait(tail + kQFree, q_phase);
      q_phase ^= 1;
      if (lane < kBoxes) tensor_copy(base + kQAt + lane * kQBox, queries, tail + kFull + 8 * start.plus(lane).slot, column, it.first, again);
    };
#else
    bar_wait(tail + kQFree, q_phase);
    q_phase ^= 1;
#endif
    for (int j = 0; j < it.tiles; ++j, at = at.plus(kBoxes)) {
#if EARLY_KEYS
      if (j == before && !(EARLY_BOXES && asked)) ask_queries();
#if EARLY_BOXES
      bool late = !started && j * kBoxes + lane >= kEarly;
#endif
#endif
      const int place = j % batch;
      if (!place) {
        rows = next;
        next = j + batch < it.tiles ? look_up(p, it, j + batch, lane) : 0;
      }
      int from[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) from[k] = __shfl_sync(0xffffffffu, rows, (place * pieces + k) & 31);
      const Cursor own = at.plus(lane < kBoxes ? lane : 0);
      const smem_t full = tail + kFull + 8 * own.slot, box = base + own.slot * kBox;
      bool due = lane < kBoxes;
      while (__any_sync(0xffffffffu, due)) {
#if EARLY_KEYS && EARLY_BOXES
        if (!started && !__any_sync(0xffffffffu, due && !late)) {
          ask_queries();
          late = false;
        }
        if (late) continue;
#endif
        if (!due || !bar_test(tail + kEmpty + 8 * own.slot, own.phase)) continue;
        due = false;
        bar_expect(full, kBox + (j ? 0 : kQBox));
        if (!EARLY_KEYS && !j) tensor_copy(base + kQAt + lane * kQBox, queries, full, column, it.first, again);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (k < pieces) tensor_copy(box + k * p.box_keys * 128, keys, full, column, from[k], policy);
      }
      stamp(2, lane == 0 && i == (int)blockIdx.x && !j);
    }
#if EARLY_KEYS
    if (EARLY_BOXES ? !asked : before == it.tiles) ask_queries();
#endif
#if OWNERS
    if (const int n = parts_awaited(it)) {
      named_barrier(5, 64);                                // with who fetches them, who then
      named_barrier(5, 64);                                // has waited for their places: none is waited for a round too early
      at = after(at, n * kPartTiles);
    }
#endif
  }
}
#endif

// ---------------------------------------------------------------- adding partials up
// Four numbers of a column or row of O, as partials hold them: 128 of them in a row are a unit.
#if PART_F32
using Partial = float4;
__device__ __forceinline__ float4 lds_partial(smem_t a) {
  const uint4 v = lds128(a);
  return float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
#else
using Partial = uint2;
__device__ __forceinline__ float4 lds_partial(smem_t a) {
  const uint2 v = lds64(a);
  return float4{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)};
}
#endif
[[maybe_unused]] constexpr int kUnits = 4 * kN, kUnitBytes = 32 * (int)sizeof(Partial);

// A split that has seen the others arrive needs the counter no more; the last makes it 0 for the next launch.
__device__ __forceinline__ void leave(const Params& p, const Item& it) {
  stamp(10, threadIdx.x == 0);
  if (threadIdx.x == 0 && atomicAdd(p.arrived + it.counter, 1) == 2 * it.splits - 1) p.arrived[it.counter] = 0;
}

// Split `split` of a tile adds up its share of the tile's units, in the order of the keys, once all splits have arrived. Warps 0-7.
// The share comes through the ring, which nobody needs any more, all splits at once: loads that wait for each other took 2 to 5 us.
// Columns of unit u: from column_of(u) on. add(sum, part, weight_at) adds a split's part, where weight_at is column 0's (weight, sum)
// pair of that split; put(u, sum) stores.
template <class ColumnOf, class Add, class Put>
__device__ __forceinline__ void combine_splits(const Params& p, const Item& it, smem_t base, int warp, int lane, int columns_each, ColumnOf column_of, Add add, Put put) {
  const int u0 = kUnits * it.split / it.splits, u1 = kUnits * (it.split + 1) / it.splits, units = u1 - u0;
  if (threadIdx.x == 0) wait_count(p.arrived + it.counter, it.splits);
  named_barrier(4, 256);
  stamp(8, threadIdx.x == 0);
  if (units) {
    const int c0 = column_of(u0) & ~1, width = (column_of(u1 - 1) + columns_each - c0 + 1) & ~1;  // pairs of columns: 16 bytes
    const smem_t room = base + (it.splits * width * 8 + 127 & ~127);
    const int fit = (kPAt - (int)(room - base)) / (units * kUnitBytes);    // splits; at least one: 2 KB a unit of two splits' tiles
    const uint8_t* stats = reinterpret_cast<const uint8_t*>(p.stats) + ((size_t)it.slot * kN + c0) * 8;
    const uint8_t* part = reinterpret_cast<const uint8_t*>(p.part) + ((size_t)it.slot * kUnits + u0) * kUnitBytes;
    auto fetch = [&](smem_t to, const uint8_t* from, size_t step, int bytes, int n) {
      for (int i = warp; i < n; i += 8)
        for (int x = 16 * lane; x < bytes; x += 512) cp_async16(to + i * bytes + x, from + i * step + x);
    };
    const size_t step = (size_t)it.stride * kUnits * kUnitBytes;
    int n = least(it.splits, fit);
    fetch(base, stats, (size_t)it.stride * kN * 8, 8 * width, it.splits);
    fetch(room, part, step, units * kUnitBytes, n);
    cp_async_wait();
    named_barrier(4, 256);
    stamp(9, threadIdx.x == 0);
    for (int c = warp; c < width; c += 8) {                                // maxima become weights
      float high = kNever, sum = 0.f;
      for (int i = lane; i < it.splits; i += 32) high = fmaxf(high, lds_f32(base + (i * width + c) * 8));
#pragma unroll
      for (int d = 1; d < 32; d *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
      for (int i = lane; i < it.splits; i += 32) {
        const float2 v = lds_f32x2(base + (i * width + c) * 8);
        sum += exp2_fast(v.x - high) * v.y;
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      for (int i = lane; i < it.splits; i += 32) sts_f32(base + (i * width + c) * 8, exp2_fast(lds_f32(base + (i * width + c) * 8) - high) * (1.f / sum));
    }
    constexpr int kHeld = 4;                                               // sums of a warp at a time
    for (int v0 = 0; v0 < units; v0 += 8 * kHeld) {
      float4 sum[kHeld];
#pragma unroll
      for (int x = 0; x < kHeld; ++x) sum[x] = float4{0.f, 0.f, 0.f, 0.f};
      for (int first = 0; first < it.splits; first += fit) {
        if (fit < it.splits && v0 + first) {                               // what does not fit comes piece by piece
          named_barrier(4, 256);
          n = least(it.splits - first, fit);
          fetch(room, part + first * step, step, units * kUnitBytes, n);
          cp_async_wait();
        }
        named_barrier(4, 256);
#pragma unroll
        for (int x = 0; x < kHeld; ++x) {
          const int v = v0 + warp + 8 * x;
          if (v >= units) break;
          const smem_t weights = base + (first * width + column_of(u0 + v) - c0) * 8;
#pragma unroll 4
          for (int i = 0; i < n; ++i) add(sum[x], lds_partial(room + (i * units + v) * kUnitBytes + lane * (int)sizeof(Partial)), weights + i * width * 8);
        }
      }
#pragma unroll
      for (int x = 0; x < kHeld; ++x)
        if (v0 + warp + 8 * x < units) put(u0 + v0 + warp + 8 * x, sum[x]);
    }
  }
  named_barrier(4, 256);
  leave(p, it);
}

// Ahead of an item, its rows' ancestor words into L1, which the masks would wait 0.5 us for. No branch: ptxas serialises wgmma behind one.
__device__ __forceinline__ void fetch_words(const Params& p, const Item& it, int lane) {
  const int row = least(it.first / kHeads + lane, (it.first + it.columns - 1) / kHeads);
  prefetch_near(p.ancestors + (size_t)row * (2 * p.words));
}

// Non-finite values of the step's own positions become 0, so that a weight of 0 removes them: a key that a row does see has
// given it a NaN weight already. This group's four boxes, keys from `from` on.
__device__ __forceinline__ void scrub(smem_t base, const Cursor& at, int group, int from) {
  const int t = threadIdx.x & 127, piece = t & 7, first = t >> 3;
  auto suspect = [](const uint4& v) {                       // an exponent of ones carries into the sign's place
    auto carry = [](uint32_t x) { return (x & 0x7f807f80u) + 0x00800080u; };
    return (carry(v.x) | carry(v.y) | carry(v.z) | carry(v.w)) & 0x80008000u;
  };
  auto clean = [](uint32_t x) { return ((x & 0x7f80u) == 0x7f80u ? 0u : x & 0xffffu) | ((x & 0x7f800000u) == 0x7f800000u ? 0u : x & 0xffff0000u); };
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    const smem_t box = base + at.plus(1 + group * 4 + k).slot * kBox;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = lds128(box + in_box(first + 16 * i, piece));
    if (!(suspect(v[0]) | suspect(v[1]) | suspect(v[2]) | suspect(v[3]))) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + 16 * i >= from && suspect(v[i]))
        sts128(box + in_box(first + 16 * i, piece), make_uint4(clean(v[i].x), clean(v[i].y), clean(v[i].z), clean(v[i].w)));
  }
  fence_async_shared();
  named_barrier(1 + group, 128);
}
