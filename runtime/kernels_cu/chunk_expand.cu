// Keys and values of long chunks for every head: k = latent w_uk, v = latent w_uv, of the key tiles that chunk_plan.cu lists.
//
//   unit         a key tile and a head: 128 keys x 128 numbers of k, then of v. Units lie tile by tile on an axis that the blocks cut evenly
//   warps 0-3, 4-7   64 keys each, as the rows of the product
//   warp 8       fetches a tile's latents (128 KB, by way of the page table), which stay while its heads' weights pass through a ring
//
// Inequality at 64 heads, 33k keys: 2 x 512 x 256 flops a key and head, 0.55 Tflop, 0.79 ms at 700 TFLOP/s; 32 KB a key written, 1.08 GB,
// 0.24 ms. Shared memory: a 64 x 128 x 16 product reads 6 KB in 64 clocks of 128 B. L2: 256 KB of weights a unit in 8,192 clocks, 32 B a
// clock and SM, as the attention after it; with the weights standing and the latents passing it would be the same.
//
// What is not finite of a value of the step's own positions, or of those behind them to the tile's end, is written as 0: a weight of 0
// then removes it, and a row that does see such a key has a weight of NaN from its key. Source: MLA, arXiv 2405.04434 section 2.1.
#include "prim/chunk_items.cuh"
#include "prim/wgmma_128.cuh"

constexpr int kThreads = 384, kSlots = 6, kBox = 16384, kBoxes = 8;  // boxes of 128 keys x 64 inputs, and of weights: as many bytes
constexpr int kRing = kBoxes * kBox, kTail = kRing + kSlots * kBox;
constexpr int kFull = kTail, kEmpty = kFull + 8 * kSlots, kHere = kEmpty + 8 * kSlots, kGone = kHere + 8;
constexpr int kLatent = 512, kWide = 128;
constexpr int kCopierRegisters = 40, kProductRegisters = 232;

struct Params {
  const int* pages;       // [B, P]
  const KeyTile* keys;    // [counts->keys]
  const Counts* counts;   // [1]
  uint8_t* k;             // [heads, room, 128] bf16
  uint8_t* v;             // [heads, room, 128]
  int page_size, pages_each, box_keys, heads;
  int room;               // keys
};

struct Share { int from, to; };  // units of a block
__device__ __forceinline__ Share share_of(const Params& p) {
  const long long units = (long long)p.counts->keys * p.heads;
  return Share{(int)(units * blockIdx.x / gridDim.x), (int)(units * (blockIdx.x + 1) / gridDim.x)};
}

struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void fill(const Params& p, const TensorMap& cache, const TensorMap& w_uk, const TensorMap& w_uv, smem_t base) {
  const int lane = threadIdx.x & 31, pieces = kTile / p.box_keys;
  const uint64_t policy = policy_evict_normal();
  const Share share = share_of(p);
  Ring ring;
  uint32_t gone = 1;
  int tile = -1;
  for (int unit = share.from; unit < share.to; ++unit) {
    const int head = unit % p.heads;
    if (unit / p.heads != tile) {
      tile = unit / p.heads;
      const KeyTile at = p.keys[tile];
      bar_wait(base + kGone, gone);
      gone ^= 1;
      if (lane == 0) bar_expect(base + kHere, kRing);
      __syncwarp();
      for (int i = lane; i < kBoxes * pieces; i += 32) {
        const int piece = i / kBoxes, column = i % kBoxes;
        const int row = cache_row(p.pages, p.pages_each, p.page_size, at.seq, at.position + piece * p.box_keys);
        tensor_copy(base + column * kBox + piece * p.box_keys * 128, cache, base + kHere, column * 64, row, policy);
      }
    }
    for (int x = 0; x < 2 * kBoxes; ++x, ring.advance()) {
      const smem_t full = base + kFull + 8 * ring.slot, box = base + kRing + ring.slot * kBox;
      bar_wait(base + kEmpty + 8 * ring.slot, ring.phase ^ 1);
      if (lane == 0) {
        bar_expect(full, kBox);
        if (x < kBoxes) {                                  // 64 inputs x 128 numbers, by halves of 64
          tensor_copy(box, w_uk, full, 0, head * kLatent + x * 64, policy);
          tensor_copy(box + kBox / 2, w_uk, full, 64, head * kLatent + x * 64, policy);
        } else {
          tensor_copy(box, w_uv, full, (x - kBoxes) * 64, head * kWide, policy);
        }
      }
      __syncwarp();
    }
  }
}

