// The ends of a step's graph: a plan in from mapped host memory, results out to it. Defined by runtime/plan.py.
//
//   plan_read    first node    header (rows, columns of each field) -> where each field's words go -> words, dead tails, counts
//   block_rows   drafter       rows of the blocks of the plan's roots (model/dflash.py block_rows)
//   publish      last node     live result rows to the host, then the sequence word
//
// A graph's addresses never change, so nothing is passed: the host writes the blob and launches. A copy node ahead of the graph
// costs 4.7 us for 4 KiB and moves capacities or needs a size that is not known when it is captured; this reads what is live.
//
// Inequality: a read over PCIe takes 1 to 2 us, 55 GB/s follow. plan_read pays two of them, one after the other: the header,
// then everything, a 16-byte vector or a restrided word a thread, so that small fields do not queue behind each other. 1,024
// rows of 16 ancestor words are 131 KB: 2.4 us. publish is one block: 9 B a row are posted writes, 1,024 rows 0.2 us.
//
// Only what kernels read without asking for a count has a dead tail: seq, slot, ctx ... get their `fill` to the bucket's end,
// ancestor words beyond the plan's are zero. All else beyond the live part keeps what earlier steps left there.
//
// publish also counts the experts that a few layers of the step hit, from the work lists that moe_route.cu left: a chunk that is
// the first of its expert names itself. Its loads run beside those of the results: 8 layers of 384 chunks are 6 a thread.
#include "prim/exact.cuh"
#include "prim/host.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

constexpr int kFields = 24, kThreads = 256, kResults = 6, kPublish = 512, kUnions = 8;

// A row of a field is `width` words in the device. In the blob it is `item` words for each of its columns, or for the row if the
// field is one-dimensional (columns 0). pads: words of a row beyond the plan's become 0. fills: so do rows, with `fill`.
struct Field {
  uint32_t* to;     // [room, width]
  int from;         // byte offset in the blob, a multiple of 16
  int header;       // word of the header that holds the rows; the next one holds the columns
  int room, width, item;
  uint32_t fill;
  int fills, pads;
};

struct ReadParams {
  const uint8_t* blob;        // mapped host memory
  const uint32_t* sequence;   // [1] mapped host memory: number of this launch
  int* live;                  // [count + 1] rows of each field, then the launch's number
  int count;
  Field field[kFields];
};

// Rows and columns are the host's own numbers, checked by pack_plan against the layout; a row count is cut to the room all the same.
struct Part {
  int rows, words;  // live rows, words of one in the blob
  int first;        // unit at which this field starts
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }

// Units of a field: vectors of four words where rows lie as in the blob, else single words of the rows in the device.
__device__ __forceinline__ int units(const Field& f, const Part& p) {
  const int filled = f.fills ? f.room * f.width : 0;
  if (p.words == f.width || p.rows == 0) return (most(p.rows * f.width, filled) + 3) / 4;
  return p.rows * (f.pads ? f.width : p.words) + (f.fills ? (f.room - p.rows) * f.width : 0);
}

__device__ __forceinline__ void move_vector(const Field& f, const Part& p, const uint8_t* from, int at) {
  const int live = p.rows * f.width - 4 * at;             // words of this vector, and more, that the plan has
  uint4 v = make_uint4(f.fill, f.fill, f.fill, f.fill);
  if (live > 0) {
    const uint4 read = ldg128_host(from + 16 * (size_t)at);
    v = make_uint4(read.x, live > 1 ? read.y : f.fill, live > 2 ? read.z : f.fill, live > 3 ? read.w : f.fill);
  }
  reinterpret_cast<uint4*>(f.to)[at] = v;
}

__device__ __forceinline__ void move_word(const Field& f, const Part& p, const uint8_t* from, int at) {
  const int columns = f.pads ? f.width : p.words, body = p.rows * columns;
  if (at >= body) {
    f.to[p.rows * f.width + at - body] = f.fill;
    return;
  }
  const int row = at / columns, column = at % columns;
  f.to[row * f.width + column] = column < p.words ? ldg32_host(from + 4 * ((size_t)row * p.words + column)) : 0;
}

