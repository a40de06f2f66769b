// Absorbed attention over a paged latent cache where a sequence has many (node, head) pairs: 64 of them are the rows of the product.
//
// What it computes, its plan and its arguments are tree_mla.cu's; there pairs are columns, so that few of them cost no padding. Here
//
//   S[64 x 64]   = Q[64 x 576] K^T       P = exp2(S - max), the maximum moving only when a score passes it by 2^8
//   O[64 x 512] += P[64 x 64] V          V is the key tile's first 512 columns
//
// A 64 x 64 x 16 product reads 4 KB of shared memory in 32 clocks, all that an SM delivers; 64 x 256 x 16 reads 8 or 10 KB in 128.
// Turned the other way, the values' products need 120 B a clock as the scores' do.
//
//   warps 0-3, 4-7   256 of O's columns each, in registers. Group 0 owns even tiles (scores, softmax, P), group 1 odd ones
//   warp 8           fills a ring of two tiles, box by box
//
// The order on the tensor cores is S0 S1 | O += P0 V0 (both groups) | O += P1 V1 | S2 S3 | ...: the softmax of an even tile runs behind
// the scores of the odd one, that of an odd tile behind P0 V0; a tile's place is free, and its successor on the way, for about a
// thousand clocks before its scores are wanted. A product on values goes by halves of 128 columns: two boxes of its tile are free, and their
// successors asked for, while it still reads the other two. An owner multiplies P from its registers, the other group from shared memory, where one buffer
// is enough: who reads P of a tile writes that of the next.
//
// Sources: MLA arXiv 2405.04434, online softmax arXiv 2205.14135, FlashMLA's schedule (github.com/deepseek-ai/FlashMLA, docs), PTX ISA.
#ifndef HEADS
#error "build with -DHEADS= -DCAUSAL= -DPART_F32="
#endif
#define COLUMNS 64
#define SLOTS 18
#define USE_WGMMA 1
#include "prim/mla_rows.cuh"  // and what it includes: NVRTC takes prim/x and x for two files

static_assert(HEADS >= 1 && HEADS <= 128, "heads on this rank");

constexpr int kThreads = 384;
// Registers of a thread after the launch's 168 each are dealt anew: more than that in sum and the block waits for ever.
constexpr int kCopierRegisters = 40, kProductRegisters = 232;
static_assert(kCopierRegisters + 2 * kProductRegisters <= 3 * 168, "registers of a block");
constexpr int kMax = kMoved + 8, kSum = kMax + 2 * kN * 4;  // maxima of both groups' last tiles; their sums
constexpr int kTeller = OWNERS ? 6 : 3, kTold = OWNERS ? 288 : 256;  // the barrier behind an item's stores, and who meets there
static_assert(kMax % 16 == 0 && kSum + 2 * kN * 4 <= 2048, "the tail of shared memory");

struct Walker {
  const Params& p;
  smem_t base;
  int w, lane, row;            // row: of this thread's two, the first; the other is 8 further
  uint32_t walked[2];          // tiles of either group, over all items: phases of their `ready`
  float o[32][4], s[8][4];
  float high[2], sum[2];       // of this thread's rows: what o is relative to; weights of the own tiles, these 16 keys of them
  uint32_t weight[4][4];       // P of an own tile, as the product takes it from registers

  __device__ __forceinline__ smem_t tail(int at) const { return base + kTailAt + at; }
  __device__ __forceinline__ void release(const Cursor& at, int box, int boxes) const {
    __syncwarp();
    if (EVERY_LANE_ARRIVES)
      for (int i = 0; i < boxes; ++i) bar_arrive(tail(kEmpty) + 8 * (at.slot + box + i));
    else if (lane < boxes) bar_arrive(tail(kEmpty) + 8 * (at.slot + box + lane));
  }
  __device__ __forceinline__ void release_queries() const {
    __syncwarp();
    warp_arrive(tail(kQFree), lane);
  }

  // s = queries times a tile's keys, boxes FROM to TO of the order in which they land. Under way when it returns.
  template <int FROM, int TO> __device__ __forceinline__ void score(const Cursor& at) {
    const uint64_t a = box_operand(base + kQAt, 16, 1024), b = box_operand(base + at.slot * kBox, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = FROM; i < TO; ++i) {
      const int x = landing(i);
      bar_wait(tail(kFull) + 8 * (at.slot + x), at.phase);
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_boxes<8, 0>(s, operand_plus(a, x * kQBox + 32 * k), operand_plus(b, x * kBox + 32 * k), (i | k) != 0);
    }
    wgmma_commit();
  }

