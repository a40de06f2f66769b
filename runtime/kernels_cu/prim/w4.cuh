// INT4 weights of runtime/w4.py: from one lane's words to mma A fragments.
#pragma once
#include "mma.cuh"

namespace prim {

constexpr int kUnit = 1152;      // bytes of 64 rows x 32 inputs: 2 x 512 of codes, 128 of scales
constexpr int kUnitScales = 1024;

// What a scale pair needs added to its bf16 bits to become s * 2**(133 - p) (low half, rows g) and s * 2**(129 - p) (high
// half, rows g + 8): exponents add as integers. p is the matrix's `exponent`, so neither overflows.
__device__ __forceinline__ uint32_t scale_shift(int p) { return (uint32_t)(129 - p) << 23 | (uint32_t)(133 - p) << 7; }

// The 2 x 8 codes of a 16 x 32 fragment (two k steps) and its scale pair -> two A fragments of (u - 8) * s * 2**-p.
// A nibble in bits 0..3 (rows g) or 4..7 (rows g + 8) of a bf16 is the subnormal u * 2**-133 or u * 2**-129, hence one FMA
// a pair, rounded once: 4 LOP3, 1 SHF, 4 HFMA2 for 8 weights where subtract-and-scale takes 4 LOP3, 3 SHF, 8 half2.
__device__ __forceinline__ void dequantise(uint32_t (&a0)[4], uint32_t (&a1)[4], uint32_t w0, uint32_t w1, uint32_t scales) {
  const uint32_t minus = mul2(scales, 0x80808008u);  // -8 s
  const uint32_t lo = twice_low(scales), hi = twice_high(scales), nlo = twice_low(minus), nhi = twice_high(minus);
  a0[0] = fma2(w0 & 0x000F000Fu, lo, nlo);
  a0[1] = fma2(w0 & 0x00F000F0u, hi, nhi);
  w0 >>= 8;
  a0[2] = fma2(w0 & 0x000F000Fu, lo, nlo);
  a0[3] = fma2(w0 & 0x00F000F0u, hi, nhi);
  a1[0] = fma2(w1 & 0x000F000Fu, lo, nlo);
  a1[1] = fma2(w1 & 0x00F000F0u, hi, nhi);
  w1 >>= 8;
  a1[2] = fma2(w1 & 0x000F000Fu, lo, nlo);
  a1[3] = fma2(w1 & 0x00F000F0u, hi, nhi);
}

}  // namespace prim