struct Expansion {
  const Params& p;
  smem_t base;
  int group, lane, row;          // row: of this thread's two in the tile, the first; the other is 8 further
  Ring ring;
  float d[16][4];

  // This warp's products have read what a barrier guards.
  __device__ __forceinline__ void release(smem_t barrier) const {
    __syncwarp();
    if (lane == 0) bar_arrive(barrier);
  }

  // d = latents times a head's weights: 8 boxes of 64 inputs. BY_COLUMNS: w_uk, whose rows are inputs.
  template <int BY_COLUMNS> __device__ __forceinline__ void multiply() {
    const uint64_t a = box_operand(base + group * (kBox / 2), 16, 1024), b = box_operand(base + kRing, BY_COLUMNS ? kBox / 2 : 16, 1024);
    smem_t done = base;
#pragma unroll 1
    for (int x = 0; x < kBoxes; ++x) {
      bar_wait(base + kFull + 8 * ring.slot, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_128<BY_COLUMNS>(d, operand_plus(a, x * kBox + 32 * k), operand_plus(b, ring.slot * kBox + (BY_COLUMNS ? 2048 : 32) * k), x | k);
      wgmma_commit();
      wgmma_wait<1>();
      if (x) release(done);
      done = base + kEmpty + 8 * ring.slot;
      ring.advance();
    }
    wgmma_wait<0>();
    landed(d);
    release(done);
  }

  template <bool VALUES> __device__ __forceinline__ void store(const KeyTile& at, int tile, int head) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = at.position + row + 8 * h;
      const bool own = position >= at.ctx;
      uint8_t* to = (VALUES ? p.v : p.k) + ((size_t)head * p.room + (size_t)tile * kTile + row + 8 * h) * (2 * kWide);
#pragma unroll
      for (int b = 0; b < 16; b += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = d[b + i][2 * h], y = d[b + i][2 * h + 1];
          if (VALUES && own) {
            x = finite(x) ? x : 0.f;
            y = finite(y) ? y : 0.f;
          }
          w[i] = pack_bf16(x, y);
        }
        transpose_quad(w, lane & 3);
        *reinterpret_cast<uint4*>(to + 16 * (b + (lane & 3))) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
  static __device__ __forceinline__ bool finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

  __device__ __forceinline__ void work() {
    const Share share = share_of(p);
    uint32_t here = 0;
    int tile = -1;
    KeyTile at{};
    for (int unit = share.from; unit < share.to; ++unit) {
      const int head = unit % p.heads;
      if (unit / p.heads != tile) {
        tile = unit / p.heads;
        at = p.keys[tile];
        bar_wait(base + kHere, here);
        here ^= 1;
      }
      multiply<1>();
      store<false>(at, tile, head);
      multiply<0>();
      if ((unit + 1) / p.heads != tile) release(base + kGone);
      store<true>(at, tile, head);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
chunk_expand(const __grid_constant__ Params p, const __grid_constant__ TensorMap cache, const __grid_constant__ TensorMap w_uk,
             const __grid_constant__ TensorMap w_uv) {
  DYNAMIC_SMEM_1024(shared);
  const smem_t base = smem(shared);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      bar_init(base + kFull + 8 * i, 1);
      bar_init(base + kEmpty + 8 * i, 8);
    }
    bar_init(base + kHere, 1);
    bar_init(base + kGone, 8);
    bar_init_fence();
  }
  if (threadIdx.x == 256) {
    prefetch_map(cache);
    prefetch_map(w_uk);
    prefetch_map(w_uv);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (warp >= 8) {
    lower_registers<kCopierRegisters>();
    if (warp == 8) fill(p, cache, w_uk, w_uv, base);
    return;
  }
  raise_registers<kProductRegisters>();
  Expansion expansion{p, base, warp >> 2, lane, warp * 16 + (lane >> 2)};
  expansion.work();
}
