// INT4 mixture of experts: both GEMMs of a layer in one persistent launch.
//
//   hidden[r] = bf16(silu(g) * u), [g | u] = W13[e] x[token(r)]        r: a (token, expert) choice, sorted by expert
//   part[r]   = weight(r) * W2[e] hidden[r]                            moe_combine adds the k parts of a token and the base
//
// Work list. moe_route.cu sorts the choices by expert and cuts each expert's rows into chunks of at most 8 NB_MAX. An item
// is a chunk times a tile of 64 WN rows of W13 (phase 0), later of W2 (phase 1). Blocks claim items in order from one counter;
// all of phase 0 is claimed before any of phase 1, so a block that waits for a chunk's hidden rows waits for running blocks.
//
//   warp CW      weights   one bulk copy a 64-row strip and stage, into a ring that is never drained: not between tiles, not
//                          between the GEMMs
//   warp CW + 1  tokens    the chunk's rows of x (gathered) or hidden; waits for hidden, while the weights run ahead
//   warps 0..CW  math      warp = (strip of WN, slice of K of WK): weights are the A operand, 8 tokens a column octet
//
// At Kimi K2.6's size an expert is 24.77 MB and 705 MFLOP a token and layer: bytes bind up to M of about 2000.
// Numbers that set the shape (one H200): 18 KiB stages, 5 deep, 2 blocks an SM keep 0.95 of the read rate with the math on;
// dequantisation by one FMA costs 12.7 instructions for 8 weights against 18.7 (prim/w4.cuh).
// Sources: Marlin arXiv 2408.11743 (fragment-order weights), Stream-K arXiv 2301.03598 (persistent tiles), PTX ISA.
#include "prim/memory.cuh"
#include "prim/pipeline.cuh"
#include "prim/w4.cuh"
#include "prim/wgmma.cuh"

#ifndef NB_MAX
#error "build with -DNB_MAX= -DGW= -DCW= -DFJ= -DSTAGES= -DCTAS= -DPART_F32= -DUSE_WGMMA="
#endif
#ifndef NB_MIN                // the fewest octets a tile is built for: fewer tiles in one kernel need fewer registers
#define NB_MIN 1
#endif
static_assert(NB_MIN >= 1 && NB_MIN <= NB_MAX, "");
#ifndef WIDE
#define WIDE 0
#endif
#ifndef EVERY_LANE_ARRIVES    // for racecheck, which does not follow a __syncwarp before one lane's arrival
#define EVERY_LANE_ARRIVES 0
#endif
#ifndef JB
#define JB 1
#endif
#ifndef MERGED                // one copying warp instead of two: fewer registers held, so more blocks an SM
#define MERGED 0
#endif
static_assert(!MERGED || (USE_WGMMA && !WIDE), "");
static_assert(JB == 1 || JB == 2, "fragments a batch");
#define PACKED USE_WGMMA      // wgmma reads tokens through a descriptor, so they lie in its order in memory already
static_assert(NB_MAX >= 1 && NB_MAX <= 12, "token octets a chunk");
static_assert(FJ == 4 || (FJ == 2 && USE_WGMMA), "16-row fragments of a strip that a warp multiplies");
static_assert(CW == 4 || CW == 8, "math warps");
static_assert(GW >= 1 && GW <= 8, "groups of 32 inputs a warp and stage");
static_assert(STAGES >= 2 && STAGES <= 12, "ring");

using namespace prim;

[[maybe_unused]] constexpr int kHead = 1024;  // barriers and the queue of items
constexpr int kStrips = CW * FJ / 4;     // strips times slices of K that a stage holds: wn * wk
constexpr int kTokensAt = kStrips * GW * kUnit;  // after a stage's weights

struct Phase {
  const uint8_t* w;     // [E, N/64, K/32, 1152] u8
  const uint8_t* in;    // rows of K bf16: phase 0 x [M, K] (PACKED: sorted rows in octets), phase 1 hidden
  int strips, groups;   // N/64, K/32
  int wn, wk;           // strips of a tile, slices of K in a block; wn * wk = kStrips
  int splits;           // items that share a tile's K: phase 0's last one to finish adds them, moe_combine phase 1's parts
  int batch;            // tiles that are claimed together
  uint32_t shift;       // prim::scale_shift(exponent)
  float factor;         // 2**exponent
};