  // This group's values of a tile that the other group scored: long complete, but it has to be behind the copy.
  template <int GROUP> __device__ __forceinline__ void see_values(const Cursor& at) const {
#pragma unroll
    for (int x = 0; x < 4; ++x) bar_wait(tail(kFull) + 8 * (at.slot + 1 + 4 * GROUP + x), at.phase);
  }
  // o += P times this group's values, half by half; OWN: P from registers. Under way when it returns, in two groups.
  template <int GROUP, bool OWN> __device__ __forceinline__ void mix(const Cursor& at) {
    if (!OWN && !SOFTEN_FIRST) see_values<GROUP>(at);
    const uint64_t a = box_operand(base + kPAt, 16, 1024), b = box_operand(base + (at.slot + 1 + 4 * GROUP) * kBox, kBox, 1024);
    wgmma_fence();
    mix_half<0, OWN>(a, b);
    mix_half<1, OWN>(a, operand_plus(b, 2 * kBox));
  }
  template <int HALF, bool OWN> __device__ __forceinline__ void mix_half(uint64_t a, uint64_t b) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (OWN) wgmma_wide<HALF>(o, weight[k], operand_plus(b, 2048 * k));
      else wgmma_wide<HALF>(o, operand_plus(a, 32 * k), operand_plus(b, 2048 * k));
    }
    wgmma_commit();
  }
  // Gives back this group's values of a tile as their products end; BEHIND: groups of products begun since.
  template <int GROUP, int BEHIND = 0> __device__ __forceinline__ void done(const Cursor& at) {
    wgmma_wait<BEHIND + 1>();
    release(at, 1 + 4 * GROUP, 2);
    wgmma_wait<BEHIND>();
    release(at, 3 + 4 * GROUP, 2);
  }

  // Hides the step's own positions from whoever does not descend from them. j0: node of the tile's first key.
  __device__ __forceinline__ void mask(const Item& it, int j0) {
    const int t = thread_here();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = least((t >> 5 & 3) * 16 + (t >> 2 & 7) + 8 * h, it.columns - 1);
      const uint64_t seen = seen_keys(p, (it.first + r) / kHeads, (it.packed + r) / kHeads, j0) >> (2 * (t & 3));
#pragma unroll
      for (int b = 0; b < 8; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(seen >> (8 * b + e) & 1)) s[b][2 * h + e] = hidden();
    }
  }

  // o and the sums, relative to other maxima than before.
  __device__ __forceinline__ void rescale(float before0, float before1) {
    if (!warp_any(before0 != high[0] || before1 != high[1])) return;
    const float x = exp2_fast(before0 - high[0]), y = exp2_fast(before1 - high[1]);
#pragma unroll
    for (int b = 0; b < 32; ++b) {
      o[b][0] *= x;
      o[b][1] *= x;
      o[b][2] *= y;
      o[b][3] *= y;
    }
  }

  // Scores to weights. Does not touch o: the product before may be under way.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = hidden();
