// Compressed-tensors words and scales to the packed layout of runtime/w4.py: what model/pack_w4.py does, on the device.
//
//   grid    (runs of 4 groups, strips of 64 packed rows)
//   block   4 groups x 72 threads: a thread writes one 16-byte vector of a unit, 64 of codes, then 8 of scales
//
// A vector of codes is lane (g, c)'s share of two A fragments: inputs 2 c, 2 c + 1, 8 + 2 c, 9 + 2 c of both halves of a group in
// four rows, which are byte c of each of the row's four words. Neighbouring threads read the same rows, so memory is touched
// once. Rows of gate and up are woven in eights: packed row r of two parts is row 8 (r / 16) + r % 8 of part r / 8 % 2.
//
// Inequality: 17.6 MB read and written for an expert of Kimi K2.6, 8 us at 4.3 TB/s, beside 450 us for its bytes to arrive.
// `largest` becomes the largest |scale| as bf16 bits, which order like the numbers; 0x7f80 and above is no number.
#include "prim/exact.cuh"
#include "prim/pipeline.cuh"

using namespace prim;

constexpr int kGroups = 4, kCodes = 64, kVectors = 72;

struct Params {
  const uint4* words[2];                                  // of each part: [rows, K/32] vectors of 4 words, 32 inputs
  const unsigned short* scale[2];                         // [rows, K/32] bf16
  uint4* out;                                             // [strips, K/32, 72]
  uint32_t* largest;                                      // one number
  int strips, groups, parts;                              // parts: 2 is gate and up, woven
};

extern "C" __global__ void __launch_bounds__(kGroups * kVectors) repack_w4(const __grid_constant__ Params p) {
  const int v = threadIdx.x % kVectors, group = blockIdx.x * kGroups + threadIdx.x / kVectors, strip = blockIdx.y;
  pdl_trigger();
  pdl_wait();
  if (group >= p.groups) return;
  auto place = [&](int row, int& part) {                  // of a row of this strip in its part, in groups
    const int r = strip * 64 + row;
    part = p.parts == 2 ? r / 8 % 2 : 0;
    return (size_t)(p.parts == 2 ? r / 16 * 8 + r % 8 : r) * p.groups + group;
  };
  uint32_t made[4] = {};
  if (v < kCodes) {
    const int pair = v / 32, g = v % 32 / 4, c = v % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {                // fragment 2 pair + side
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int part;
        const size_t at = place(16 * (2 * pair + side) + 8 * half + g, part);
        const uint4 words = p.words[part][at];
#pragma unroll
        for (int w = 0; w < 4; ++w) {                     // word 2 s + h: inputs 16 s + 8 h ..
          const uint32_t byte = comp(words, w) >> (8 * c) & 255u;
          made[2 * side + w / 2] |= (byte & 15u) << (8 * (w % 2) + 4 * half) | (byte >> 4) << (16 + 8 * (w % 2) + 4 * half);
        }
      }
    }
  } else {
    const int g = v - kCodes;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {                         // bf16 number 2 j + half of the vector: row 16 j + 8 half + g
      int part;
      const size_t at = place(8 * i + g, part);
      const uint32_t bits = p.scale[part][at], size = bits & 0x7fffu;
      made[i / 2] |= bits << (16 * (i % 2));
      most = size > most ? size : most;
    }
    if (most > *(const volatile uint32_t*)p.largest) raise_to(p.largest, most);
  }
  p.out[((size_t)strip * p.groups + group) * kVectors + v] = make_uint4(made[0], made[1], made[2], made[3]);
}
