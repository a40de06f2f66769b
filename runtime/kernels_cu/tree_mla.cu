// Absorbed attention of decode steps, chains and draft trees over a paged latent cache, split over keys, in one launch.
//
//   out[i, a] = sum_p w[p] cache[p, :512],  w = softmax over the visible p of scale * q[i, a] . cache[p, :576]
//
// Row i of a sequence sees its ctx committed positions and, of the step's own nodes (node j lies at position ctx + j), those
// that its ancestor bits name; CAUSAL builds take "j <= its own index" instead and read no bits. A node sees none after itself.
//
// Operands are swapped: keys are the product's rows, queries its columns, so 8 heads x 9 nodes cost 72 columns, not 128 rows.
//
//   S^T[64 x N]  = K[64 x 576] Q^T        N = 8 OCTETS columns: consecutive (node, head) pairs of one sequence
//   P^T          = exp2(S^T - max)        the maximum moves only when a score passes it by 2^8
//   O^T[512 x N] += V^T[512 x 64] P^T     V is the same tile, its first 512 columns, read transposed
//
//   warps 0-3, 4-7   256 of O's 512 rows each; tiles' S and softmax alternate between the two groups
//   warps 8..        fill the ring: boxes of 64 keys x 64 columns, rope first (it is the first to be free again)
//   the last warps   add up P's rows: sums of the very numbers that are multiplied, and 2 OCTETS registers less elsewhere
//
// tree_mla_plan, once a step for all layers, cuts sequences into column tiles and key ranges of equal length and lists the
// items; tree_mla's blocks (as many as are resident) walk them. A tile of one item writes its output; otherwise its items leave
// float32 partials, wait for one another and each adds up its share of the output, in the order of the keys.
//
// Bits. A range starts at a multiple of `chunk` tiles. With `chunk` given (not 0: chosen by the step's load), a column's
// numbers depend on its own keys alone: the same alone, in company, in any bucket and as the row of a chain.
//
// Kimi K2.6: 1,152 B and 2,176 flops a key and column; 4.54 TB/s and 751 TFLOP/s bind equally at 87 columns.
// Whatever is masked may hold NaN: scores are replaced, and values of the step's own positions are scrubbed before the product.
// Sources: MLA arXiv 2405.04434, online softmax arXiv 2205.14135, tree mask arXiv 2604.12989, PTX ISA.
#ifndef OCTETS
#error "build with -DHEADS= -DOCTETS= -DSLOTS= -DPRODUCERS= -DCAUSAL= -DAHEAD= -DUSE_WGMMA= -DPART_F32="
#endif
#define COLUMNS (8 * OCTETS)
#include "prim/mla_ring.cuh"  // and what it includes: NVRTC takes prim/x and x for two files

static_assert(HEADS >= 1 && HEADS <= 128, "heads on this rank");
static_assert(OCTETS >= 1 && OCTETS <= 9, "columns in eights");
static_assert(AHEAD >= 0 && AHEAD <= 9, "boxes whose scores are taken before the values of the tile before");
static_assert(SLOTS >= 9 && SLOTS >= 8 + AHEAD && SLOTS <= 27, "a tile is 9 boxes; AHEAD of them lie beside the values of the tile before");
static_assert(PRODUCERS == 1 || PRODUCERS == 2 || PRODUCERS == 4, "warps that fill the ring");
static_assert(!USE_WGMMA || PRODUCERS == 1, "one thread asks for copies of boxes");

constexpr int kWaited = 3;  // boxes waited for before the first is multiplied: no branch in between, 14 clocks a product and 80 a box
constexpr int kOctets = OCTETS, kAdders = (kN + 31) / 32;  // warps
constexpr int kThreads = USE_WGMMA ? 384 : 256 + 32 * (PRODUCERS + kAdders), kHearers = 256 + 32 * kAdders;
constexpr bool kDealt = USE_WGMMA && !MERGE_LATER;  // registers anew: products have more than the copier
constexpr int kMax = (kMoved + 8 + 15) / 16 * 16;
static_assert(kMax + 8 * kN <= 1024, "the tail of shared memory");