struct Params {
  Phase phase[2];
  uint8_t* hidden;      // [rows, F] bf16; PACKED: octets
  void* part;           // [splits, M k, H] f32 or bf16, row = choice number
  const int4* chunks;   // [n] {expert, first sorted row, rows, first chunk of the expert | its chunks << 18}
  const int* total;     // [1] chunks
  const int2* rows;     // [rows] sorted row -> {choice (token * k + j), bits of its router weight}
  int* claim;           // [1] items claimed beyond the grid's first
  int* ready;           // [n] strips of hidden finished
  float* halves;        // [n, strips of phase 0, splits, 512 octets] sums of splits; unused without splits
  int* halves_done;     // [n, strips of phase 0] splits finished; zero between launches
  int top_k, hidden_row, part_row, choices;  // F and H in elements, M k
  int most_chunks;      // room in `chunks`
  int stage_bytes, stages_at;       // ring geometry (depends on wk)
};

struct Item {           // what the weight warp tells the others; steps = 0: the end
  int steps, phase, tile, chunk, row0, rows, expert, split;
};

// wgmma builds do without splits and joint claims: their chunks are many, and the registers are wanted elsewhere.
__device__ __forceinline__ int splits_of(const Phase& ph) { return USE_WGMMA ? 1 : ph.splits; }
__device__ __forceinline__ int batch_of(const Phase& ph) { return USE_WGMMA ? 1 : ph.batch; }
__device__ __forceinline__ int split_of(const Item& it) { return USE_WGMMA ? 0 : it.split; }

// Shared memory's head: barriers of the ring, then a queue of items that the weight warp fills ahead of time.
constexpr int kQueue = 8;
__device__ __forceinline__ smem_t at_full(smem_t base, int s) { return base + 8 * s; }
__device__ __forceinline__ smem_t at_empty(smem_t base, int s) { return base + 128 + 8 * s; }
__device__ __forceinline__ smem_t at_told(smem_t base, int q) { return base + 256 + 8 * q; }
__device__ __forceinline__ smem_t at_heard(smem_t base, int q) { return base + 320 + 8 * q; }
__device__ __forceinline__ smem_t at_item(smem_t base, int q) { return base + 384 + 32 * q; }

template <int LENGTH> struct Cursor {  // a position in a ring
  int slot;
  uint32_t phase;
  __device__ __forceinline__ void next() {
    if (++slot == LENGTH) { slot = 0; phase ^= 1; }
  }
};
using Ring = Cursor<STAGES>;
using Queue = Cursor<kQueue>;

// A warp is done with a stage or an item: its lanes have met, one arrives for all.
constexpr int kLaneArrivals = EVERY_LANE_ARRIVES ? 32 : 1;
__device__ __forceinline__ void leave(smem_t barrier, int lane) {
  if (lane < kLaneArrivals) bar_arrive(barrier);
}

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// Waits for the next item and reads it. Once a warp has heard it, its place may be used again.
__device__ __forceinline__ Item read_item(smem_t base, const Queue& at) {
  const uint4 a = lds128(at_item(base, at.slot)), b = lds128(at_item(base, at.slot) + 16);
  return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}
__device__ __forceinline__ void heard(smem_t base, Queue& at, int lane) {
  __syncwarp();
  leave(at_heard(base, at.slot), lane);
  at.next();
}
__device__ __forceinline__ Item hear(smem_t base, Queue& at, int lane) {
  bar_wait(at_told(base, at.slot), at.phase);
  const Item it = read_item(base, at);
  heard(base, at, lane);
  return it;
}
__device__ __forceinline__ void tell(smem_t base, Queue& at, const Item& it, int lane) {
  bar_wait(at_heard(base, at.slot), at.phase);
  if (lane == 0) {
    sts128(at_item(base, at.slot), make_uint4(it.steps, it.phase, it.tile, it.chunk));
    sts128(at_item(base, at.slot) + 16, make_uint4(it.row0, it.rows, it.expert, it.split));
    bar_arrive(at_told(base, at.slot));
  }
  at.next();
}

