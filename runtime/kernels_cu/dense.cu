// The ops between the products: embedding, norms, gate, row copies, cache moves. Pure traffic; defined by kernels_np/dense.py.
//
//   embed          block = a row                         out = table[token - first], 0 where another rank has it
//   rms_norm       block = a row, kept in registers      out = x rsqrt(mean x^2 + eps) w
//   add_rms_norm   the same, x += delta first            one read of x and delta, one write of x and out
//   silu_mul       thread = 8 columns of a row           out = silu(x[:F]) x[F:]
//   copy_rows      thread = 8 columns of a row           both sides may be strided
//   gather_rows    the same, rows picked by index
//   kv_move        block = (columns, layer)              all layers in one launch
//
// A row is summed by one block in one order, whatever its company: equal bits in every bucket.
//
// Inequality at H = 7168: add_rms_norm moves 57 KB a row, 12 ns of an H200's bandwidth. Below some 100 rows a launch is
// latency, so a row is spread over as many threads as it has 16-byte vectors (896) and read once; from there on bandwidth
// binds. kv_move: 1,152 B a token and layer, 61 layers: 70 KB a token each way.
//
// Dead rows: seq[row] = -1 (seq may be null: none is dead), gather_rows: rows[i] = -1 or i at or beyond *live. They are
// neither read nor written. Every row must be a multiple of 16 bytes and start at one.
#include "prim/bf16.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

#ifndef THREADS
#error "build with -DTHREADS= and -DVECS="
#endif
#ifndef VECS
#error "build with -DVECS=: 16-byte vectors of a row that a thread of a norm keeps"
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && VECS >= 1 && VECS <= 8, "a row in registers");
constexpr int kWarps = THREADS / 32;


__device__ __forceinline__ bool dead(const int* seq, int row) { return seq && seq[row] < 0; }

// ---------------------------------------------------------------- rows

extern "C" __global__ void __launch_bounds__(THREADS) embed(const int* token, const uint4* table, const int* seq, uint4* out, int first, int rows,
                                                            int vectors) {
  const int m = blockIdx.x;                               // table [rows, H], out [M, H], H = 8 vectors
  pdl_trigger();
  pdl_wait();
  if (dead(seq, m)) return;
  const int local = token[m] - first;
  const bool here = local >= 0 && local < rows;
  for (int i = threadIdx.x; i < vectors; i += THREADS)
    out[(size_t)m * vectors + i] = here ? table[(size_t)local * vectors + i] : make_uint4(0, 0, 0, 0);
}

// The sum over the block of one number a thread: warps by butterfly, then warp after warp. In every thread.
__device__ __forceinline__ float block_sum(float* part, float v) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.f;
  for (int w = 0; w < kWarps; ++w) v += part[w];
  return v;
}

