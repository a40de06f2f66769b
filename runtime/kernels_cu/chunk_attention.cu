// Attention of long chunks in the un-absorbed form: every head has keys of 192 numbers and values of 128, which chunk_expand.cu has laid out.
//
//   item         128 rows of one sequence and a head, and a range of its key tiles; a row sees all keys to its own position
//   warps 0-3, 4-7   64 rows each: S[64 x 128] = Q K^T, P = exp2(S - max), O[64 x 128] += P V, all in registers
//   warp 8       fills a ring of two places for keys and two for values, and the queries
//
// A tile's scores are asked for before the values of the tile before it are multiplied, so that its softmax runs behind that product:
// S, O and P are 160 registers of 232. The two groups go on their own, or (PING_PONG) take turns at the tensor cores, so that one's softmax falls
// into the other's products. The maximum of a row moves only when a score passes it by 2^8; O is rescaled then alone. Tiles
// before a group's first row have no mask and a loop of their own.
//
// Inequality at 64 heads, 1,024 rows behind 32k keys: 2 x 320 flops a row and key, 1.4 Tflop, 2.0 ms at 700 TFLOP/s; keys and values come
// from memory once (heads of a sequence go one after the other, their row tiles side by side): 1.1 GB, 0.24 ms. Shared memory: 6 KB in 64
// clocks for scores, 4 KB for values, P is in registers: 83 of 128 B a clock. L2: 80 KB a tile in 2,560 clocks, 32 B a clock and SM:
// 7.4 TB/s at the full tensor rate, 5.2 at 700 TFLOP/s; 6.2 have been seen.
//
// Where items are fewer than blocks, each is cut into ranges of keys; whoever of them is last adds them up, in the order of the keys.
// Sources: arXiv 2205.14135, FlashAttention-3 arXiv 2407.08608 (the order of products), MLA arXiv 2405.04434.
#include "prim/chunk_items.cuh"
#include "prim/wgmma_128.cuh"

#ifndef PING_PONG
#error "build with -DPING_PONG="
#endif

constexpr int kThreads = 384, kBox = 16384;                 // 128 rows x 64 numbers
constexpr int kKeyBytes = 3 * kBox, kValueBytes = 2 * kBox, kQueryBytes = 3 * kBox;
constexpr int kKeysAt = kQueryBytes, kValuesAt = kKeysAt + 2 * kKeyBytes, kTail = kValuesAt + 2 * kValueBytes;
constexpr int kKeyFull = kTail, kKeyFree = kKeyFull + 16, kValueFull = kKeyFree + 16, kValueFree = kValueFull + 16, kQueryFull = kValueFree + 16,
              kQueryFree = kQueryFull + 8, kLast = kQueryFree + 8;  // kLast: for each group, whether it adds up
constexpr int kNope = 128, kRope = 64, kLatent = 512, kValue = 128;
constexpr int kMostSplits = 8, kLeastSplit = 4;             // of an item; key tiles of one
constexpr int kCopierRegisters = 40, kProductRegisters = 232;
static_assert(kCopierRegisters + 2 * kProductRegisters <= 3 * 168, "registers of a block");
constexpr float kNever = -1e30f, kSlack = 8.f;  // a maximum before any key; what a score may pass a maximum by, in powers of two

struct Params {
  const int* pages;       // [B, P]
  const RowTile* rows;    // [counts->rows]
  const Counts* counts;   // [1]
  uint8_t* value;         // [M, heads * 128] bf16
  uint4* part;            // [blocks, 16, 256] a range's part of O, as its threads hold it
  uint4* stats;           // [blocks, 256] maximum (base 2) and sum of a thread's two rows
  int* arrived;           // [blocks, 2] zero between launches
  int page_size, pages_each, box_keys, heads;
  int room;               // keys
  float scale_log2;       // scale * log2(e)
};

struct Item {
  RowTile at;
  int head, tile0, tiles;  // key tiles
  int unit, split;
};