// ---------------------------------------------------------------- the weight warp
// Which item number i is. Chunks of one expert take turns tile by tile, so that they share the tile's bytes in L2.
struct Plan { int chunks, tiles0, tiles1, items; };
__device__ __forceinline__ Item decode(const Params& p, int i, const Plan& plan, int4 c, int at) {
  Item it{0, 0, 0, 0, 0, 0, 0, 0};
  if (i >= plan.items) return it;
  it.phase = i >= plan.chunks * plan.tiles0;
  const int tiles = it.phase ? plan.tiles1 : plan.tiles0, r = it.phase ? i - plan.chunks * plan.tiles0 : i;
  if (r / tiles != at) c = p.chunks[r / tiles];
  const int first = c.w & 0x3FFFF, count = c.w >> 18, within = r - first * tiles;
  it.tile = within;
  it.chunk = first;
  if (count > 1) {
    it.tile = within / count;
    it.chunk = first + within % count;
    c = p.chunks[it.chunk];
  }
  it.expert = c.x;
  it.row0 = c.y;
  it.rows = c.z;
  const Phase& ph = p.phase[it.phase];
  if (splits_of(ph) > 1) {
    it.split = it.tile % splits_of(ph);
    it.tile /= splits_of(ph);
  }
  it.steps = (ph.groups / splits_of(ph) + ph.wk * GW - 1) / (ph.wk * GW);
  it.tile *= batch_of(ph);
  return it;
}

__device__ __forceinline__ void stream_weights(const Params& p, smem_t base, int lane) {
  Plan plan;
  plan.tiles0 = p.phase[0].strips / p.phase[0].wn / batch_of(p.phase[0]) * splits_of(p.phase[0]);
  plan.tiles1 = p.phase[1].strips / p.phase[1].wn / batch_of(p.phase[1]) * splits_of(p.phase[1]);
  const int guess = blockIdx.x / plan.tiles0;           // read beside the total, not after it
  const int4 c = p.chunks[least(guess, p.most_chunks - 1)];
  plan.chunks = *p.total;
  plan.items = plan.chunks * (plan.tiles0 + plan.tiles1);
  Ring at{0, 1};                                          // the first pass over a ring does not wait
  Queue queue{0, 1};
  Item it = decode(p, blockIdx.x, plan, c, guess < p.most_chunks ? guess : -1);
  tell(base, queue, it, lane);
  int left = batch_of(p.phase[it.phase]), claimed = 0;        // tiles of this claim, this one included
  bool asked = false;
  while (it.steps) {
    // The next claim is made a few stages before this one ends: late enough that no block sits on work while others have
    // none, early enough that its latency hides behind the ring.
    Item next{0, 0, 0, 0, 0, 0, 0, 0};
    const Phase& ph = p.phase[it.phase];
    const int span = ph.wk * GW, strip_stage = span * kUnit;
    const size_t strip_bytes = (size_t)ph.groups * kUnit;
    const int split_groups = ph.groups / splits_of(ph);
    const uint8_t* src = ph.w + ((size_t)it.expert * ph.strips + (size_t)it.tile * ph.wn) * strip_bytes + (size_t)it.split * split_groups * kUnit;
#if MERGED
    if (it.phase) {                                       // long done, except about where the products meet
      wait_count(p.ready + it.chunk, p.phase[0].strips * (4 / FJ));
      fence_async_proxy();
    }
    const int octets = (it.rows + 7) >> 3;
    const size_t octet_bytes = (size_t)ph.groups * 512;
    const uint8_t* tokens = ph.in + (it.row0 >> 3) * octet_bytes + (size_t)it.split * split_groups * 512;
#endif
    for (int k = 0; k < it.steps; ++k) {
      if (!asked && left * it.steps - k <= 4) {
        asked = true;
        if (lane == 0) claimed = atomicAdd(p.claim, 1) + gridDim.x;
      }
      bar_wait(at_empty(base, at.slot), at.phase);
      const smem_t dst = base + p.stages_at + at.slot * p.stage_bytes;
#if MERGED
      const smem_t full = at_full(base, at.slot);
      if (lane == 0) bar_expect(full, ph.wn * strip_stage + octets * GW * 512);
      __syncwarp();
      if (lane < ph.wn) bulk_copy_once(dst + lane * strip_stage, src + lane * strip_bytes + (size_t)k * strip_stage, strip_stage, full);
      else if (lane >= 16 && lane < 16 + octets)
        bulk_copy(dst + kTokensAt + (lane - 16) * GW * 512, tokens + (lane - 16) * octet_bytes + (size_t)k * GW * 512, GW * 512, full);
#else
      copy_blocks<true>(ph.wn, least(span, split_groups - k * span) * kUnit, [&](int s) { return dst + s * strip_stage; },
                        [&](int s) { return src + s * strip_bytes + (size_t)k * span * kUnit; }, at_full(base, at.slot), lane);
#endif
      at.next();
      if (k == it.steps - 1) {
        if (--left) {
          next = it;
          ++next.tile;
        } else {
          next = decode(p, __shfl_sync(0xffffffffu, claimed, 0), plan, c, -1);
          left = batch_of(p.phase[next.phase]);
          asked = false;
        }
        tell(base, queue, next, lane);
      }
    }
    it = next;
  }
}