template <bool ADD>
__device__ __forceinline__ void norm_row(float* part, uint4* x, const uint4* delta, const uint4* w, uint4* out, int vectors, float eps) {
  float value[VECS][kEight], squares = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * THREADS;
    if (i >= vectors) continue;
    unpack8(x[i], value[k]);
    if (ADD) {
      float more[kEight];
      unpack8(delta[i], more);
#pragma unroll
      for (int j = 0; j < kEight; ++j) value[k][j] += more[j];
      x[i] = pack8(value[k]);
      unpack8(pack8(value[k]), value[k]);                 // the norm is of what was stored
    }
    squares += sum_of_squares(value[k]);
  }
  const float scale = 1.f / sqrtf(block_sum(part, squares) / (float)(kEight * vectors) + eps);
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = threadIdx.x + k * THREADS;
    if (i < vectors) out[i] = scaled8(value[k], scale, w[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const uint4* x, const uint4* w, const int* seq, uint4* out, int vectors, float eps) {
  __shared__ float part[kWarps];
  const size_t at = (size_t)blockIdx.x * vectors;         // x, out [M, H], w [H], H = 8 vectors
  pdl_trigger();
  pdl_wait();
  if (dead(seq, blockIdx.x)) return;
  norm_row<false>(part, const_cast<uint4*>(x) + at, nullptr, w, out + at, vectors, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_rms_norm(uint4* x, const uint4* delta, const uint4* w, const int* seq, uint4* out, int vectors,
                                                                   float eps) {
  __shared__ float part[kWarps];
  const size_t at = (size_t)blockIdx.x * vectors;         // x, delta, out [M, H]
  pdl_trigger();
  pdl_wait();
  if (dead(seq, blockIdx.x)) return;
  norm_row<true>(part, x + at, delta + at, w, out + at, vectors, eps);
}

// ---------------------------------------------------------------- columns

constexpr int kSlice = 128;                               // threads of a block below; its columns are 8 times that

extern "C" __global__ void __launch_bounds__(kSlice) silu_mul(const uint4* x, const int* seq, uint4* out, int vectors) {
  const int m = blockIdx.y, i = blockIdx.x * kSlice + threadIdx.x;
  pdl_trigger();                                          // x [M, 2 F], out [M, F], F = 8 vectors
  pdl_wait();
  if (i >= vectors || dead(seq, m)) return;
  float gate[kEight], up[kEight];
  unpack8(x[(size_t)m * 2 * vectors + i], gate);
  unpack8(x[(size_t)m * 2 * vectors + vectors + i], up);
#pragma unroll
  for (int j = 0; j < kEight; ++j) gate[j] = gate[j] / (1.f + expf(-gate[j])) * up[j];
  out[(size_t)m * vectors + i] = pack8(gate);
}

extern "C" __global__ void __launch_bounds__(kSlice) copy_rows(const char* x, const int* seq, char* out, long long x_stride, long long out_stride, int vectors) {
  const int m = blockIdx.y, i = blockIdx.x * kSlice + threadIdx.x;
  pdl_trigger();                                          // strides in bytes
  pdl_wait();
  if (i >= vectors || dead(seq, m)) return;
  reinterpret_cast<uint4*>(out + m * out_stride)[i] = reinterpret_cast<const uint4*>(x + m * x_stride)[i];
}

extern "C" __global__ void __launch_bounds__(kSlice) gather_rows(const char* x, const int* rows, const int* live, char* out, long long x_stride,
                                                                 long long out_stride, int vectors) {
  const int n = blockIdx.y, i = blockIdx.x * kSlice + threadIdx.x;
  pdl_trigger();                                          // out[n] = x[rows[n]] for n below *live
  pdl_wait();
  if (i >= vectors || n >= *live || rows[n] < 0) return;
  reinterpret_cast<uint4*>(out + n * out_stride)[i] = reinterpret_cast<const uint4*>(x + rows[n] * x_stride)[i];
}

// ---------------------------------------------------------------- moves

// cache[layer, to] = cache[layer, from] for all moves, all reads before all writes, though moves may overlap (a chain of nodes
// moves down by one). No block may store before another has loaded the same bytes, and blocks do not wait for one another; so
// a block owns `width` vectors of every row of one layer: it loads them for all moves into shared memory, meets, and stores.
// Nobody else touches those columns. Limit: 16 width moves bytes of shared memory. Two moves to one place are the caller's error.
extern "C" __global__ void __launch_bounds__(kSlice) kv_move(char* cache, const int* moves, const int* live, long long layer_bytes, int row_vectors, int width) {
  DYNAMIC_SMEM(raw);
  uint4* held = reinterpret_cast<uint4*>(raw);            // [moves, width]
  uint4* layer = reinterpret_cast<uint4*>(cache + blockIdx.y * layer_bytes);
  pdl_trigger();
  pdl_wait();
  const int first = blockIdx.x * width, total = *live * width;
  for (int i = threadIdx.x; i < total; i += kSlice) held[i] = layer[(size_t)moves[2 * (i / width)] * row_vectors + first + i % width];
  __syncthreads();
  for (int i = threadIdx.x; i < total; i += kSlice) layer[(size_t)moves[2 * (i / width) + 1] * row_vectors + first + i % width] = held[i];
}