// ---------------------------------------------------------------- the ring's writers
#if !USE_WGMMA
__device__ __forceinline__ void fill_ring(const Params& p, smem_t base, int count) {
  constexpr int kLanes = 32 * PRODUCERS, kRows = 512 / kLanes;
  const smem_t tail = base + kTailAt;
  const int lane = threadIdx.x - 256, piece = lane & 7, row = lane >> 3;
  Cursor at{0, 1};
  uint32_t q_phase = 1;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Item it = p.items[i];
    if (!it.tiles) continue;
    bar_wait(tail + kQFree, q_phase);
    q_phase ^= 1;
    for (int j = 0; j < it.tiles; ++j) {
      const uint8_t* from[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        from[k] = p.cache + (size_t)slot_of(p, it.seq, (it.tile0 + j) * kTile + row + k * (kLanes / 8)) * (2 * kWidth) + piece * 16;
#pragma unroll 1
      for (int x = 0; x < kBoxes; ++x) {
        const smem_t full = tail + kFull + 8 * at.slot, box = base + at.slot * kBox;
        const int column = (x ? (x - 1) * 64 : kValue) * 2;
        bar_wait(tail + kEmpty + 8 * at.slot, at.phase);
#pragma unroll
        for (int k = 0; k < kRows; ++k) cp_async16(box + in_box(row + k * (kLanes / 8), piece), from[k] + column);
        if (!j)
          for (int r = row; r < kN; r += kLanes / 8)
            cp_async16(base + kQAt + x * kQBox + in_box(r, piece), p.q + (size_t)least(it.first + r, p.last_column) * (2 * kWidth) + column + piece * 16);
        cp_async_arrive(full);
        at = at.plus(1);
      }
    }
  }
}
#endif

// ---------------------------------------------------------------- the products
// s = the tile's keys (16 of them a warp) times the queries, boxes FROM to TO of that order.
template <int FROM, int TO>
__device__ __forceinline__ void score(float (&s)[kOctets][4], smem_t base, const Cursor& at, int w, int lane) {
  const smem_t full = base + kTailAt + kFull, q = base + kQAt;
#if USE_WGMMA
  const uint64_t a = box_operand(base, 16, 1024), b = box_operand(q, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int i = FROM; i < TO; ++i) {
    if ((i - FROM) % kWaited == 0)
#pragma unroll
      for (int n = i; n < i + kWaited && n < TO; ++n) {
        const Cursor c = at.plus(n);
        bar_wait(full + 8 * c.slot, c.phase);
      }
    const int slot = at.plus(i).slot;
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_boxes<kOctets, 0>(s, operand_plus(a, slot * kBox + 32 * k), operand_plus(b, i * kQBox + 32 * k), (i | k) != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
#else
  if constexpr (!FROM)
#pragma unroll
    for (int b = 0; b < kOctets; ++b) s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
  const int key = w * 16 + (lane & 15);
#pragma unroll 1
  for (int x = FROM; x < TO; ++x) {
    const Cursor c = at.plus(x);
    bar_wait(full + 8 * c.slot, c.phase);
    const smem_t box = base + c.slot * kBox;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a0[4], a1[4];
      ldmatrix_x4(a0, box + in_box(key, 4 * half + (lane >> 4)));
      ldmatrix_x4(a1, box + in_box(key, 4 * half + 2 + (lane >> 4)));
#pragma unroll
      for (int b = 0; b < kOctets; ++b) {
        uint32_t k[4];
        ldmatrix_x4(k, q + x * kQBox + in_box(8 * b + (lane & 7), 4 * half + (lane >> 3)));
        mma_bf16(s[b], a0, k[0], k[1]);
        mma_bf16(s[b], a1, k[2], k[3]);
      }
    }
  }
#endif
}

// o += the tile's values (this group's four boxes, 16 rows of O of each a warp) times the weights in P. Boxes are given back one by
// one: where products bind, the ring holds two tiles and nothing more, and the next tile's copies start that much earlier.
__device__ __forceinline__ void mix(float (&o)[4][kOctets][4], smem_t base, const Cursor& at, int group, int w, int lane) {
  const smem_t weights = base + kPAt;
#if USE_WGMMA
  wgmma_fence();
  const uint64_t a = box_operand(base, kBox, 1024), b = box_operand(weights, 16, 1024);  // its boxes have been waited for
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int slot = at.plus(1 + group * 4 + k).slot;
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) wgmma_boxes<kOctets, 1>(o[k], operand_plus(a, slot * kBox + 2048 * kk), operand_plus(b, 32 * kk), 1);
    wgmma_commit();
  }
  auto give_back = [&](int k) {
    warp_arrive(base + kTailAt + kEmpty + 8 * at.plus(1 + group * 4 + k).slot, lane);
  };
  wgmma_wait<3>();
  give_back(0);
  wgmma_wait<2>();
  give_back(1);
  wgmma_wait<1>();
  give_back(2);
  wgmma_wait<0>();
  give_back(3);