// ---------------------------------------------------------------- the token warp
// Stage layout of the tokens. Gathered: a row of span * 64 bytes after another, 16 bytes apart so that eight rows start in
// different banks. PACKED: per octet of tokens span * 4 blocks of 8 tokens x 16 bytes, which is also the order in memory.

__device__ __forceinline__ void stream_tokens(const Params& p, smem_t base, int lane) {
  Ring at{0, 1};
  Queue queue{0, 0};
  Item it = hear(base, queue, lane);
  auto first_row = [&](const Item& i) {                   // gathered: this lane's row of x
    const int n = i.row0 + least(lane, i.rows - 1);
    return i.steps == 0 || i.phase || PACKED ? n : p.rows[n].x / p.top_k;
  };
  int row = first_row(it);
  while (it.steps) {
    const Phase& ph = p.phase[it.phase];
    const int span = ph.wk * GW;
    const size_t row_bytes = (size_t)ph.groups * 64;
    const int split_groups = ph.groups / splits_of(ph);
    if (it.phase) {
      wait_count(p.ready + it.chunk, p.phase[0].strips * (4 / FJ));
      fence_async_proxy();                                // hidden was stored by ordinary stores, bulk copies read it
    }
    Item next{0, 0, 0, 0, 0, 0, 0, 0};
    int next_row = 0;
    for (int k = 0; k < it.steps; ++k) {
      bar_wait(at_empty(base, at.slot), at.phase);
      const smem_t dst = base + p.stages_at + at.slot * p.stage_bytes + kTokensAt;
      const int groups = least(span, split_groups - k * span);
#if PACKED
      const uint8_t* src = ph.in + (size_t)(it.row0 >> 3) * 8 * row_bytes + (size_t)(it.split * split_groups + k * span) * 512;
      copy_blocks<false>((it.rows + 7) >> 3, groups * 512, [&](int b) { return dst + b * span * 512; },
                         [&](int b) { return src + b * 8 * row_bytes; }, at_full(base, at.slot), lane);
#else
      const uint8_t* src = ph.in + (size_t)(it.split * split_groups + k * span) * 64;
      const int row_stage = span * 64 + 16;
      copy_blocks<false>(it.rows, groups * 64, [&](int t) { return dst + t * row_stage; },
                         [&](int t) {
#if PRIM_BULK
                           return src + row_bytes * row;
#else
                           const int n = it.row0 + t;
                           return src + row_bytes * (it.phase ? n : p.rows[n].x / p.top_k);
#endif
                         },
                         at_full(base, at.slot), lane);
#endif
      at.next();
      if (k == it.steps - 1) {
        next = hear(base, queue, lane);
        next_row = first_row(next);
      }
    }
    it = next;
    row = next_row;
  }
}

// ---------------------------------------------------------------- the math warps
// What a lane holds of a tile: fragment j (rows 16 j + g, + 8 of its part of a strip), octet b, {row g: tokens 2c, 2c + 1;
// row g + 8: both}.
template <int NB> using Tile = float[FJ][NB][4];
// A warp's place: its strip of the tile, its slice of K, its first fragment of the strip.
struct Place { int strip, slice, fragment, lane; };

#if !USE_WGMMA
// One group of 32 inputs: 64 rows x 8 NB tokens of this warp.
template <int NB>
__device__ __forceinline__ void multiply(Tile<NB>& acc, smem_t unit, smem_t token, int row_stage, int lane, uint32_t shift) {
  const uint4 w0 = lds128(unit + lane * 16), w1 = lds128(unit + 512 + lane * 16), sc = lds128(unit + kUnitScales + (lane >> 2) * 16);
  uint32_t x[NB][4];
#pragma unroll
  for (int b = 0; b < NB; ++b) ldmatrix_x4(x[b], token + (b * 8) * row_stage);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4& w = j < 2 ? w0 : w1;
    uint32_t a0[4], a1[4];
    dequantise(a0, a1, comp(w, (j & 1) * 2), comp(w, (j & 1) * 2 + 1), comp(sc, j) + shift);
#pragma unroll
    for (int b = 0; b < NB; ++b) mma_bf16(acc[j][b], a0, x[b][0], x[b][1]);
#pragma unroll
    for (int b = 0; b < NB; ++b) mma_bf16(acc[j][b], a1, x[b][2], x[b][3]);
  }
}

