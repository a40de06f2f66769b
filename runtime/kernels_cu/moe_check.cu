// What the MoE benchmark and the GPU tests need beside the kernel: the layer computed the plain way, and the card's best read
// rate. Weights come from fill.cu.
//
//   naive_*     one warp an output, read by the layout's published formula: shares no index code with moe_w4.cu
//   read_all    16-byte loads, everything once
#include "prim/memory.cuh"
#include "prim/mma.cuh"

using namespace prim;

// Weight [row, k] of expert e of a packed [N, K] matrix, by the formula in runtime/w4.py. `row` is the packed row.
__device__ __forceinline__ float weight_at(const uint8_t* data, int strips, int groups, int e, int row, int k) {
  const uint8_t* unit = data + (((size_t)e * strips + row / 64) * groups + k / 32) * 1152;
  const int r = row % 64, i = k % 32, j = r / 16, half = r % 16 / 8, g = r % 8, s = i / 16, h = i % 16 / 8, c = i % 8 / 2, p = i % 2;
  const int byte = unit[512 * (j / 2) + 16 * (4 * g + c) + 4 * (2 * (j % 2) + s) + 2 * p + h];
  const uint32_t scale = *(const uint16_t*)(unit + 1024 + 2 * (8 * g + 2 * j + half));
  return (float)((half ? byte >> 4 : byte & 15) - 8) * __uint_as_float(scale << 16);
}
__device__ __forceinline__ float warp_dot(const uint8_t* data, int strips, int groups, int e, int row, const uint16_t* x, int lane) {
  float sum = 0.f;
  for (int k = lane; k < groups * 32; k += 32) sum += weight_at(data, strips, groups, e, row, k) * __uint_as_float((uint32_t)x[k] << 16);
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}

// hidden[i, j, f] for row rows[i] of x and its choice j: one warp each. grid (F / 4, n * top_k), 128 threads.
extern "C" __global__ void naive_hidden(const uint8_t* w13, const uint16_t* x, const int* expert, const int* rows, uint16_t* hidden, int H, int F, int top_k) {
  const int lane = threadIdx.x % 32, f = blockIdx.x * 4 + threadIdx.x / 32, i = blockIdx.y / top_k, j = blockIdx.y % top_k;
  const int m = rows[i], e = expert[m * top_k + j], gate_row = f / 8 * 16 + f % 8;
  const float gate = warp_dot(w13, 2 * F / 64, H / 32, e, gate_row, x + (size_t)m * H, lane);
  const float up = warp_dot(w13, 2 * F / 64, H / 32, e, gate_row + 8, x + (size_t)m * H, lane);
  if (lane == 0) hidden[((size_t)blockIdx.y) * F + f] = (uint16_t)pack_bf16(gate / (1.f + expf(-gate)) * up, 0.f);
}
// out[i, n], float32 and not rounded. grid (H / 4, n), 128 threads.
extern "C" __global__ void naive_out(const uint8_t* w2, const uint16_t* hidden, const int* expert, const float* weight, const uint16_t* base, const int* rows,
                                     float* out, int H, int F, int top_k) {
  const int lane = threadIdx.x % 32, n = blockIdx.x * 4 + threadIdx.x / 32, i = blockIdx.y, m = rows[i];
  float sum = base ? __uint_as_float((uint32_t)base[(size_t)m * H + n] << 16) : 0.f;
  for (int j = 0; j < top_k; ++j)
    sum += weight[m * top_k + j] * warp_dot(w2, H / 64, F / 32, expert[m * top_k + j], n, hidden + ((size_t)i * top_k + j) * F, lane);
  if (lane == 0) out[(size_t)i * H + n] = sum;
}

extern "C" __global__ void read_all(const uint4* data, uint64_t pieces, uint32_t* sink) {
  uint32_t hash = 0;
  const uint64_t chunk = (uint64_t)blockDim.x * 4;
  for (uint64_t b = blockIdx.x * chunk; b < pieces; b += gridDim.x * chunk) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint64_t i = b + u * blockDim.x + threadIdx.x;
      v[u] = i < pieces ? __ldcs(data + i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) hash ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (hash == 0x12345678u) atomicXor(sink, hash);
}