// All items of a step: heads, row tiles and ranges of keys, the last fastest. Odd rounds of the blocks go backwards: the longest and the
// shortest of a sequence's row tiles then meet in one block.
struct Items {
  int count, splits, rows;
  __device__ __forceinline__ explicit Items(const Params& p) {
    rows = p.counts->rows;
    const int units = rows * p.heads;
    splits = units ? most(least(least((int)gridDim.x / units, p.counts->shortest / kLeastSplit), kMostSplits), 1) : 1;
    count = units * splits;
  }
  __device__ __forceinline__ bool at(const Params& p, int round, Item& it) const {
    const int i = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (i >= count) return false;
    it.unit = i / splits;
    it.split = i % splits;
    it.head = it.unit / rows;
    it.at = p.rows[it.unit % rows];
    it.tile0 = it.at.tiles * it.split / splits;
    it.tiles = it.at.tiles * (it.split + 1) / splits - it.tile0;
    return true;
  }
  __device__ __forceinline__ int rounds() const { return parts(count, gridDim.x); }
};

__device__ __forceinline__ void fill(const Params& p, const TensorMap& nope, const TensorMap& rotated, const TensorMap& cache, const TensorMap& keys,
                                     const TensorMap& values, smem_t base) {
  const int lane = threadIdx.x & 31, pieces = kTile / p.box_keys;
  const uint64_t policy = policy_evict_normal();
  const Items items(p);
  int n = 0;
  uint32_t q_phase = 1;
  Item it;
  for (int round = 0; round < items.rounds(); ++round) {
    if (!items.at(p, round, it)) continue;
    auto look_up = [&](int j) {
      return cache_row(p.pages, p.pages_each, p.page_size, it.at.seq, (it.tile0 + j) * kTile + least(lane, pieces - 1) * p.box_keys);
    };
    int next = look_up(0);
    bar_wait(base + kQueryFree, q_phase);
    q_phase ^= 1;
    if (lane == 0) bar_expect(base + kQueryFull, kQueryBytes);
    __syncwarp();
    if (lane < 2) tensor_copy(base + lane * kBox, nope, base + kQueryFull, it.head * (kNope + kRope) + lane * 64, it.at.row, policy);
    if (lane == 2) tensor_copy(base + 2 * kBox, rotated, base + kQueryFull, it.head * (kLatent + kRope) + kLatent, it.at.row, policy);
    const int first = it.head * p.room + (it.at.at + it.tile0) * kTile;
    for (int j = 0; j < it.tiles; ++j, ++n) {
      const int row = next, place = n & 1;
      const uint32_t free = (n >> 1 & 1) ^ 1;
      next = look_up(least(j + 1, it.tiles - 1));
      const smem_t key_full = base + kKeyFull + 8 * place, key = base + kKeysAt + place * kKeyBytes;
      bar_wait(base + kKeyFree + 8 * place, free);
      if (lane == 0) bar_expect(key_full, kKeyBytes);
      __syncwarp();
      if (lane < pieces) tensor_copy(key + 2 * kBox + lane * p.box_keys * 128, cache, key_full, kLatent, row, policy);
      if (lane < 2) tensor_copy(key + lane * kBox, keys, key_full, lane * 64, first + j * kTile, policy);
      const smem_t value_full = base + kValueFull + 8 * place, value = base + kValuesAt + place * kValueBytes;
      bar_wait(base + kValueFree + 8 * place, free);
      if (lane == 0) bar_expect(value_full, kValueBytes);
      __syncwarp();
      if (lane < 2) tensor_copy(value + lane * kBox, values, value_full, lane * 64, first + j * kTile, policy);
    }
  }
}

template <int GROUP> struct Walker {
  const Params& p;
  smem_t base;
  int lane, row;               // row: of this thread's two in the tile, the first; the other is 8 further
  int n;                       // key tiles so far: place and phase in the ring
  float o[16][4], s[16][4];
  float high[2], sum[2];       // of this thread's rows: what o is relative to; weights of these 32 keys of every tile
  uint32_t weight[8][4];       // P as the product takes it from registers

  __device__ __forceinline__ void release(smem_t barrier) const {
    __syncwarp();
    if (lane == 0) bar_arrive(barrier);
  }
  __device__ __forceinline__ void take_turn() const {
    if (PING_PONG) named_barrier(1 + GROUP, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (PING_PONG) named_arrive(2 - GROUP, 256);
  }

  // s = queries times the keys of tile n of the ring. Under way when it returns.
  __device__ __forceinline__ void score(int n) {
    const uint64_t a = box_operand(base + GROUP * (kBox / 2), 16, 1024), b = box_operand(base + kKeysAt + (n & 1) * kKeyBytes, 16, 1024);
    bar_wait(base + kKeyFull + 8 * (n & 1), n >> 1 & 1);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < 3; ++x)
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_128<0>(s, operand_plus(a, x * kBox + 32 * k), operand_plus(b, x * kBox + 32 * k), x | k);
    wgmma_commit();
  }
  // o += P times the values of tile n. Under way when it returns.
  __device__ __forceinline__ void mix(int n) {
    const uint64_t b = box_operand(base + kValuesAt + (n & 1) * kValueBytes, kBox, 1024);
    bar_wait(base + kValueFull + 8 * (n & 1), n >> 1 & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma_128(o, weight[k], operand_plus(b, 2048 * k));
    wgmma_commit();
  }

  // Hides keys behind a row. after: of this thread's first row, its position less the tile's.
  __device__ __forceinline__ void mask(int after) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int last = after + 8 * h - 2 * (lane & 3);
#pragma unroll
      for (int b = 0; b < 16; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * b + e > last) s[b][2 * h + e] = __uint_as_float(0xff800000u);
    }
  }

  // Scores become weights in place. Does not touch o and P: the product before may be under way.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = s[0][2 * h];