// Slices of K meet in shared memory and are added in slice order; slice 0 keeps the sum. The two products have mail and
// barriers of their own: where their strips differ, warps of one strip may be in the next phase already.
template <int NB>
__device__ __forceinline__ void add_slices(Tile<NB>& acc, const Params& p, smem_t base, int phase, const Place& me) {
  const int slices = p.phase[phase].wk, id = 1 + me.strip + (phase ? p.phase[0].wn : 0);
  const int first = me.strip * (slices - 1) + (phase ? p.phase[0].wn * (p.phase[0].wk - 1) : 0);
  const smem_t mail = base + kHead + first * (NB_MAX * 2048) + me.lane * 4;
  if (me.slice > 0)
#pragma unroll
    for (int e = 0; e < 16 * NB; ++e) sts_f32(mail + (me.slice - 1) * (NB_MAX * 2048) + e * 128, acc[e / (4 * NB)][e / 4 % NB][e % 4]);
  named_barrier(id, 32 * slices);
  if (me.slice == 0)
    for (int s = 0; s < slices - 1; ++s)
#pragma unroll
      for (int e = 0; e < 16 * NB; ++e) acc[e / (4 * NB)][e / 4 % NB][e % 4] += lds_f32(mail + s * (NB_MAX * 2048) + e * 128);
  named_barrier(id, 32 * slices);
}

// Splits of K meet in global memory: the last of a strip's to finish adds them all, in order, and goes on; false for the others.
template <int NB>
__device__ __forceinline__ bool join_splits(Tile<NB>& acc, const Params& p, const Phase& ph, const Item& it, const Place& me) {
  const int at = it.chunk * ph.strips + it.tile * ph.wn + me.strip;
  float* sums = p.halves + (size_t)at * splits_of(ph) * (NB_MAX * 512) + me.lane * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int b = 0; b < NB; ++b) {
      const float(&v)[4] = acc[j][b];
      *(uint4*)(sums + it.split * (NB_MAX * 512) + (j * NB + b) * 128) =
          make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
  __threadfence();
  __syncwarp();
  int done = 0;
  if (me.lane == 0) {
    done = atomicAdd(p.halves_done + at, 1);
    if (done == splits_of(ph) - 1) p.halves_done[at] = 0;
  }
  if (__shfl_sync(0xffffffffu, done, 0) != splits_of(ph) - 1) return false;
  __threadfence();
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int b = 0; b < NB; ++b)
      for (int n = 0; n < splits_of(ph); ++n) {
        const uint4 v = ldg128_cg(sums + n * (NB_MAX * 512) + (j * NB + b) * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[j][b][i] = (n ? acc[j][b][i] : 0.f) + __uint_as_float(comp(v, i));
      }
  return true;
}