#else
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {                       // 32 of the 64 keys
    uint32_t a[4][2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Cursor c = at.plus(1 + group * 4 + k);
      if (!half) bar_wait(base + kTailAt + kFull + 8 * c.slot, c.phase);
#pragma unroll
      for (int kk = 0; kk < 2; ++kk)
        ldmatrix_x4_trans(a[k][kk], base + c.slot * kBox + in_box(32 * half + 16 * kk + (lane & 7) + (lane >> 4) * 8, 2 * w + (lane >> 3 & 1)));
    }
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      uint32_t p[4];
      ldmatrix_x4(p, weights + in_box(8 * b + (lane & 7), 4 * half + (lane >> 3)));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        mma_bf16(o[k][b], a[k][0], p[0], p[1]);
        mma_bf16(o[k][b], a[k][1], p[2], p[3]);
      }
    }
  }
  __syncwarp();
  if (EVERY_LANE_ARRIVES)
    for (int k = 0; k < 4; ++k) bar_arrive(base + kTailAt + kEmpty + 8 * at.plus(1 + group * 4 + k).slot);
  else if (lane < 4) bar_arrive(base + kTailAt + kEmpty + 8 * at.plus(1 + group * 4 + lane).slot);
#endif
}

// P[column][key] from this warp's 16 keys of column block b.
__device__ __forceinline__ void put_weights(smem_t weights, int b, int w, int lane, uint32_t upper, uint32_t lower) {
#if USE_WGMMA
  stmatrix_x2_trans(weights + b * 1024 + in_box(lane & 7, 2 * w + (lane >> 3 & 1)), upper, lower);
#else
  const smem_t row = weights + b * 1024 + 4 * (lane & 3);
  sts32(row + in_box(lane >> 2, 2 * w), transpose8(upper));
  sts32(row + in_box(lane >> 2, 2 * w + 1), transpose8(lower));
#endif
}

// Rows d, d + 8 and columns c, c + 1 of O^T to bf16: lanes of neighbouring rows swap, so that each stores two rows of one column.
__device__ __forceinline__ void put_output(const Params& p, int first, int columns, int b, int d, float4 v, int lane) {
  const bool odd = lane >> 2 & 1;
  const float x = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 4), z = __shfl_xor_sync(0xffffffffu, odd ? v.z : v.w, 4);
  const int c = 8 * b + 2 * (lane & 3) + odd;
  if (c >= columns) return;
  uint32_t* row = reinterpret_cast<uint32_t*>(p.out + ((size_t)(first + c) * kValue + (d & ~1)) * 2);
  row[0] = odd ? pack_bf16(x, v.y) : pack_bf16(v.x, x);
  row[4] = odd ? pack_bf16(z, v.w) : pack_bf16(v.z, z);
}

