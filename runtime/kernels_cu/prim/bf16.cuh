// Eight bf16 at a time: 16 bytes of memory, eight float32 registers.
#pragma once
#include "mma.cuh"

namespace prim {

constexpr int kEight = 8;  // bf16 numbers in a 16-byte vector

__device__ __forceinline__ void unpack8(const uint4& v, float (&x)[kEight]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[2 * j] = __uint_as_float(comp(v, j) << 16);
    x[2 * j + 1] = __uint_as_float(comp(v, j) & 0xffff0000u);
  }
}
// Rounded to nearest, ties to even.
__device__ __forceinline__ uint4 pack8(const float (&x)[kEight]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
__device__ __forceinline__ float sum_of_squares(const float (&x)[kEight]) {
  float s = 0.f;
#pragma unroll
  for (int j = 0; j < kEight; ++j) s += x[j] * x[j];
  return s;
}
// The warp's sum, in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
// x scaled, then times w, as the norms define it: (x * scale) * w.
__device__ __forceinline__ uint4 scaled8(const float (&x)[kEight], float scale, const uint4& weight) {
  float w[kEight], y[kEight];
  unpack8(weight, w);
#pragma unroll
  for (int j = 0; j < kEight; ++j) y[j] = x[j] * scale * w[j];
  return pack8(y);
}

}  // namespace prim