template <int NB>
__device__ __forceinline__ void multiply_item(Tile<NB>& acc, const Params& p, const Phase& ph, int steps, smem_t base, Ring& at, const Place& me) {
  const int span = ph.wk * GW, row_stage = span * 64 + 16;
  const int weights_at = (me.strip * span + me.slice * GW) * kUnit;
  const int tokens_at = kTokensAt + (me.lane & 7) * row_stage + (me.lane >> 3) * 16 + me.slice * GW * 64;
  for (int k = 0; k < steps; ++k) {
    bar_wait(at_full(base, at.slot), at.phase);
    const smem_t stage = base + p.stages_at + at.slot * p.stage_bytes;
    const int mine = least(span, ph.groups / splits_of(ph) - k * span) - me.slice * GW;
    if (mine >= GW) {
#pragma unroll (NB <= 2 ? GW : 2)
      for (int q = 0; q < GW; ++q) multiply<NB>(acc, stage + weights_at + q * kUnit, stage + tokens_at + q * 64, row_stage, me.lane, ph.shift);
    } else {
#pragma unroll 1
      for (int q = 0; q < mine; ++q) multiply<NB>(acc, stage + weights_at + q * kUnit, stage + tokens_at + q * 64, row_stage, me.lane, ph.shift);
    }
    __syncwarp();
    leave(at_empty(base, at.slot), me.lane);
    at.next();
  }
}
#else
// A batch is JB fragments of one group; while it multiplies, the next is dequantised and the codes after it are loaded.
// Four warps of a warpgroup make one wgmma of 64 rows, 16 from each warp's part.
template <int NB>
__device__ __forceinline__ void multiply_item(Tile<NB>& acc, const Params& p, const Phase& ph, int steps, smem_t base, Ring& at, const Place& me) {
  constexpr int BATCHES = GW * FJ / JB;
  const int codes_at = me.strip * GW * kUnit + me.fragment / 2 * 512 + me.lane * 16;
  const int scales_at = me.strip * GW * kUnit + kUnitScales + (me.lane >> 2) * 16 + me.fragment * 4;
  int before = 0;
  uint32_t a[2][JB][2][4];
  for (int k = 0; k < steps; ++k) {
    bar_wait(at_full(base, at.slot), at.phase);
    const smem_t stage = base + p.stages_at + at.slot * p.stage_bytes;
    const uint64_t tokens = wgmma_operand(stage + kTokensAt, 128, GW * 512);
    auto load_scales = [&](int q) {
      if constexpr (FJ == 4) return lds128(stage + scales_at + q * kUnit);
      const uint2 v = lds64(stage + scales_at + q * kUnit);
      return make_uint4(v.x, v.y, 0, 0);
    };
    uint4 codes = lds128(stage + codes_at), scales = load_scales(0), next_codes = codes, next_scales = scales;
#pragma unroll
    for (int t = 0; t < BATCHES; ++t) {
      const int f = t * JB, q = f / FJ, n = f + JB, nq = n / FJ;  // this batch's first fragment and group, the next one's
      const bool last = n % 2 == 0 && t + 1 < BATCHES;    // of its 512 bytes of codes
      uint32_t(&A)[JB][2][4] = a[t & 1];
#pragma unroll
      for (int i = 0; i < JB; ++i) {
        const int j = f % FJ + i;
        dequantise(A[i][0], A[i][1], comp(codes, (j & 1) * 2), comp(codes, (j & 1) * 2 + 1), comp(scales, j) + ph.shift);
      }
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < JB; ++i) wgmma<NB>(acc[f % FJ + i], A[i][s], tokens + ((q * 4 + s * 2) * 128 >> 4));
      wgmma_commit();
      if (last) {
        next_codes = lds128(stage + codes_at + nq * kUnit + n % FJ / 2 * 512);
        if (n % FJ == 0) next_scales = load_scales(nq);
      }
      wgmma_wait<1>();                                    // the batch before this one is done, and with it the stage before
      if (t == 0 && k > 0) leave(at_empty(base, before), me.lane);
      if (last) { codes = next_codes; scales = next_scales; }
    }
    before = at.slot;
    at.next();
  }
  wgmma_wait<0>();
  leave(at_empty(base, before), me.lane);
}
#endif

// This warp's hidden outputs, eight for a fragment, then the chunk's count. The lane's token of octet b, half h: 8 b + 2 c + h.
template <int NB>
__device__ __forceinline__ void store_hidden(Tile<NB>& acc, const Params& p, const Phase& ph, const Item& it, const Place& me) {
  const int g = me.lane >> 2, c = me.lane & 3, octet = (it.tile * ph.wn + me.strip) * 4 + me.fragment;  // of outputs
#pragma unroll
  for (int b = 0; b < NB; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = b * 8 + 2 * c + h;
      if (t < it.rows) {
#if PACKED
        uint16_t* out = (uint16_t*)p.hidden + (size_t)((it.row0 >> 3) + b) * 8 * p.hidden_row + (octet * 8 + 2 * c + h) * 8 + g;
#else
        uint16_t* out = (uint16_t*)p.hidden + (size_t)(it.row0 + t) * p.hidden_row + octet * 8 + g;
#endif
#pragma unroll
        for (int j = 0; j < FJ; ++j) {
          const float gate = acc[j][b][h] * ph.factor, up = acc[j][b][2 + h] * ph.factor;
          out[j * (PACKED ? 64 : 8)] = (uint16_t)pack_bf16(divide_fast(gate, 1.f + exp_fast(-gate)) * up, 0.f);
        }
      }
    }
  fence_async_proxy();
  __syncwarp();
  if (me.lane == 0) {
    __threadfence();
    add_release(p.ready + it.chunk, 1);
  }
}

// Where a lane's tokens go and what they weigh.
template <int NB> struct Places { int choice[NB][2]; float weight[NB][2]; };
__device__ __forceinline__ void fetch_place(const Params& p, const Item& it, int token, int& choice, float& weight) {
  const int n = it.row0 + least(token, it.rows - 1);
  const int2 row = p.rows[n];
  choice = row.x;
  weight = __uint_as_float((uint32_t)row.y);
}