#pragma unroll
      for (int b = 0; b < 8; ++b) x = fmaxf(x, fmaxf(s[b][2 * h], s[b][2 * h + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)) * p.scale_log2;
      if (x > high[h] + kSlack) {
        sum[h] *= exp2_fast(high[h] - x);
        high[h] = x;
      }
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        const float p0 = exp2_fast(fmaf(s[b][2 * h], p.scale_log2, -high[h])), p1 = exp2_fast(fmaf(s[b][2 * h + 1], p.scale_log2, -high[h]));
        even += p0;
        odd += p1;
        weight[b / 2][h + 2 * (b & 1)] = pack_bf16(p0, p1);
      }
      sum[h] += even + odd;
    }
  }

  // P and its maxima to the other group.
  template <int GROUP> __device__ __forceinline__ void publish() {
    named_barrier(1 + GROUP, 128);                         // this whole group has read the P before
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix_x4(base + kPAt + in_box(w * 16 + (lane & 15), 2 * k + (lane >> 4)), weight[k]);
    if ((lane & 3) == 0) {
      sts_f32(tail(kMax) + (GROUP * kN + row) * 4, high[0]);
      sts_f32(tail(kMax) + (GROUP * kN + row + 8) * 4, high[1]);
    }
    fence_async_shared();
    __syncwarp();
    warp_arrive(tail(kReady) + 8 * GROUP, lane);
  }
  template <int OWNER> __device__ __forceinline__ void wait_weights() const { bar_wait(tail(kReady) + 8 * OWNER, walked[OWNER] & 1); }
  // o follows the maxima that come with the owner's P.
  template <int OWNER> __device__ __forceinline__ void follow() {
    const float before0 = high[0], before1 = high[1];
    high[0] = lds_f32(tail(kMax) + (OWNER * kN + row) * 4);
    high[1] = lds_f32(tail(kMax) + (OWNER * kN + row + 8) * 4);
    sum[0] *= exp2_fast(before0 - high[0]);
    sum[1] *= exp2_fast(before1 - high[1]);
    rescale(before0, before1);
  }

  // A tile of this group: its scores are in s. wgmmas on o may be under way until `behind` has run.
  template <int GROUP, class Behind> __device__ __forceinline__ void own_tile(const Item& it, const Cursor& at, int own, Behind behind) {
    const float before0 = high[0], before1 = high[1];
    release(at, 0, 1);                                     // the rope box
    if (own < kTile) mask(it, -own);
    soften();
#if SOFTEN_FIRST
    if ((lane & 3) == 0) {                                 // a store that needs all weights: ptxas made them behind the wait that `behind` begins with
      sts_f32(tail(kSum) + (GROUP * kN + row) * 4, sum[0]);
      sts_f32(tail(kSum) + (GROUP * kN + row + 8) * 4, sum[1]);
    }
#endif
    behind();
    publish<GROUP>();
    rescale(before0, before1);
    if (own < kTile) {
      wait_weights<GROUP>();                               // all of this group have their scores
      scrub(base, at, GROUP, own);
    }
    mix<GROUP, true>(at);
    ++walked[GROUP];
  }
  // A tile of the other group.
  template <int GROUP> __device__ __forceinline__ void others_tile(const Cursor& at, int own) {
    if (SOFTEN_FIRST && GROUP == 0) see_values<0>(at);        // while it waits for P
    wait_weights<1 - GROUP>();
    follow<1 - GROUP>();
    if (own < kTile) scrub(base, at, GROUP, own);
    mix<GROUP, false>(at);
    ++walked[1 - GROUP];
  }

  // Group 0: the scores of an even tile go in behind the product of the odd tile before it, which has other boxes: first those of the
  // rope box, which keep the tensor cores busy until that product's end is seen and its values are given back.
  __device__ __forceinline__ void walk_even(const Item& it, int tiles, Cursor at) {
    int own = it.ctx - it.tile0 * kTile;                   // from this key of the tile on they are the step's own
    stamp(3, threadIdx.x == 0);
    score<0, 1>(at);
#pragma unroll 1
    for (int j = 0;; j += 2, own -= 2 * kTile) {
      const bool detailed = threadIdx.x == 0 && j == STAMPS;
      stamp(16, detailed);
      score<1, kBoxes>(at);
      wgmma_wait<0>();
      stamp(17, detailed);
      if (j == 0) stamp(4, threadIdx.x == 0);
      if (j + 2 >= tiles) release_queries();
      own_tile<0>(it, at, own, [] {});
      stamp(18, detailed);
      done<0>(at);
      stamp(19, detailed);
      if (j + 1 == tiles) break;
      at = at.plus(kBoxes);
      others_tile<0>(at, own - kTile);
      stamp(20, detailed);
      if (j + 2 == tiles) {
        done<0>(at);
        break;
      }
      const Cursor odd = at;
      at = at.plus(kBoxes);
      score<0, 1>(at);
      done<0, 1>(odd);
      stamp(21, detailed);
    }
  }
  // Group 1: the softmax of an odd tile runs while the values of the even one are multiplied.
  __device__ __forceinline__ void walk_odd(const Item& it, int tiles, Cursor at) {
    int own = it.ctx - it.tile0 * kTile;
    if (tiles == 1) release_queries();
    else wait_queries(base, at);
#pragma unroll 1
    for (int j = 0; j < tiles; j += 2, own -= 2 * kTile) {
      const Cursor odd = at.plus(kBoxes);
      const bool detailed = threadIdx.x == 128 && j == STAMPS;
      stamp(24, detailed);
      if (j + 1 < tiles) {
        score<0, kBoxes>(odd);
        if (SOFTEN_FIRST) see_values<1>(at);                  // while they are multiplied
        wgmma_wait<0>();
        stamp(25, detailed);
        if (j + 3 >= tiles) release_queries();
      } else if (SOFTEN_FIRST) {
        see_values<1>(at);
      }
      others_tile<1>(at, own);
      stamp(26, detailed);
      if (j + 1 == tiles) {
        done<1>(at);
        break;
      }
      own_tile<1>(it, odd, own - kTile, [&] { done<1>(at); });
      stamp(27, detailed);
      done<1>(odd);
      stamp(28, detailed);
      at = odd.plus(kBoxes);
    }
  }

  __device__ __forceinline__ void begin_item() {
    high[0] = high[1] = kNever;
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int b = 0; b < 32; ++b) o[b][0] = o[b][1] = o[b][2] = o[b][3] = 0.f;
  }

