// Which columns meet which keys: the arguments of the attention kernels and the list of items that a step's plan makes for all layers.
//
// A column is a (node, head) pair of one sequence, node-major: node j lies at position ctx + j. An item is a tile of COLUMNS of
// them and a range of 64-key tiles. Built with HEADS and COLUMNS.
#pragma once
#include "hopper.cuh"
#include "mla_trials.cuh"

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
  int split, splits;// splits < 0: of as many pieces, and that of split 0 adds up the others' itself
  int slot, stride; // partial of split 0, and from split to split; splits < 0: of split 1, the next one behind it
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
constexpr int kLeastPiece = 2;  // key tiles: a sequence is not cut closer to its ends than that

struct Parts { int first, last; };                         // that have a piece of a sequence
struct PlanRoom {
  int rows[kMostSequences], ctx[kMostSequences];          // of each sequence
  int keys[kMostSequences], tiles[kMostSequences];        // its key tiles and column tiles; 0 where it has no rows
  int start[kMostSequences];                              // where it begins on the axis of even parts
  Parts parts[kMostSequences];                            // that have a piece of it
  int slot[kMostSequences], counter[kMostSequences];
  uint32_t warps[2][8];
  int most_pieces;
};
// The largest or the smallest of all 256 threads' numbers, by all threads; `which`: of two places, not that of the call before.
template <bool LARGEST> __device__ __forceinline__ uint32_t block_extreme(PlanRoom& r, int which, uint32_t v, int t) {
  v = LARGEST ? warp_max(v) : warp_min(v);
  if (!(t & 31)) r.warps[which][t >> 5] = v;
  __syncthreads();
  const uint32_t w = r.warps[which][t & 7];
  return LARGEST ? warp_max(w) : warp_min(w);
}

// An item of column tile `tile`: keys [tile0, end) as far as the tile's last node sees.
__device__ __forceinline__ Item item_of(const PlanParams& p, const PlanRoom& r, int b, int tile, int tile0, int end) {
  const int total = r.rows[b] * kHeads, packed = tile * kN, columns = least(kN, total - packed), ctx = r.ctx[b];
  const int keys = parts(ctx + (packed + columns - 1) / kHeads + 1, kTile);
  return Item{p.row0[b] * kHeads + packed, columns, packed, b, ctx, tile0, most(least(end, keys) - tile0, 0), 0, 1, 0, 1, 0};
}

// Ranges of `chunk` key tiles, of all sequences alike. Tiles of one range lie side by side: they meet in L2.
__device__ __forceinline__ void list_chunks(const PlanParams& p, const PlanRoom& r, int chunk, int t) {
  int item = 0, slot = 0, counter = 0;
  for (int b = 0; b < p.sequences; ++b) {
    if (!r.rows[b]) continue;
    const int tiles = r.tiles[b], ranges = parts(r.keys[b], chunk);
    for (int f = t; f < ranges * tiles; f += 256) {
      const int range = f / tiles, tile = f % tiles;
      Item it = item_of(p, r, b, tile, range * chunk, (range + 1) * chunk);
      it.split = range;
      it.splits = parts(parts(it.ctx + (it.packed + it.columns - 1) / kHeads + 1, kTile), chunk);
      it.slot = slot + tile;
      it.stride = tiles;
      it.counter = counter + tile;
      if (item + f < p.item_room) p.items[item + f] = it;
    }
    item += ranges * tiles;
    counter += tiles;
    if (ranges > 1) slot += ranges * tiles;
  }
  if (t == 0) *p.count = least(item, p.item_room);
}

// Even parts. The sequences' keys lie end to end on an axis, each behind kItemOverhead; it is cut into parts of `length`, and a part
// has as many blocks as the widest sequence has column tiles: block i takes tile i % widest of all pieces in part i / widest, its
// k-th at items[k * blocks + i].
// First key tile of sequence b, which begins at start[b], that part `part` begins with:
__device__ __forceinline__ int cut(const int* start, int b, int keys, int part, int length) {
  const int at = part * length - start[b] - kItemOverhead;
  return at < kLeastPiece ? 0 : keys - at < kLeastPiece ? keys : at;
}
__device__ __forceinline__ Parts parts_of(const int* start, int b, int keys, int length) {
  const int begin = start[b] + kItemOverhead;
  Parts f{begin / length, (begin + keys) / length};
  while (cut(start, b, keys, f.first + 1, length) == 0) ++f.first;
  while (cut(start, b, keys, f.last, length) == keys) --f.last;
  return f;
}
// False where the lists have no room for them; nothing is written then.
__device__ __forceinline__ bool list_parts(const PlanParams& p, PlanRoom& r, int widest, int length, int t) {
  int at = 0;
  for (int b = 0; b < p.sequences; ++b) {
    if ((b & 255) == t) r.start[b] = at;
    if (r.rows[b]) at += r.keys[b] + kItemOverhead;
  }
  if (t == 0) r.most_pieces = 0;
  __syncthreads();
  for (int b = t; b < p.sequences; b += 256) {
    if (!r.rows[b]) continue;
    r.parts[b] = parts_of(r.start, b, r.keys[b], length);
  }
  __syncthreads();
  int slot = 0, counter = 0;
  for (int b = 0; b < p.sequences; ++b) {
    if (!r.rows[b]) continue;
    const int tiles = r.tiles[b], pieces = r.parts[b].last - r.parts[b].first + 1;
    if ((b & 255) == t) {
      r.slot[b] = slot;
      r.counter[b] = counter;
    }
    counter += tiles;
    if (pieces > 1) slot += pieces * tiles;
  }
  for (int i = t; i < p.blocks / widest; i += 256) {
    int pieces = 0;
    for (int b = 0; b < p.sequences; ++b) pieces += r.rows[b] && r.parts[b].first <= i && i <= r.parts[b].last;
    atomicMax(&r.most_pieces, pieces);
  }
  __syncthreads();
  if (slot > p.slot_room || r.most_pieces * p.blocks > p.item_room) return false;
  for (int i = t; i < p.blocks; i += 256) {
    const int part = i / widest, tile = i % widest;
    Item* to = p.items + i;
    for (int b = 0; b < p.sequences; ++b) {
      if (!r.rows[b] || tile >= r.tiles[b]) continue;
      const int keys = r.keys[b], tiles = r.tiles[b];
      Parts f = r.parts[b];
      if (part < f.first || part > f.last) continue;
      Item it = item_of(p, r, b, tile, cut(r.start, b, keys, part, length), cut(r.start, b, keys, part + 1, length));
      const int seen = parts(it.ctx + (it.packed + it.columns - 1) / kHeads + 1, kTile);
      while (cut(r.start, b, keys, f.last, length) >= seen) --f.last;
      it.split = part - f.first;
      it.splits = f.last - f.first + 1;
      it.slot = r.slot[b] + tile;
      it.stride = tiles;
      it.counter = r.counter[b] + tile;
      *to = it;
      to += p.blocks;
    }
    for (; to < p.items + (size_t)r.most_pieces * p.blocks; to += p.blocks) to->tiles = 0;
  }
  if (t == 0) *p.count = r.most_pieces * p.blocks;
  return true;
}