// Router weight * sums of this warp's rows, to the choice's place. EARLY: places were fetched before the sums.
template <int NB, bool EARLY>
__device__ __forceinline__ void store_part(Tile<NB>& acc, const Params& p, const Phase& ph, const Item& it, const Place& me, Places<EARLY ? NB : 1>& to) {
  const int g = me.lane >> 2, c = me.lane & 3, first = (it.tile * ph.wn + me.strip) * 64 + me.fragment * 16 + g;
#pragma unroll
  for (int b = 0; b < NB; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (b * 8 + 2 * c + h < it.rows) {
        int& choice = to.choice[EARLY ? b : 0][h];
        float& weight = to.weight[EARLY ? b : 0][h];
        if (!EARLY) fetch_place(p, it, b * 8 + 2 * c + h, choice, weight);
        const float factor = weight * ph.factor;
        const size_t o = ((size_t)split_of(it) * p.choices + choice) * p.part_row + first;
#pragma unroll
        for (int j = 0; j < FJ; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float v = acc[j][b][2 * half + h] * factor;
#if PART_F32
            ((float*)p.part)[o + 16 * j + 8 * half] = v;
#else
            ((uint16_t*)p.part)[o + 16 * j + 8 * half] = (uint16_t)pack_bf16(v, 0.f);
#endif
          }
      }
}

// Warps are spread over four register files of 512 lanes' registers each, so the limit follows from warps a file, not from
// threads a block; __launch_bounds__ rounds a wgmma kernel's threads up to whole warpgroups and would give away registers.
constexpr int kWarpsAFile = (CTAS * (CW + (MERGED ? 1 : 2)) + 3) / 4;
constexpr int kRegisters = 512 / kWarpsAFile / 8 * 8 > 248 ? 248 : 512 / kWarpsAFile / 8 * 8;
// WIDE: one block of two math warpgroups and a copying one that hands its registers over (168 -> 40, 232 for the math).
#if WIDE && !defined(KCPU)
static_assert(CW == 8 && CTAS == 1, "");
constexpr int kCopyWarps = 4;
#define BOUNDS __launch_bounds__(384, 1)
#else
constexpr int kCopyWarps = MERGED ? 1 : 2;
#define BOUNDS __maxnreg__(kRegisters)
#endif

// The item is read again for the epilogue: its eight registers are worth more to the sums.
template <int NB>
__device__ __forceinline__ void run_item(const Params& p, int steps, int phase, smem_t base, Ring& at, Queue& queue, int warp, int lane) {
  const Phase& ph = p.phase[phase];
  const int part = warp * FJ / 4;
  const Place me{part % ph.wn, part / ph.wn, warp * FJ % 4, lane};
  constexpr bool kEarly = NB == 1 || (NB == 2 && kRegisters >= 120);
  Places<kEarly ? NB : 1> to;
  if (kEarly && phase) {
    const Item it = read_item(base, queue);
#pragma unroll
    for (int b = 0; b < (kEarly ? NB : 1); ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) fetch_place(p, it, b * 8 + 2 * (lane & 3) + h, to.choice[b][h], to.weight[b][h]);
  }
  Tile<NB> acc;
#pragma unroll
  for (int j = 0; j < FJ; ++j)
#pragma unroll
    for (int e = 0; e < 4 * NB; ++e) acc[j][e / 4][e % 4] = 0.f;
  multiply_item<NB>(acc, p, ph, steps, base, at, me);
#if !USE_WGMMA
  if (ph.wk > 1) add_slices<NB>(acc, p, base, phase, me);
#endif
  const Item it = read_item(base, queue);
  heard(base, queue, lane);
  if (me.slice) return;
#if !USE_WGMMA
  if (phase == 0 && splits_of(ph) > 1 && !join_splits<NB>(acc, p, ph, it, me)) return;
#endif
  if (phase) store_part<NB, kEarly>(acc, p, ph, it, me, to);
  else store_hidden<NB>(acc, p, ph, it, me);
}

// The smallest built tile that holds `octets`; larger chunks share a tile of NB_MAX.
template <int NB>
__device__ __forceinline__ void run_least(const Params& p, int steps, int phase, smem_t base, Ring& at, Queue& queue, int warp, int lane, int octets) {
  constexpr int NEXT = NB < 4 ? NB + 1 : NB + 2 > NB_MAX ? NB_MAX : NB + 2;
  if constexpr (NB >= NB_MAX) {
    run_item<NB_MAX>(p, steps, phase, base, at, queue, warp, lane);
  } else {
    if (octets <= NB) run_item<NB>(p, steps, phase, base, at, queue, warp, lane);
    else run_least<NEXT>(p, steps, phase, base, at, queue, warp, lane, octets);
  }
}

__device__ __forceinline__ int agreed(int v) {            // tells the compiler that the warp agrees on v
#ifdef KCPU
  return v;
#else
  return __shfl_sync(0xffffffffu, v, 0);
#endif
}

__device__ __forceinline__ void multiply_all(const Params& p, smem_t base, int warp, int lane) {
  Ring at{0, 0};
  Queue queue{0, 0};
  while (true) {
    bar_wait(at_told(base, queue.slot), queue.phase);
    const Item it = read_item(base, queue);
    const int steps = agreed(it.steps), phase = agreed(it.phase), octets = agreed(it.rows + 7) >> 3;
    if (steps == 0) return;
    run_least<NB_MIN>(p, steps, phase, base, at, queue, warp, lane, octets);
  }
}

[[maybe_unused]] constexpr int kThreads = 32 * (CW + kCopyWarps);

extern "C" __global__ void BOUNDS moe_w4(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(raw);
  const smem_t base = smem(raw);
#ifdef KCPU
  const int warp = threadIdx.x / 32;
#else
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
#endif
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(at_full(base, s), MERGED ? 1 : 2 * copies_arrivals);
      bar_init(at_empty(base, s), CW * kLaneArrivals);
    }
    for (int q = 0; q < kQueue; ++q) {
      bar_init(at_told(base, q), 1);
      bar_init(at_heard(base, q), (CW + (MERGED ? 0 : 1)) * kLaneArrivals);
    }
    bar_init_fence();
  }
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  if (warp >= CW) {
    fewer_registers<WIDE>();
    if (MERGED || warp == CW) stream_weights(p, base, lane);
    else if (warp == CW + 1) stream_tokens(p, base, lane);
  } else {
    more_registers<WIDE>();
    multiply_all(p, base, warp, lane);
  }
}