#if OWNERS
  // Boxes of a part: four a group, a thread's numbers 16 bytes at a time. visit(their place in the boxes, block of O).
  template <int GROUP, class Visit> __device__ __forceinline__ void each_piece(int half, Visit visit) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) visit((4 * GROUP + i / 4) * kBox + i % 4 * 2048 + (thread_here() & 127) * 16, PART_F32 ? 16 * half + i : 2 * i);
  }
  // Sums of a piece to whoever owns its column tile.
  template <int GROUP> __device__ __forceinline__ void hand_over(const Item& it, const float (&total)[2]) const {
    const size_t slot = (size_t)it.slot + it.split - 1;
    if (GROUP == 0 && (lane & 3) == 0)
#pragma unroll
      for (int h = 0; h < 2; ++h) reinterpret_cast<float2*>(p.stats)[slot * kN + row + 8 * h] = pair(high[h], total[h]);
#pragma unroll
    for (int half = 0; half < kPartTiles; ++half)
      each_piece<GROUP>(half, [&](int at, int b) {
        uint4 v;
        if constexpr (PART_F32) v = make_uint4(__float_as_uint(o[b][0]), __float_as_uint(o[b][1]), __float_as_uint(o[b][2]), __float_as_uint(o[b][3]));
        else v = make_uint4(pack_bf16(o[b][0], o[b][1]), pack_bf16(o[b][2], o[b][3]), pack_bf16(o[b + 1][0], o[b + 1][1]), pack_bf16(o[b + 1][2], o[b + 1][3]));
        *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(p.part) + slot * kPartBytes + half * (8 * kBox) + at) = v;
      });
  }
  // Adds what others made of this item, in the order of the keys.
  template <int GROUP> __device__ __forceinline__ void take_over(const Item& it, Cursor& at, float (&total)[2]) {
#pragma unroll 1
    for (int k = parts_awaited(it); k > 0; --k) {
      float own[2], other[2];
#pragma unroll
      for (int half = 0; half < kPartTiles; ++half) {
        bar_wait(tail(kFull) + 8 * at.slot, at.phase);
        see_values<GROUP>(at);
        if (half == 0)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 v = lds_f32x2(base + at.slot * kBox + (row + 8 * h) * 8);
            const float x = fmaxf(high[h], v.x);
            own[h] = exp2_fast(high[h] - x);
            other[h] = exp2_fast(v.x - x);
            total[h] = fmaf(other[h], v.y, own[h] * total[h]);
            high[h] = x;
          }
        each_piece<GROUP>(half, [&](int from, int b) {
          const uint4 v = lds128(base + (at.slot + 1) * kBox + from);
          auto add = [&](float& x, float y, int h) { x = fmaf(other[h], y, own[h] * x); };
          if constexpr (PART_F32) {
            add(o[b][0], __uint_as_float(v.x), 0);
            add(o[b][1], __uint_as_float(v.y), 0);
            add(o[b][2], __uint_as_float(v.z), 1);
            add(o[b][3], __uint_as_float(v.w), 1);
          } else {
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              add(o[b + i / 2][i % 2 * 2], low_half(w[i]), i % 2);
              add(o[b + i / 2][i % 2 * 2 + 1], high_half(w[i]), i % 2);
            }
          }
        });
        fence_async_shared();                              // what comes there next is the copy engine's
        named_barrier(3, 256);                             // both groups have read the sums
        release(at, 1 + 4 * GROUP, 4);
        if (GROUP == 0) release(at, 0, 1);
        at = at.plus(kBoxes);
      }
    }
  }
#endif

  // The output or a partial.
  template <int GROUP> __device__ __forceinline__ void finish(const Item& it, Cursor& at) {
    stamp(5, threadIdx.x == 0);
#if OWNERS
#pragma unroll
    for (int b = 0; b < 32; ++b)                           // products are over; where ptxas could not tell it serialised them all
#pragma unroll
      for (int e = 0; e < 4; ++e) o[b][e] = held(o[b][e]);
#endif
    const int t = thread_here(), row = (t >> 5 & 3) * 16 + (t >> 2 & 7), lane = t & 31;
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if ((lane & 3) == 0) sts_f32(tail(kSum) + (GROUP * kN + row + 8 * h) * 4, sum[h]);
    }
    named_barrier(3, 256);
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = lds_f32(tail(kSum) + (row + 8 * h) * 4) + lds_f32(tail(kSum) + (kN + row + 8 * h) * 4);
#if OWNERS
    take_over<GROUP>(it, at, total);
    if (it.splits < 0 && it.split > 0) {
      hand_over<GROUP>(it, total);
    } else