#pragma unroll
      for (int b = 0; b < 16; ++b) x = fmaxf(x, fmaxf(s[b][2 * h], s[b][2 * h + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)) * p.scale_log2;
      const float now = x > high[h] + kSlack ? x : high[h];
      sum[h] *= exp2_fast(high[h] - now);
      high[h] = now;
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        s[b][2 * h] = exp2_fast(fmaf(s[b][2 * h], p.scale_log2, -now));
        s[b][2 * h + 1] = exp2_fast(fmaf(s[b][2 * h + 1], p.scale_log2, -now));
        even += s[b][2 * h];
        odd += s[b][2 * h + 1];
      }
      sum[h] += even + odd;
    }
  }
  // P from s, and o relative to the maxima of now. Nothing on them is under way.
  __device__ __forceinline__ void settle(float before0, float before1) {
    if (warp_any(before0 != high[0] || before1 != high[1])) {
      const float x = exp2_fast(before0 - high[0]), y = exp2_fast(before1 - high[1]);
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        o[b][0] *= x;
        o[b][1] *= x;
        o[b][2] *= y;
        o[b][3] *= y;
      }
    }
#pragma unroll
    for (int b = 0; b < 16; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) weight[b / 2][h + 2 * (b & 1)] = pack_bf16(s[b][2 * h], s[b][2 * h + 1]);
  }

  // Scores of the next tile, then the values of tile n: that softmax runs behind this product.
  template <bool MASKED> __device__ __forceinline__ void step(int after) {
    take_turn();
    score(n + 1);
    mix(n);
    pass_turn();
    wgmma_wait<1>();
    landed(s);
    release(base + kKeyFree + 8 * (n + 1 & 1));
    if (MASKED) mask(after);
    const float before0 = high[0], before1 = high[1];
    soften();
    wgmma_wait<0>();
    landed(o);
    release(base + kValueFree + 8 * (n & 1));
    settle(before0, before1);
    ++n;
  }

  __device__ __forceinline__ void walk(const Item& it) {
    int after = it.at.first + row - it.tile0 * kTile;        // of this thread's first row, its position less the tile's
    const int open = least((it.at.first + 64 * GROUP + 1) / kTile - it.tile0, it.tiles);  // tiles that all rows of the group see whole
    high[0] = high[1] = kNever;
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int b = 0; b < 16; ++b) o[b][0] = o[b][1] = o[b][2] = o[b][3] = 0.f;
    take_turn();
    score(n);
    pass_turn();
    wgmma_wait<0>();
    landed(s);
    release(base + kKeyFree + 8 * (n & 1));
    if (open < 1) mask(after);
    soften();
    settle(high[0], high[1]);
    int j = 1;
#pragma unroll 1
    for (; j < open; ++j) step<false>(0);
    after -= j * kTile;
#pragma unroll 1
    for (; j < it.tiles; ++j, after -= kTile) step<true>(after);
    release(base + kQueryFree);
    mix(n);
    wgmma_wait<0>();
    landed(o);
    release(base + kValueFree + 8 * (n & 1));
    ++n;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    }
  }

  __device__ __forceinline__ void put(const Item& it) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = 1.f / sum[h];
      uint8_t* to = p.value + ((size_t)(it.at.row + row + 8 * h) * p.heads + it.head) * (2 * kValue);