#if OWNERS
#include "mla_owned.cuh"
#endif

extern "C" __global__ void __launch_bounds__(256) tree_mla_plan(const __grid_constant__ PlanParams p) {
  __shared__ PlanRoom r;
  const int t = threadIdx.x;
  pdl_wait();
  if (!EARLY_KEYS) pdl_trigger();                         // else the list is read before the next kernel waits: it starts when this one has ended
  for (int b = t; b < p.sequences; b += 256) {
    r.rows[b] = 0;
    r.ctx[b] = p.ctx[b];
  }
  __syncthreads();
  for (int i = t; i < p.rows; i += 256)
    if (p.seq[i] >= 0) atomicAdd(&r.rows[p.seq[i]], 1);
  __syncthreads();
  for (int b = t; b < p.sequences; b += 256) {
    r.keys[b] = r.rows[b] ? parts(r.ctx[b] + r.rows[b], kTile) : 0;
    r.tiles[b] = parts(r.rows[b] * kHeads, kN);
  }
  __syncthreads();
  if (p.chunk) {
    list_chunks(p, r, p.chunk, t);
    return;
  }
  int longest = 1, widest = 1, axis = 0;
  long long load = 0;
  for (int b = 0; b < p.sequences; ++b) {
    const int keys = r.keys[b], tiles = r.tiles[b];
    longest = most(longest, keys);
    widest = most(widest, tiles);
    axis += keys + (tiles ? kItemOverhead : 0);
    load += (long long)keys * tiles;
  }
  // Every thread tries one chunk length; the cheapest wins, the longer one where two cost the same.
  const int low = most(most((int)(load / (8 * p.blocks)), parts(longest, kMostSplits)), 1), span = most(longest - low, 0);
  int chunk = low + (int)((long long)span * t * t / (255 * 255));
  chunk = parts(longest, parts(longest, chunk));          // as short as this number of ranges allows
  int items = 0, slots = 0;                               // below 2^31: keys and column tiles are, and there are 8 chunks a block at most
  for (int b = 0; b < p.sequences; ++b) {
    const int ranges = parts(r.keys[b], chunk), n = ranges * r.tiles[b];
    items += n;
    if (ranges > 1) slots += n;
  }
  const bool fits = slots <= p.slot_room && items <= p.item_room;
  const uint32_t mine = fits ? (uint32_t)((items + p.blocks - 1) / p.blocks) * (chunk + kItemOverhead) : 0x7fffffffu;
  const uint32_t cost = block_extreme<false>(r, 0, mine, t);
  chunk = (int)block_extreme<true>(r, 1, mine == cost && fits ? chunk : 0, t);
  if (!chunk) chunk = longest;                            // one range each always fits
#if OWNERS
  __shared__ OwnedRoom o;
  int owners = 0;
  for (int b = 0; b < p.sequences; ++b) owners += r.tiles[b];
  if (owners < p.blocks && p.blocks <= kMostBlocks) {
    const int owned = owned_length(p, r, owners, (int)load, longest, t);
    const int even = axis ? most(parts(axis, p.blocks / widest), 2 * kLeastPiece) + kItemOverhead : (int)cost;  // a part, below
    if (owned && owned + OWNERS < least((int)cost, even) && list_owned(p, r, o, owners, owned, t)) return;
  }
#endif
  // Parts as FlashMLA's scheduler makes them: all blocks end together, but a sequence narrower than the widest leaves some idle. Most blocks
  // have two of them, which must gain something: 8 x 10 x 9 x 64k takes 225 us with 130 ranges of 79 tiles, 228 to 250 with parts of 78.
  if (widest <= p.blocks && axis) {
    const int length = most(parts(axis, p.blocks / widest), 2 * kLeastPiece);
    if (32ull * (length + kItemOverhead) < 31ull * cost && list_parts(p, r, widest, length, t)) return;
  }
  list_chunks(p, r, chunk, t);
}
