// Weights from nothing: numbers that depend on a key and their index alone, so that any slice of a tensor is the tensor's slice.
// hash_* give the bits of runtime/hashed.py.
//
//   hash_bf16, hash_f32   mean + spread * (sum of four uniforms of 16 bits, centred): near normal, within 3.5 spreads
//   hash_i32              eight 4-bit codes of mean 8: a 0 becomes an 8
//   fill_w4               packed INT4 of runtime/w4.py without a triple, for benchmarks: scales in [2^-9, 2^-8)
//   fill_bf16             about N(0, 1), for benchmarks
//
// Grid of hash_*: (rows x runs of 4 blocks of numbers): one division a block. Speed is that of the stores, 2 or 4 bytes a thread.
#include "prim/exact.cuh"
#include "prim/mma.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

constexpr int kThreads = 256, kEach = 4;

__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

struct Params {
  char* out;                                              // [rows, cols]
  unsigned long long width, row, col;                     // of the whole tensor: numbers in a row; where the window starts
  int rows, cols;
  uint32_t key;
  float mean, step;                                       // step: spread / (65536 / sqrt 3)
};

template <class Store> __device__ __forceinline__ void each(const Params& p, Store store) {
  const int runs = (p.cols + kThreads * kEach - 1) / (kThreads * kEach), row = blockIdx.x / runs, run = blockIdx.x % runs;
  pdl_trigger();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int col = (run * kEach + i) * kThreads + threadIdx.x;
    if (col >= p.cols) return;
    const uint64_t index = (p.row + row) * p.width + p.col + col;
    store((size_t)row * p.cols + col, mix((uint32_t)index ^ mix(p.key + (uint32_t)(index >> 32))));
  }
}
__device__ __forceinline__ float near_normal(const Params& p, uint32_t a) {
  const uint32_t b = mix(a + 0x9e3779b9u);
  const int sum = (int)((a & 65535u) + (a >> 16) + (b & 65535u) + (b >> 16)) - 131070;
  return add_rn(p.mean, mul_rn((float)sum, p.step));
}

extern "C" __global__ void __launch_bounds__(kThreads) hash_bf16(const __grid_constant__ Params p) {
  each(p, [&](size_t at, uint32_t a) { ((unsigned short*)p.out)[at] = (unsigned short)pack_bf16(near_normal(p, a), 0.f); });
}
extern "C" __global__ void __launch_bounds__(kThreads) hash_f32(const __grid_constant__ Params p) {
  each(p, [&](size_t at, uint32_t a) { ((float*)p.out)[at] = near_normal(p, a); });
}
extern "C" __global__ void __launch_bounds__(kThreads) hash_i32(const __grid_constant__ Params p) {
  each(p, [&](size_t at, uint32_t a) { ((uint32_t*)p.out)[at] = a | (~(a | a >> 1 | a >> 2 | a >> 3) & 0x11111111u) << 3; });
}

extern "C" __global__ void fill_w4(uint4* data, uint64_t pieces, uint32_t seed) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < pieces; i += (uint64_t)gridDim.x * blockDim.x) {
    uint32_t r[4];
    for (int k = 0; k < 4; ++k) r[k] = mix((uint32_t)(4 * i + k) ^ mix(seed + (uint32_t)(i >> 30)));
    if (i % 72 >= 64)
      for (int k = 0; k < 4; ++k) r[k] = 0x3B003B00u | (r[k] & 0x007F007Fu);
    data[i] = make_uint4(r[0], r[1], r[2], r[3]);
  }
}
extern "C" __global__ void fill_bf16(uint32_t* data, uint64_t pairs, uint32_t seed) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < pairs; i += (uint64_t)gridDim.x * blockDim.x) {
    float v[2];
    for (int k = 0; k < 2; ++k) {
      const uint32_t a = mix((uint32_t)(2 * i + k) ^ mix(seed)), b = mix(a + 0x9e3779b9u);
      v[k] = (float)((a & 65535) + (a >> 16) + (b & 65535) + (b >> 16)) / 65536.f * 1.732f - 3.464f;
    }
    data[i] = pack_bf16(v[0], v[1]);
  }
}