extern "C" __global__ void __launch_bounds__(kThreads) plan_read(const __grid_constant__ ReadParams p) {
  __shared__ Part part[kFields + 1];
  const int t = threadIdx.x;
  pdl_trigger();
  if (t < p.count) {
    const Field& f = p.field[t];
    const int rows = (int)ldg32_host(p.blob + 4 * f.header), columns = (int)ldg32_host(p.blob + 4 * f.header + 4);
    part[t] = {least(rows, f.room), columns ? columns * f.item : f.width, 0};
  }
  const uint32_t number = t == p.count ? ldg32_host(p.sequence) : 0;
  __syncthreads();
  if (t == 0) {
    int first = 0;
    for (int i = 0; i < p.count; ++i) {
      const int each = units(p.field[i], part[i]);
      part[i].first = first;
      first += each;
    }
    part[p.count].first = first;
  }
  __syncthreads();
  pdl_wait();
  if (blockIdx.x == 0) {
    if (t < p.count) p.live[t] = part[t].rows;
    else if (t == p.count) p.live[t] = (int)number;
  }
  const int total = part[p.count].first;
  for (int unit = blockIdx.x * kThreads + t; unit < total; unit += gridDim.x * kThreads) {
    int i = 0;
    while (unit >= part[i + 1].first) ++i;                // a field without units has its successor's start
    const Field& f = p.field[i];
    const bool whole = part[i].words == f.width || part[i].rows == 0;
    if (whole) move_vector(f, part[i], p.blob + f.from, unit - part[i].first);
    else move_word(f, part[i], p.blob + f.from, unit - part[i].first);
  }
}

// ---------------------------------------------------------------- the drafter's rows

// Row i of stream b: its root where i is 0, else a mask; positions stop at `last`. Rows of dead streams get seq -1.
extern "C" __global__ void __launch_bounds__(kThreads) block_rows(const int* root, const int* pos, const int* live, int* token, int* row_pos, int* seq,
                                                                  int* mask_rows, int* live_masks, int streams, int block, int mask, int last) {
  const int row = blockIdx.x * kThreads + threadIdx.x;    // root, pos [B]; token, row_pos, seq [B, T]; mask_rows [B, T - 1]
  pdl_trigger();
  pdl_wait();
  if (row == 0) *live_masks = *live * (block - 1);
  if (row >= streams * block) return;
  const int b = row / block, i = row % block;
  const bool here = b < *live;
  token[row] = !here ? 0 : i ? mask : root[b];
  row_pos[row] = here ? least(pos[b] + i, last) : 0;
  seq[row] = here ? b : -1;
  if (i) mask_rows[b * (block - 1) + i - 1] = row;
}

// ---------------------------------------------------------------- results

struct Result {
  const uint8_t* from;        // [rows, row_bytes], 16-byte aligned, as is `to`; both have room for a whole vector at the end
  uint8_t* to;                // mapped host memory
  int row_bytes;
  int asked;                  // 1: only if a sequence of the plan wants alternatives
};

struct Union {
  const int4* chunks;         // [*total] of moe_route.cu; w: the expert's first chunk in bits 0 to 17
  const int* total;           // [1]
};

struct PublishParams {
  const int* live;            // [1] rows of every result
  const int* number;          // [1] of this launch
  const int* logprobs;        // [B] or null
  const int* live_seqs;       // [1]
  uint32_t* sequence;         // [1] mapped host memory
  uint32_t* experts;          // [1] mapped host memory: distinct experts, the sum over `unions` layers; null if there are none
  int count, unions;
  Result result[kResults];
  Union hit[kUnions];
};

extern "C" __global__ void __launch_bounds__(kPublish) publish(const __grid_constant__ PublishParams p) {
  __shared__ uint32_t asked, experts;
  const int t = threadIdx.x;
  if (t == 0) asked = experts = 0;
  pdl_trigger();
  pdl_wait();
  __syncthreads();
  if (p.logprobs)
    for (int b = t; b < *p.live_seqs; b += kPublish)
      if (p.logprobs[b] > 0) or_shared(&asked, 1u);
  int total[kUnions];
#pragma unroll
  for (int i = 0; i < kUnions; ++i) total[i] = i < p.unions ? *p.hit[i].total : 0;
  __syncthreads();
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kUnions; ++i)
    for (int c = t; c < total[i]; c += kPublish) mine += (p.hit[i].chunks[c].w & 0x3ffff) == c;
  if (mine) add_shared(&experts, mine);
  for (int i = 0; i < p.count; ++i) {
    const Result& r = p.result[i];
    if (r.asked && !asked) continue;
    const int vectors = (int)(((size_t)*p.live * r.row_bytes + 15) / 16);
    for (int v = t; v < vectors; v += kPublish) reinterpret_cast<uint4*>(r.to)[v] = reinterpret_cast<const uint4*>(r.from)[v];
  }
  __syncthreads();
  if (t == 0 && p.experts) *p.experts = experts;
  if (t == 0) store_release_host(p.sequence, (uint32_t)*p.number);
}