// ---------------------------------------------------------------- adding partials up
__device__ __forceinline__ Partial pack_partial(const float (&v)[4]) {
#if PART_F32
  return float4{v[0], v[1], v[2], v[3]};
#else
  return uint2{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
#endif
}
// Column block b, box k, warp: unit b * 32 + k * 8 + warp.
__device__ __forceinline__ void put_unit(const Params& p, const Item& it, int u, const float4& sum, int lane) {
  const int wide = u % 8, d = (wide >> 2) * 256 + (u / 8 % 4) * 64 + (wide & 3) * 16 + (lane >> 2);
  put_output(p, it.first, it.columns, u / 32, d, sum, lane);
}
__device__ __forceinline__ void combine(const Params& p, const Item& it, smem_t base, int warp, int lane) {
  auto add = [&](float4& sum, const float4& v, smem_t weight) {
    const float x = lds_f32(weight + (lane & 3) * 16), y = lds_f32(weight + (lane & 3) * 16 + 8);
    sum.x = fmaf(x, v.x, sum.x);
    sum.y = fmaf(y, v.y, sum.y);
    sum.z = fmaf(x, v.z, sum.z);
    sum.w = fmaf(y, v.w, sum.w);
  };
  auto put = [&](int u, const float4& sum) { put_unit(p, it, u, sum, lane); };
  combine_splits(p, it, base, warp, lane, 8, [](int u) { return u / 32 * 8; }, add, put);
}

// ---------------------------------------------------------------- softmax and the walk over items
struct Walker {
  const Params& p;
  smem_t base;
  int group, w, g, q, lane;
  uint32_t tile;               // tiles walked, over all items: phases of `ready` and `taken`
  int which;                   // copy of the maxima that holds
  float scale;                 // held: the first look at it waited behind the first copies, 2 us
  float o[4][kOctets][4], s[kOctets][4];

  __device__ __forceinline__ smem_t tail(int at) const { return base + kTailAt + at; }
  __device__ __forceinline__ smem_t maximum(int copy, int column) const { return tail(kMax) + (copy * kN + column) * 4; }

  // Hides the step's own positions from whoever does not descend from them. j0: node of the tile's first key.
  __device__ __forceinline__ void mask(const Item& it, int j0) {
    const int upper = j0 + w * 16 + g, lower = upper + 8, packed = it.packed, last = it.columns - 1;
    const int row0 = it.first / kHeads - packed / kHeads;
#pragma unroll
    for (int b = 0; b < kOctets; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = kHeads % 8 == 0 ? 8 * b : 8 * b + 2 * q + (kHeads % 2 ? e : 0);  // columns of one node, one look
        const int node = (packed + least(c, last)) / kHeads;
        if (!sees(row0 + node, node, upper)) s[b][e] = hidden();
        if (!sees(row0 + node, node, lower)) s[b][2 + e] = hidden();
      }
  }
  __device__ __forceinline__ bool sees(int row, int node, int j) const {
    if (j < 0) return true;                                // committed
#if CAUSAL
    return j <= node;
#else
    return j <= node && (p.ancestors[(size_t)row * (2 * p.words) + (j >> 5)] >> (j & 31) & 1);
#endif
  }

  // Moves the maxima of columns whose scores passed them; scratch is P.
  __device__ __forceinline__ void move_maxima() {
    const smem_t scratch = base + kPAt;
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      float x = fmaxf(s[b][0], s[b][2]), y = fmaxf(s[b][1], s[b][3]);
#pragma unroll
      for (int d = 4; d <= 16; d *= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
        y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, d));
      }
      if (g == 0) sts_f32x2(scratch + (w * kN + 8 * b + 2 * q) * 4, x, y);
    }
    named_barrier(1 + group, 128);
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      const int c = 8 * b + 2 * q;
      const float2 old = lds_f32x2(maximum(which, c));
      float x = hidden(), y = hidden();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 r = lds_f32x2(scratch + (k * kN + c) * 4);
        x = fmaxf(x, r.x);
        y = fmaxf(y, r.y);
      }
      x *= scale;
      y *= scale;
      x = x > old.x + kSlack ? x : old.x;
      y = y > old.y + kSlack ? y : old.y;
      if (w == 0 && g == 0) sts_f32x2(maximum(which ^ 1, c), x, y);
    }
    named_barrier(1 + group, 128);
    which ^= 1;
  }

  // This tile's scores to weights in P; tells everybody.
  __device__ __forceinline__ void soften() {
    // A load behind the last octet's store is 100 clocks each, so maxima are held where there are registers for them.
    float2 held[kOctets];
    auto load = [&](int b) { return lds_f32x2(maximum(which, 8 * b + 2 * q)); };
    auto high = [&](int b) { return USE_WGMMA ? held[b] : load(b); };
    float most = hidden();                                 // of what a score exceeds its maximum by
#pragma unroll
    for (int b = 0; b < kOctets; ++b) held[b] = load(b);
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      most = fmaxf(most, fmaf(fmaxf(s[b][0], s[b][2]), scale, -held[b].x));
      most = fmaxf(most, fmaf(fmaxf(s[b][1], s[b][3]), scale, -held[b].y));
    }
    const bool moved = named_any(1 + group, 128, most > kSlack);
    if (tile) bar_wait(tail(kTaken), (tile - 1) & 1);      // everybody has read the last tile's P
    if (moved) {
      move_maxima();
#pragma unroll
      for (int b = 0; b < kOctets; ++b) held[b] = load(b);
    }
    if (w == 0 && lane == 0) sts32(tail(kMoved) + 4 * (tile & 1), moved);
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      const float2 m = high(b);
      const float p0 = exp2_fast(fmaf(s[b][0], scale, -m.x)), p1 = exp2_fast(fmaf(s[b][1], scale, -m.y));
      const float p2 = exp2_fast(fmaf(s[b][2], scale, -m.x)), p3 = exp2_fast(fmaf(s[b][3], scale, -m.y));
      put_weights(base + kPAt, b, w, lane, pack_bf16(p0, p1), pack_bf16(p2, p3));
    }
    fence_async_shared();
    __syncwarp();
    warp_arrive(tail(kReady), lane);
  }

  // If the maxima moved, what was summed under the old ones shrinks.
  __device__ __forceinline__ void follow_maxima(bool owner, bool first) {
    if (!(int)lds_u32(tail(kMoved) + 4 * (tile & 1))) return;
    if (!owner) which ^= 1;
    if (first) return;                                     // nothing is summed yet
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      const float2 old = lds_f32x2(maximum(which ^ 1, 8 * b + 2 * q)), now = lds_f32x2(maximum(which, 8 * b + 2 * q));
      const float x = exp2_fast(old.x - now.x), y = exp2_fast(old.y - now.y);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        o[k][b][0] *= x;
        o[k][b][1] *= y;
        o[k][b][2] *= x;
        o[k][b][3] *= y;
      }
    }
  }

  __device__ __forceinline__ void begin_item() {
    which = 0;
#pragma unroll
    for (int b = 0; b < kOctets; ++b)
#pragma unroll
      for (int k = 0; k < 4; ++k) o[k][b][0] = o[k][b][1] = o[k][b][2] = o[k][b][3] = 0.f;
  }

  // The next tile's scores; after a group's last ones of the item it needs the queries no more.
  template <int FROM, int TO> __device__ __forceinline__ void score_tile(const Cursor& at, bool last) {
    score<FROM, TO>(s, base, at, w, lane);
    __syncwarp();
    if (TO == kBoxes && last) warp_arrive(tail(kQFree), lane);
  }

  __device__ __forceinline__ Cursor walk(const Item& it, Cursor at) {
    const int tiles = it.tiles;
    int own = it.ctx - it.tile0 * kTile;                   // from this key of the tile on they are the step's own
    const bool notes = w == 0 && lane == 0;
    stamp(3, notes && group == 0);
    if (group == 0) score_tile<0, kBoxes>(at, tiles <= 2);
    else if (tiles == 1) warp_arrive(tail(kQFree), lane);
    else wait_queries(base, at);
    stamp(4, notes && group == 0);
#pragma unroll 1
    for (int j = 0; j < tiles; ++j, own -= kTile) {
      const bool owner = (j & 1) == group, next = !owner && j + 1 < tiles;
      const Cursor then = at.plus(kBoxes);
      const int detail = 16 + 8 * group + 4 * (j - STAMPS);  // of two tiles: begin; softened, or the next scored; weights there; mixed in
      const bool detailed = notes && (unsigned)(j - STAMPS) < 2;
      stamp(detail, detailed);
      if (owner) {
        warp_arrive(tail(kEmpty) + 8 * at.slot, lane);     // the rope box
        if (own < kTile) mask(it, -own);
        soften();
      } else if (AHEAD && next) {
        score_tile<0, AHEAD>(then, j + 3 >= tiles);
      }
      stamp(detail + 1, detailed);
#if USE_WGMMA
#pragma unroll
      for (int k = 0; k < 4; ++k) {                        // before the weights are there
        const Cursor c = at.plus(1 + group * 4 + k);
        bar_wait(tail(kFull) + 8 * c.slot, c.phase);
      }
#endif
      bar_wait(tail(kReady), tile & 1);
      stamp(detail + 2, detailed);
      follow_maxima(owner, !j);
      if (own < kTile) scrub(base, at, group, own);
      mix(o, base, at, group, w, lane);
      stamp(detail + 3, detailed);
      __syncwarp();
      warp_arrive(tail(kTaken), lane);
      if constexpr (AHEAD < kBoxes)
        if (next) score_tile<AHEAD, kBoxes>(then, j + 3 >= tiles);
      at = then;
      ++tile;
    }
    return at;
  }

  // The output or a partial, while the adders see to sums and maxima.
  __device__ __forceinline__ void finish(const Item& it, int warp) {
    stamp(5, threadIdx.x == 0);
    named_barrier(3, kHearers);                            // the last P is read
    const bool split = it.splits > 1;
    if (split) {
      Partial* to = reinterpret_cast<Partial*>(p.part) + ((size_t)it.slot + (size_t)it.split * it.stride) * (32 * kOctets) * 32 + lane;
#pragma unroll
      for (int b = 0; b < kOctets; ++b)
#pragma unroll
        for (int k = 0; k < 4; ++k) to[(b * 32 + k * 8 + warp) * 32] = pack_partial(o[k][b]);
    }
    named_barrier(3, kHearers);                            // sums are there, maxima are fresh
    stamp(6, threadIdx.x == 0);
    if (split) {
      if (!MERGE_LATER && threadIdx.x == 0) add_release(p.arrived + it.counter, 1);  // for all: the barrier is behind their stores
      stamp(7, threadIdx.x == 0);
      return;
    }
    const int first = it.first, columns = it.columns;
#pragma unroll
    for (int b = 0; b < kOctets; ++b) {
      const float2 f = lds_f32x2(base + kPAt + (8 * b + 2 * q) * 4);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        put_output(p, first, columns, b, group * 256 + k * 64 + w * 16 + g, float4{o[k][b][0] * f.x, o[k][b][1] * f.y, o[k][b][2] * f.x, o[k][b][3] * f.y}, lane);
    }
    named_barrier(4, 256);                                 // P is the next item's from here on
  }
};

