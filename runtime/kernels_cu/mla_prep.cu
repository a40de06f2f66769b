// From the fused down-projection to what attention reads: mla_latent, and the rotary part of mla_query.
//
//   mla_latent    a [M, Q+L+R] -> q_latent = rms_norm(a[:, :Q]), cache[slot] = [rms_norm(latent) | rope(k_pe, pos)]
//                 block = a row, a thread for each vector of it; both sums of squares in one reduction
//   query_rope    q [M, A, N+R] -> out[:, :, L:] = rope(q_pe, pos)              thread = 8 numbers of one head
//
// The rest of mla_query, q_nope w_uk^T for each head, is a batched product: it streams A L N weights (8.4 MB a layer at 64
// heads, 1.7 us of an H200), where the rotation moves 128 B a head and row. Fusing the two would give every column block of the
// product a rotation to skip; so it is linear_skinny's, or cuBLASLt's, and the two kernels write disjoint columns of one buffer.
//
// Inequality at Q = 1536, L = 512, R = 64: mla_latent moves 8.4 KB a row, 2 ns of bandwidth; a launch is latency.
// Dead rows: seq[row] = -1 (null: none is). They are neither read nor written, so their slot may be anything.
// Source: MLA, arXiv 2405.04434; RoPE, arXiv 2104.09864 (interleaved pairs). Defined by kernels_np/mla.py.
#include "prim/bf16.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

#ifndef THREADS
#error "build with -DTHREADS= and -DVECS="
#endif
#ifndef VECS
#error "build with -DVECS=: 16-byte vectors of a row that a thread of mla_latent keeps"
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && VECS >= 1 && VECS <= 8, "a row in registers");
constexpr int kWarps = THREADS / 32, kSlice = 128;

// Not __restrict__: what a predecessor writes is no constant of this kernel, and such loads could move above pdl_wait.
struct Latent {
  const uint4* a;                                         // [M, Q+L+R] bf16
  const uint4* q_norm;                                    // [Q] bf16
  const uint4* kv_norm;                                   // [L] bf16
  const float* cos_sin;                                   // [X, R] R/2 cosines, then R/2 sines
  const int* pos;                                         // [M]
  const int* slot;                                        // [M]
  const int* seq;                                         // [M] or null
  uint4* q_latent;                                        // [M, Q]
  uint4* cache;                                           // [S, L+R] bf16
  int Q, L, R;                                            // in vectors of eight
  float eps;
};

struct Query {
  const uint4* q;                                         // [M, A, N+R] bf16
  const float* cos_sin;                                   // [X, R]
  const int* pos;                                         // [M]
  const int* seq;                                         // [M] or null
  uint4* out;                                             // [M, A, L+R] bf16: the last R are written
  int heads, N, L, R;                                     // N, L, R in vectors of eight
};

// Four interleaved pairs (2j, 2j+1) of a key or query, from pair `pair` on: (even cos - odd sin, odd cos + even sin).
__device__ __forceinline__ uint4 rotated8(const float (&x)[kEight], const float* cos_sin, int pair, int half) {
  float y[kEight];
#pragma unroll
  for (int j = 0; j < kEight / 2; ++j) {
    const float cosine = cos_sin[pair + j], sine = cos_sin[half + pair + j], even = x[2 * j], odd = x[2 * j + 1];
    y[2 * j] = even * cosine - odd * sine;
    y[2 * j + 1] = odd * cosine + even * sine;
  }
  return pack8(y);
}

extern "C" __global__ void __launch_bounds__(THREADS) mla_latent(const __grid_constant__ Latent p) {
  __shared__ float part[2][kWarps];
  const int m = blockIdx.x, tid = threadIdx.x, vectors = p.Q + p.L + p.R;
  pdl_trigger();
  pdl_wait();
  if (p.seq && p.seq[m] < 0) return;
  float value[VECS][kEight], query_squares = 0.f, latent_squares = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = tid + k * THREADS;
    if (i >= vectors) continue;
    unpack8(p.a[(size_t)m * vectors + i], value[k]);
    if (i < p.Q) query_squares += sum_of_squares(value[k]);
    else if (i < p.Q + p.L) latent_squares += sum_of_squares(value[k]);
  }
  query_squares = warp_sum(query_squares);
  latent_squares = warp_sum(latent_squares);
  if (tid % 32 == 0) {
    part[0][tid / 32] = query_squares;
    part[1][tid / 32] = latent_squares;
  }
  __syncthreads();
  query_squares = latent_squares = 0.f;
  for (int w = 0; w < kWarps; ++w) {
    query_squares += part[0][w];
    latent_squares += part[1][w];
  }
  const float query_scale = 1.f / sqrtf(query_squares / (float)(kEight * p.Q) + p.eps);
  const float latent_scale = 1.f / sqrtf(latent_squares / (float)(kEight * p.L) + p.eps);
  uint4* cached = p.cache + (size_t)p.slot[m] * (p.L + p.R);
  const float* table = p.cos_sin + (size_t)p.pos[m] * kEight * p.R;
#pragma unroll
  for (int k = 0; k < VECS; ++k) {
    const int i = tid + k * THREADS, in_latent = i - p.Q, in_key = in_latent - p.L;
    if (i >= vectors) continue;
    if (i < p.Q) p.q_latent[(size_t)m * p.Q + i] = scaled8(value[k], query_scale, p.q_norm[i]);
    else if (in_key < 0) cached[in_latent] = scaled8(value[k], latent_scale, p.kv_norm[in_latent]);
    else cached[in_latent] = rotated8(value[k], table, in_key * kEight / 2, p.R * kEight / 2);
  }
}

extern "C" __global__ void __launch_bounds__(kSlice) query_rope(const __grid_constant__ Query p) {
  const int m = blockIdx.y, i = blockIdx.x * kSlice + threadIdx.x, head = i / p.R, at = i % p.R;
  pdl_trigger();
  pdl_wait();
  if (head >= p.heads || (p.seq && p.seq[m] < 0)) return;
  float x[kEight];
  unpack8(p.q[((size_t)m * p.heads + head) * (p.N + p.R) + p.N + at], x);
  const float* table = p.cos_sin + (size_t)p.pos[m] * kEight * p.R;
  p.out[((size_t)m * p.heads + head) * (p.L + p.R) + p.L + at] = rotated8(x, table, at * kEight / 2, p.R * kEight / 2);
}
