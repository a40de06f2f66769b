// Which rows of a step are attended in the un-absorbed form, and the lists that its layers work from. Once a step, one block.
//
// Taken is a sequence whose rows are a chain (row j stands at position ctx + j: a chunk of a prompt), `least` of them or more, and whose
// keys still fit the workspace when those of the taken sequences before it lie there; each sequence's keys are rounded up to a tile.
// `rest` is `seq` with -1 where a row is taken: to whoever reads it instead of `seq` such a row is dead.
//
// Inequality: M rows are read twice, 12 B each; a launch is latency. What is serial is the choice, over few: M / least can qualify.
// Defined by kernels_np/chunks.py (split_chunks).
#include "prim/chunk_items.cuh"
#include "prim/exact.cuh"
#include "prim/pipeline.cuh"

constexpr int kThreads = 256, kMostSequences = 1024;

struct Params {
  const int* seq;     // [M]
  const int* pos;     // [M]
  const int* ctx;     // [B]
  const int* row0;    // [B]
  int* rest;          // [M]
  KeyTile* keys;      // [room]
  RowTile* rows;      // [M / 128 + M / least]
  Counts* counts;     // [1]
  int M, sequences, least, room;  // room: key tiles
};

extern "C" __global__ void __launch_bounds__(kThreads) split_chunks(const __grid_constant__ Params p) {
  __shared__ int count[kMostSequences], start[kMostSequences];  // rows of a sequence, -1 from a row on that is out of line; its first key tile or -1
  __shared__ uint32_t may[kMostSequences / 32];                 // sequences that qualify
  __shared__ int taken[kMostSequences], before[kMostSequences]; // of the taken ones: which, and row tiles before its own
  __shared__ int takes;
  const int t = threadIdx.x;
  pdl_trigger();
  pdl_wait();
  for (int b = t; b < p.sequences; b += kThreads) {
    count[b] = 0;
    start[b] = -1;
  }
  if (t < kMostSequences / 32) may[t] = 0;
  __syncthreads();
  for (int i = t; i < p.M; i += kThreads) {
    const int b = p.seq[i];
    if (b < 0) continue;
    const bool chained = p.pos[i] - p.ctx[b] == i - p.row0[b];
    atomicAdd(&count[b], chained ? 1 : -(1 << 20));            // one row out of line outweighs all others
  }
  __syncthreads();
  for (int b = t; b < p.sequences; b += kThreads)
    if (count[b] >= p.least) or_shared(&may[b / 32], 1u << b % 32);
  __syncthreads();
  if (t == 0) {
    int at = 0, rows = 0, n = 0, shortest = 1 << 30;
    for (int word = 0; word < kMostSequences / 32; ++word) {
      if (!may[word]) continue;
      for (int bit = 0; bit < 32; ++bit) {
        if (!(may[word] >> bit & 1)) continue;
        const int b = 32 * word + bit, tiles = parts(p.ctx[b] + count[b], kTile);
        if (at + tiles > p.room) continue;
        start[b] = at;
        taken[n] = b;
        before[n++] = rows;
        at += tiles;
        rows += parts(count[b], kTile);
        shortest = least(shortest, parts(p.ctx[b] + least(count[b], kTile), kTile));
      }
    }
    takes = n;
    *p.counts = Counts{at, rows, shortest, 0};
  }
  __syncthreads();
  for (int i = t; i < p.M; i += kThreads) {
    const int b = p.seq[i];
    p.rest[i] = b >= 0 && start[b] >= 0 ? -1 : b;
  }
  for (int n = 0; n < takes; ++n) {
    const int b = taken[n], ctx = p.ctx[b];
    for (int k = t; k < parts(ctx + count[b], kTile); k += kThreads) p.keys[start[b] + k] = KeyTile{b, k * kTile, ctx, 0};
    const int tiles = parts(count[b], kTile);
    for (int k = t; k < tiles; k += kThreads) {                // the longest first
      const int node = (tiles - 1 - k) * kTile, rows = least(kTile, count[b] - node);
      p.rows[before[n] + k] = RowTile{p.row0[b] + node, rows, ctx + node, b, start[b], parts(ctx + node + rows, kTile), {0, 0}};
    }
  }
}