// One thread a column: the sum of its weights, tile by tile.
__device__ __forceinline__ void add_weights(const Params& p, smem_t base, int count) {
  const int c = (int)threadIdx.x - (kThreads - 32 * kAdders), lane = threadIdx.x & 31;
  const smem_t tail = base + kTailAt, row0 = base + (c >> 3) * 1024;
  uint32_t tile = 0;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const int tiles = p.items[i].tiles;
    if (!tiles) continue;
    int which = 0;
    float sum = 0.f;
    for (int j = 0; j < tiles; ++j, ++tile) {
      bar_wait(tail + kReady, tile & 1);
      const smem_t row = row0 + kPAt;
      const bool moved = lds_u32(tail + kMoved + 4 * (tile & 1));
      which ^= moved;
      if (c < kN) {
        if (moved) sum *= exp2_fast(lds_f32(tail + kMax + ((which ^ 1) * kN + c) * 4) - lds_f32(tail + kMax + (which * kN + c) * 4));
#pragma unroll 2
        for (int piece = 0; piece < 8; ++piece) {
          const uint4 v = lds128(row + in_box(c & 7, piece));
          sum += ((low_half(v.x) + high_half(v.x)) + (low_half(v.y) + high_half(v.y))) + ((low_half(v.z) + high_half(v.z)) + (low_half(v.w) + high_half(v.w)));
        }
      }
      __syncwarp();
      warp_arrive(tail + kTaken, lane);
    }
    named_barrier(3, kHearers);
    if (c < kN) {
      const Item& it = p.items[i];
      const float high = lds_f32(tail + kMax + (which * kN + c) * 4);
      if (it.splits > 1) reinterpret_cast<float2*>(p.stats)[((size_t)it.slot + (size_t)it.split * it.stride) * kN + c] = pair(high, sum);
      sts_f32(base + kPAt + c * 4, 1.f / sum);
      sts_f32(tail + kMax + c * 4, kNever);
    }
    named_barrier(3, kHearers);
  }
}