// out[m] = bf16(base[m] + the k parts of token m (and their splits), in order). One block a row and 1024 columns; dead rows (expert < 0) stay.
// H a multiple of 8.
extern "C" __global__ void __launch_bounds__(128) moe_combine(const void* part, const int* expert, const uint8_t* base, uint8_t* out, int top_k, int splits, int H) {
  pdl_trigger();
  pdl_wait();
  const int m = blockIdx.y, column = (blockIdx.x * 128 + threadIdx.x) * 8;
  if (column >= H || expert[(size_t)m * top_k] < 0) return;
  const size_t at = (size_t)m * H + column;
  float sum[8];
  const uint4 seed = base ? *(const uint4*)(base + at * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.f;
#pragma unroll 8
  for (int n = 0; n < top_k * splits; ++n) {
    const int j = n / splits, split = n % splits;
    const size_t o = (((size_t)split * gridDim.y + m) * top_k + j) * H + column;
#if PART_F32
    const uint4 lo = ldg128_cg((const float*)part + o), hi = ldg128_cg((const float*)part + o + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) { sum[i] += __uint_as_float(comp(lo, i)); sum[4 + i] += __uint_as_float(comp(hi, i)); }
#else
    const uint4 v = ldg128_cg((const uint16_t*)part + o);
#pragma unroll
    for (int i = 0; i < 4; ++i) { sum[2 * i] += __uint_as_float(comp(v, i) << 16); sum[2 * i + 1] += __uint_as_float(comp(v, i) & 0xffff0000u); }
#endif
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) { sum[2 * i] += __uint_as_float(comp(seed, i) << 16); sum[2 * i + 1] += __uint_as_float(comp(seed, i) & 0xffff0000u); }
  *(uint4*)(out + at * 2) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
}

// Rows of x in the order of the work list, in octets as PACKED tokens lie: [octet][K / 8][8 tokens][16 bytes]. Grid
// (slices of K, most octets); rows that hold no choice are left as they are.
extern "C" __global__ void __launch_bounds__(128) moe_pack(const uint8_t* x, const int2* rows, const int* octets, uint8_t* packed, int top_k, int K) {
  pdl_trigger();
  pdl_wait();
  const int octet = blockIdx.y, piece = blockIdx.x * 16 + threadIdx.x / 8, token = threadIdx.x % 8;
  if (octet >= *octets) return;
  const int n = rows[octet * 8 + token].x;
  if (n < 0) return;
  const uint8_t* row = x + (size_t)(n / top_k) * K * 2;
  uint8_t* out = packed + (size_t)octet * 8 * K * 2 + token * 16;
#pragma unroll 8
  for (int c = piece; c < K / 8; c += gridDim.x * 16) *(uint4*)(out + (size_t)c * 128) = *(const uint4*)(row + (size_t)c * 16);
}