#endif
    if (it.splits > 1) {
      const size_t slot = (size_t)it.slot + (size_t)it.split * it.stride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const size_t at = slot * kN + row + 8 * h;
        if (GROUP == 0 && (lane & 3) == 0) reinterpret_cast<float2*>(p.stats)[at] = pair(high[h], total[h]);
        put_partial(p.part, at * kValue + GROUP * 256, o, h, lane & 3);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool live = row + 8 * h < it.columns;
        put_row(p.out, ((size_t)it.first + row + 8 * h) * kValue + GROUP * 256, o, h, 1.f / total[h], lane & 3, live);
      }
    }
    named_barrier(kTeller, kTold);
    stamp(6, threadIdx.x == 0);
    if (!OWNERS && it.splits > 1 && threadIdx.x == 0) add_release(p.arrived + it.counter, 1);  // for all: the barrier is behind their stores
    stamp(7, threadIdx.x == 0);
  }

  template <int GROUP> __device__ __forceinline__ void work(int count, int first) {
    Cursor at{0, 0};
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const Item& it = p.items[i];                         // read again where it is needed: registers are scarce
      const int tiles = READY_FIRST && i == (int)blockIdx.x ? first : it.tiles;
      if (!tiles) continue;
#if OWNERS
      prefetch_near(reinterpret_cast<const uint8_t*>(p.items + least(i + (int)gridDim.x, count - 1)) + (lane & 1) * (sizeof(Item) - 4));  // two sectors
#endif
      fetch_words(p, it, lane);
      begin_item();
      if constexpr (GROUP == 0) walk_even(it, tiles, at);
      else walk_odd(it, tiles, at);
      at = after(at, tiles);
      finish<GROUP>(it, at);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
tree_mla(const __grid_constant__ Params p, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries) {
  DYNAMIC_SMEM_1024(shared);
  const smem_t base = smem(shared), tail = base + kTailAt;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
  stamp(0, threadIdx.x == 0);
  stamp_common(12, threadIdx.x == 0);
#if EARLY_KEYS
  const int count = *p.count;                              // the list is older than the kernel ahead of this one
  Start start{};
  if (warp == 8) start = find_start(p, count, lane);       // while others make the barriers
  else prefetch_near(p.items + blockIdx.x);
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      bar_init(tail + kFull + 8 * i, 1);
      bar_init(tail + kEmpty + 8 * i, 4 * kLaneArrivals);
    }
    bar_init(tail + kReady, 4 * kLaneArrivals);
    bar_init(tail + kReady + 8, 4 * kLaneArrivals);
    bar_init(tail + kQFree, 8 * kLaneArrivals);
    bar_init_fence();
  }
  if (threadIdx.x == 256) {
    prefetch_map(keys);
    prefetch_map(queries);
  }
  __syncthreads();
  auto begin = [&] {
    pdl_wait();
    pdl_trigger();
    stamp(1, threadIdx.x == 0);
  };
#if EARLY_KEYS
  if (!READY_FIRST && warp != 8) begin();                  // the copier waits itself, behind its first keys
#else
  begin();
  const int count = *p.count;
#endif
  if (warp >= 8) {
    lower_registers<kCopierRegisters>();
    if (READY_FIRST && warp != 8) begin();
#if EARLY_KEYS
    if (warp == 8) fill_ring(p, keys, queries, base, count, start);
#else
    if (warp == 8) fill_ring(p, keys, queries, base, count, find_start(p, count, lane));
#endif
#if OWNERS
    if (warp == 9) fetch_parts(p, base, count);
    if (warp == 10) tell_parts(p, count, lane);
#endif
    return;
  }
  raise_registers<kProductRegisters>();
  int first = 0;                                           // key tiles of the first item
  if (READY_FIRST) {
    first = p.items[blockIdx.x].tiles;                     // on its way while the kernel ahead ends
    begin();
  }
  {
    Walker walker{p, base, warp & 3, lane, (warp & 3) * 16 + (lane >> 2), {0, 0}};
    if (warp < 4) walker.work<0>(count, first);
    else walker.work<1>(count, first);
  }
  lower_registers<168>();
  for (int i = blockIdx.x; i < count; i += gridDim.x) {  // all items are under way on resident blocks: waiting is safe
    const Item it = p.items[i];
    if (it.tiles && it.splits > 1) combine(p, it, warp, lane);
  }
  stamp(11, threadIdx.x == 0);
  stamp_common(13, threadIdx.x == 0);
}