#if USE_WGMMA
extern "C" __global__ void __launch_bounds__(kThreads, 1)
tree_mla(const __grid_constant__ Params p, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries) {
#else
extern "C" __global__ void __launch_bounds__(kThreads, 1) tree_mla(const __grid_constant__ Params p) {
#endif
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
      bar_init(tail + kFull + 8 * i, 32 * PRODUCERS * !USE_WGMMA + USE_WGMMA);
      bar_init(tail + kEmpty + 8 * i, 4 * kLaneArrivals);
    }
    bar_init(tail + kReady, 4 * kLaneArrivals);
    bar_init(tail + kTaken, (8 + kAdders) * kLaneArrivals);
    bar_init(tail + kQFree, 8 * kLaneArrivals);
    bar_init_fence();
  }
#if USE_WGMMA
  if (threadIdx.x == 256) {
    prefetch_map(keys);
    prefetch_map(queries);
  }
#endif
  if (threadIdx.x < kN) sts_f32(tail + kMax + threadIdx.x * 4, kNever);
  const float scale = held(p.scale_log2);
  __syncthreads();
#if EARLY_KEYS
  if (warp != 8) {                                         // the copier waits itself, behind its first keys
    pdl_wait();
    pdl_trigger();
  }
  stamp(1, threadIdx.x == 0);
