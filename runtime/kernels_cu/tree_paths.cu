// Gives every row of a draft tree its path's keys in order of position, so that its sums are those of plain decoding, bit for bit.
//
//   path_plan    once a step    which rows stand as they are, and what the others become: sequences of one row each
//   path_copy    each layer     the keys of those rows' paths from the cache into private pages, between the cache write and attention
//
// A tree's keys lie at ctx + node, plain decoding's at ctx + depth, and attention sums keys in groups that their positions decide. So
//
//   row of a tree   = a sequence of its own: ctx + depth keys before it, and a page table
//                     [ shared pages before ctx's | private pages: ctx's page up to ctx, then the ancestors, root first, itself last ]
//   row of a chain  = a row that sees every node before it. It, and all rows before it, have their keys in place: they stay one sequence.
//
// A sequence's number is its first row's, so each row finds its own without looking at others, and there are at most M of them.
// Its ancestor words stay where they are: bit 0, the root, is set in all of them, and for a sequence of one row bit 0 is the row itself.
//
// Private pages lie behind the last layer of the cache, once for all layers: what a layer copies, it alone reads. Counted from a
// layer's first page they begin at another number in each layer, so path_copy writes them into the page tables.
//
// Inequality: 1,152 B a key, read and written. A path has up to page_size + depth keys: at pages of 64 and depth 7 a mean of 40, 92 KB;
// a tree of 16 nodes 1.5 MB a layer, most of it out of L2: 0.5 us. Below that a launch is latency; a row is spread over several blocks.
//
// Dead rows: seq = -1. Trees deeper than the private pages hold are refused on the host (tree_paths.py); here their keys are cut off.
#include "prim/pipeline.cuh"

using namespace prim;

constexpr int kTile = 64;                                 // keys that attention fetches together (mla_items.cuh)
constexpr int kVectors = 72, kPlanners = 128;             // 16-byte vectors of a key; threads
constexpr int kKeys = 4, kCopiers = kKeys * kVectors, kHeld = 4;  // keys of a block at a time, threads, vectors under way a thread

struct PathPlan {
  const int* ctx;             // [B]
  const int* row0;            // [B]
  const int* seq;             // [M] sequence of a row, -1: dead
  const int* pages;           // [B, P]
  const uint32_t* ancestors;  // [M, W] u64, read by halves
  int* own_ctx;               // [M] by own sequence
  int* own_row0;              // [M]
  int* own_seq;               // [M] by row
  int* own_pages;             // [M, P] by own sequence, valid as far as attention looks
  int* keys;                  // [M] that a row has copied, 0: none
  int* source;                // [M, room] their slots
  int page_size, pages_each, words, room;
};

struct PathCopy {
  uint4* cache;               // [slots, 72] from this layer's first slot on, the private ones included
  const int* own_ctx;
  const int* keys;
  const int* source;
  int* own_pages;
  int page_size, pages_each, room;
  int first;                  // private page of row 0, counted from this layer's first page
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int parts(int a, int b) { return (a + b - 1) / b; }
// Nodes before `node` that a row sees.
__device__ __forceinline__ int seen_before(const uint32_t* bits, int node) {
  int n = __popc(bits[node >> 5] & ((1u << (node & 31)) - 1));
  for (int h = 0; h < node >> 5; ++h) n += __popc(bits[h]);
  return n;
}

extern "C" __global__ void __launch_bounds__(kPlanners) path_plan(const __grid_constant__ PathPlan p) {
  const int row = blockIdx.x, t = threadIdx.x;
  pdl_trigger();
  pdl_wait();
  const int b = p.seq[row];
  const int ctx = b < 0 ? 0 : p.ctx[b], row0 = b < 0 ? row : p.row0[b], node = row - row0;
  const uint32_t* bits = p.ancestors + (size_t)row * (2 * p.words);
  const int depth = b < 0 ? 0 : seen_before(bits, node);
  const bool chain = depth == node;
  const int before = ctx % p.page_size, keys = before + depth + 1;
  if (t == 0) {
    p.own_seq[row] = b < 0 ? -1 : chain ? row0 : row;
    p.own_ctx[row] = chain ? ctx : ctx + depth;
    p.own_row0[row] = row;
    p.keys[row] = chain ? 0 : least(keys, p.room);
  }
  if (b < 0 || (chain && node)) return;
  const int* pages = p.pages + (size_t)b * p.pages_each;
  const int shared = chain ? p.pages_each : ctx / p.page_size;
  const int last = chain ? ctx + (int)gridDim.x - row : ctx + depth + 1;  // positions that the sequence may have
  const int end = least(parts(parts(last, kTile) * kTile, p.page_size), p.pages_each);
  for (int e = t; e < end; e += kPlanners) p.own_pages[(size_t)row * p.pages_each + e] = e < shared ? pages[e] : 0;
  if (chain) return;
  int* source = p.source + (size_t)row * p.room;
  for (int k = t; k < before; k += kPlanners) source[k] = pages[shared] * p.page_size + k;
  for (int j = t; j <= node; j += kPlanners) {
    if (!(bits[j >> 5] >> (j & 31) & 1)) continue;
    const int k = before + seen_before(bits, j), at = ctx + j;
    if (k < p.room) source[k] = pages[at / p.page_size] * p.page_size + at % p.page_size;
  }
}

extern "C" __global__ void __launch_bounds__(kCopiers) path_copy(const __grid_constant__ PathCopy p) {
  const int row = blockIdx.x, vector = threadIdx.x % kVectors, step = kKeys * gridDim.y, each = p.room / p.page_size;
  pdl_trigger();
  pdl_wait();
  const int keys = p.keys[row];
  if (!keys) return;
  const int page = p.first + row * each;
  if (blockIdx.y == 0)
    for (int e = threadIdx.x; e < parts(keys, p.page_size); e += kCopiers)
      p.own_pages[(size_t)row * p.pages_each + (p.own_ctx[row] + 1 - keys) / p.page_size + e] = page + e;
  uint4* to = p.cache + (size_t)page * p.page_size * kVectors + vector;
  const int* source = p.source + (size_t)row * p.room;
  for (int k0 = blockIdx.y * kKeys + threadIdx.x / kVectors; k0 < keys; k0 += kHeld * step) {
    uint4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (k0 + i * step < keys) held[i] = p.cache[(size_t)source[k0 + i * step] * kVectors + vector];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (k0 + i * step < keys) to[(size_t)(k0 + i * step) * kVectors] = held[i];
  }
}
