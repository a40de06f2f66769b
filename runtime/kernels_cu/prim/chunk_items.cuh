// Long chunks of prompts: which rows of a step they are, and where their keys lie when they are expanded for every head.
//
// Keys of the sequences that are taken lie end to end in the workspace, each sequence from a whole tile of 128 on. A step's plan
// (chunk_plan.cu) lists the key tiles and the row tiles; expansion and attention of every layer read the same lists.
#pragma once
#include "memory.cuh"

using namespace prim;

[[maybe_unused]] constexpr int kTile = 128;  // keys of a tile, and rows of one

struct KeyTile {  // its place in the list is its place in the workspace
  int seq, position;  // of key 0
  int ctx, pad;       // committed keys of the sequence
};

struct RowTile {  // rows of one sequence, which lie side by side
  int row, rows;    // among the step's M; 1 to 128
  int first;        // position of row 0: it sees keys 0 .. first
  int seq;
  int at, tiles;    // first key tile of the sequence in the workspace; how many the last row sees
  int pad[2];
};

struct Counts {
  int keys, rows;   // tiles of either kind
  int shortest;     // fewest key tiles of a row tile
  int pad;
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int parts(int a, int b) { return (a + b - 1) / b; }
// Cache row of a position. Past the table, or where it holds no page, some row: nothing of it is used.
__device__ __forceinline__ int cache_row(const int* pages, int pages_each, int page_size, int seq, int position) {
  const int at = position / page_size, page = pages[(size_t)seq * pages_each + least(at, pages_each - 1)];
  return most(page, 0) * page_size + position - at * page_size;
}