#else
  pdl_wait();
  pdl_trigger();
  stamp(1, threadIdx.x == 0);
  const int count = *p.count;
#endif
  if (warp >= 8) {
    fewer_registers<kDealt>();
#if EARLY_KEYS
    if (warp == 8) fill_ring(p, keys, queries, base, count, start);
#elif USE_WGMMA
    if (warp == 8) fill_ring(p, keys, queries, base, count, find_start(p, count, lane));
#else
    if (warp < 8 + PRODUCERS) fill_ring(p, base, count);
#endif
    if (warp >= kThreads / 32 - kAdders) add_weights(p, base, count);
    return;
  }
  more_registers<kDealt>();
  {
    Walker walker{p, base, warp >> 2, warp & 3, lane >> 2, lane & 3, lane, 0, 0, scale};
    Cursor at{0, 0};
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const Item& it = p.items[i];                         // read again where it is needed: registers are scarce
      if (!it.tiles) continue;
      fetch_words(p, it, lane);
      walker.begin_item();
      at = walker.walk(it, at);
      walker.finish(it, warp);
    }
  }
#if USE_WGMMA && !MERGE_LATER
  lower_registers<168>();                                  // or ptxas gives up the 232 above: 9.6 KB of spills
#endif
  for (int i = blockIdx.x; i < count && !MERGE_LATER; i += gridDim.x) {  // all items are under way on resident blocks: waiting is safe
    const Item it = p.items[i];
    if (it.tiles && it.splits > 1) combine(p, it, base, warp, lane);
  }
  stamp(11, threadIdx.x == 0);
  stamp_common(13, threadIdx.x == 0);
}

#include "prim/mla_merge.cuh"
