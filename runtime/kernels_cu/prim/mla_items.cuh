// Which columns meet which keys: the arguments of the attention kernels and the list of items that a step's plan makes for all layers.
//
// A column is a (node, head) pair of one sequence, node-major: node j lies at position ctx + j. An item is a tile of COLUMNS of
// them and a range of 64-key tiles. Built with HEADS and COLUMNS.
#pragma once
#include "hopper.cuh"

using namespace prim;

[[maybe_unused]] constexpr int kWidth = 576, kValue = 512, kTile = 64;
constexpr int kHeads = HEADS, kN = COLUMNS;
constexpr int kMostSequences = 1024, kMostSplits = 1024;

struct Item {       // a column tile and a range of its keys; tiles = 0: nothing to do
  int first;        // column 0 of the tile among all M * A rows of q
  int columns;      // live columns
  int packed;       // column 0 within its sequence: node * A + head
  int seq, ctx;
  int tile0, tiles; // key tiles
  int split, splits;
  int slot, stride; // partial of split 0, and from split to split
  int counter;      // of the column tile
};

struct Params {
  const uint8_t* q;           // [M, A, 576] bf16
  const uint8_t* cache;       // [S, 576] bf16
  const int* pages;           // [B, P]
  const uint32_t* ancestors;  // [M, W] u64, read by halves
  uint8_t* out;               // [M, A, 512] bf16
  const Item* items;          // [*count]
  const int* count;           // [1]
  void* part;                 // [slots, N, 512] f32 or bf16: parts of O in the kernel's own order
  float* stats;               // [slots, N, 2] f32: maximum (base 2), sum
  int* arrived;               // [column tiles] zero between launches
  int page_size, pages_each, words, last_column, box_keys;
  float scale_log2;           // scale * log2(e)
};

struct PlanParams {
  const int* ctx;       // [B]
  const int* row0;      // [B]
  const int* seq;       // [M] sequence of a row, -1: dead
  Item* items;          // [item_room]
  int* count;           // [1]
  int rows, sequences, blocks, chunk;
  int item_room, slot_room;
};

__device__ __forceinline__ float hidden() { return __uint_as_float(0xff800000u); }  // -inf: a weight of 0
__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int parts(int a, int b) { return (a + b - 1) / b; }
// Cache row of a position. Past the table, or where it holds no page, some row: it is masked.
__device__ __forceinline__ int slot_of(const Params& p, int seq, int position) {
  const int at = position / p.page_size, page = p.pages[(size_t)seq * p.pages_each + least(at, p.pages_each - 1)];
  return most(page, 0) * p.page_size + position - at * p.page_size;
}

// ---------------------------------------------------------------- planning, once a step
// Time of a key range in key tiles, with what an item costs beyond: queries in, partials out and in again.
constexpr int kItemOverhead = 3;

extern "C" __global__ void __launch_bounds__(256) tree_mla_plan(const __grid_constant__ PlanParams p) {
  __shared__ int rows[kMostSequences];
  __shared__ int best_cost[256];
  __shared__ int best_chunk[256];
  const int t = threadIdx.x;
  pdl_wait();
  pdl_trigger();
  for (int b = t; b < p.sequences; b += 256) rows[b] = 0;
  __syncthreads();
  for (int i = t; i < p.rows; i += 256)
    if (p.seq[i] >= 0) atomicAdd(&rows[p.seq[i]], 1);
  __syncthreads();
  // Every thread tries one chunk length; the cheapest wins, the longer one where two cost the same.
  int longest = 1;
  long long load = 0;
  for (int b = 0; b < p.sequences; ++b)
    if (rows[b]) {
      const int tiles = parts(p.ctx[b] + rows[b], kTile);
      longest = most(longest, tiles);
      load += (long long)tiles * parts(rows[b] * kHeads, kN);
    }
  int chunk = p.chunk;
  if (!chunk) {
    const int low = most(most((int)(load / (8 * p.blocks)), parts(longest, kMostSplits)), 1), span = most(longest - low, 0);
    chunk = low + (int)((long long)span * t * t / (255 * 255));
    chunk = parts(longest, parts(longest, chunk));        // as short as this number of ranges allows
    long long items = 0, slots = 0;
    for (int b = 0; b < p.sequences; ++b)
      if (rows[b]) {
        const int ranges = parts(parts(p.ctx[b] + rows[b], kTile), chunk), tiles = parts(rows[b] * kHeads, kN);
        items += ranges * tiles;
        if (ranges > 1) slots += ranges * tiles;
      }
    const bool fits = slots <= p.slot_room && items <= p.item_room;
    best_cost[t] = fits ? (int)((items + p.blocks - 1) / p.blocks) * (chunk + kItemOverhead) : 0x7fffffff;
    best_chunk[t] = chunk;
    __syncthreads();
    int cost = 0x7fffffff;
    chunk = longest;                                      // one range each always fits
    for (int i = 0; i < 256; ++i)
      if (best_cost[i] < cost || (best_cost[i] == cost && cost != 0x7fffffff && best_chunk[i] > chunk)) {
        cost = best_cost[i];
        chunk = best_chunk[i];
      }
  }
  // All threads count along the sequences and write the items of each together: same range and sequence side by side.
  int item = 0, slot = 0, counter = 0;
  for (int b = 0; b < p.sequences; ++b) {
    if (!rows[b]) continue;
    const int total = rows[b] * kHeads, tiles = parts(total, kN), ctx = p.ctx[b];
    const int ranges = parts(parts(ctx + rows[b], kTile), chunk);
    for (int f = t; f < ranges * tiles; f += 256) {
      const int range = f / tiles, tile = f % tiles, packed = tile * kN, columns = least(kN, total - packed);
      const int keys = parts(ctx + (packed + columns - 1) / kHeads + 1, kTile);  // none after the tile's last node
      const Item it{p.row0[b] * kHeads + packed, columns, packed, b, ctx, range * chunk, most(least(chunk, keys - range * chunk), 0),
                    range, parts(keys, chunk), slot + tile, tiles, counter + tile};
      if (item + f < p.item_room) p.items[item + f] = it;
    }
    item += ranges * tiles;
    counter += tiles;
    if (ranges > 1) slot += ranges * tiles;
  }
  if (t == 0) *p.count = least(item, p.item_room);
}