#pragma unroll
      for (int b = 0; b < 16; b += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = pack_bf16(o[b + i][2 * h] * scale, o[b + i][2 * h + 1] * scale);
        transpose_quad(v, lane & 3);
        if (row + 8 * h < it.at.rows) *reinterpret_cast<uint4*>(to + 16 * (b + (lane & 3))) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }

  // A range's part; the last of an item's ranges to come takes all of them, in order.
  __device__ __forceinline__ void put_part(const Item& it, int splits) {
    const size_t slot = (size_t)it.unit * splits + it.split;
    p.stats[slot * 256 + threadIdx.x] = four(high[0], sum[0], high[1], sum[1]);
#pragma unroll
    for (int b = 0; b < 16; ++b) p.part[(slot * 16 + b) * 256 + threadIdx.x] = four(o[b][0], o[b][1], o[b][2], o[b][3]);
    __threadfence();
    named_barrier(3 + GROUP, 128);
    if ((threadIdx.x & 127) == 0) {
      int* counter = p.arrived + 2 * it.unit + GROUP;
      const int last = atomicAdd(counter, 1) == splits - 1;
      if (last) *counter = 0;
      sts_f32(base + kLast + 4 * GROUP, last ? 1.f : 0.f);
    }
    named_barrier(3 + GROUP, 128);
    if (lds_f32(base + kLast + 4 * GROUP) == 0.f) return;
    __threadfence();
    high[0] = high[1] = kNever;
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int b = 0; b < 16; ++b) o[b][0] = o[b][1] = o[b][2] = o[b][3] = 0.f;
#pragma unroll 1
    for (int i = 0; i < splits; ++i) {
      const size_t other = (size_t)it.unit * splits + i;
      const uint4 stats = ldg128_cg(p.stats + other * 256 + threadIdx.x);
      float mine[2], theirs[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float maximum = __uint_as_float(comp(stats, 2 * h)), now = fmaxf(high[h], maximum);
        mine[h] = exp2_fast(high[h] - now);
        theirs[h] = exp2_fast(maximum - now);
        high[h] = now;
        sum[h] = sum[h] * mine[h] + __uint_as_float(comp(stats, 2 * h + 1)) * theirs[h];
      }
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        const uint4 v = ldg128_cg(p.part + (other * 16 + b) * 256 + threadIdx.x);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[b][e] = o[b][e] * mine[e / 2] + __uint_as_float(comp(v, e)) * theirs[e / 2];
      }
    }
    put(it);
  }
  static __device__ __forceinline__ uint4 four(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
  }

  __device__ __forceinline__ void work() {
    const Items items(p);
    uint32_t q_phase = 0;
    n = 0;
    Item it;
    if (GROUP == 1) pass_turn();                             // group 0 begins
    for (int round = 0; round < items.rounds(); ++round) {
      if (!items.at(p, round, it)) continue;
      bar_wait(base + kQueryFull, q_phase);
      q_phase ^= 1;
      walk(it);
      if (items.splits > 1) put_part(it, items.splits);
      else put(it);
    }
    if (GROUP == 0) take_turn();                             // the other group's last pass
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
chunk_attention(const __grid_constant__ Params p, const __grid_constant__ TensorMap nope, const __grid_constant__ TensorMap rotated,
                const __grid_constant__ TensorMap cache, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values) {
  DYNAMIC_SMEM_1024(shared);
  const smem_t base = smem(shared);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      bar_init(base + kKeyFull + 8 * i, 1);
      bar_init(base + kKeyFree + 8 * i, 8);
      bar_init(base + kValueFull + 8 * i, 1);
      bar_init(base + kValueFree + 8 * i, 8);
    }
    bar_init(base + kQueryFull, 1);
    bar_init(base + kQueryFree, 8);
    bar_init_fence();
  }
  if (threadIdx.x == 256) {
    prefetch_map(nope);
    prefetch_map(rotated);
    prefetch_map(cache);
    prefetch_map(keys);
    prefetch_map(values);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (warp >= 8) {
    lower_registers<kCopierRegisters>();
    if (warp == 8) fill(p, nope, rotated, cache, keys, values, base);
    return;
  }
  raise_registers<kProductRegisters>();
  if (warp < 4) {
    Walker<0> walker{p, base, lane, warp * 16 + (lane >> 2)};
    walker.work();
  } else {
    Walker<1> walker{p, base, lane, warp * 16 + (lane >> 2)};
    walker.work();
  }
}
