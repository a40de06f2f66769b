// Hopper's products with 128 columns in 64 registers of a thread (sm_90a), each with a CPU reference.
#pragma once
#include "hopper.cuh"
#include "wide.cuh"

#if !defined(KCPU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace prim {

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D64 D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
#define TEN(t) ",%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define R64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9" TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) ",%60,%61,%62,%63}"
// d[64 x 128] = (accumulate ? d : 0) + a[64 x 16] b[16 x 128], both from shared memory, a by rows; B_BY_COLUMNS: b lies MN-major.
// d[n] holds columns 8 n .. 8 n + 7 as mma.m16n8k16 does. PTX ISA, "wgmma.mma_async".
template <int B_BY_COLUMNS> __device__ __forceinline__ void wgmma_128(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64 ", %64, %65, p, 1, 1, 0, %67;\n}"
               : D64 : "l"(a), "l"(b), "r"(accumulate), "n"(B_BY_COLUMNS));
}
// d += a b with a from registers and b by columns.
__device__ __forceinline__ void wgmma_128(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : D64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// After a wait: what a product left in d is not read before here.
__device__ __forceinline__ void landed(float (&d)[16][4]) {
  asm volatile("" : D64 : : "memory");
}
// The threads of a block that name the same barrier are `count` in all; these do not wait for the others. PTX ISA, "barrier.cta.arrive".
__device__ __forceinline__ void named_arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }
#undef D4
#undef D64
#undef TEN
#undef R64

}  // namespace prim
#elif defined(KCPU)
namespace prim {

// left: rows g and g + 8 of a, 16 inputs each.
inline void add_128(float (&d)[16][4], const float (&left)[2][16], uint64_t b, bool by_columns) {
  for (int n = 0; n < 16; n++) {
    for (int e = 0; e < 2; e++) {
      float low = d[n][e], high = d[n][2 + e];
      for (int k = 0; k < 16; k++) {
        const float right = operand_element(b, 8 * n + 2 * (threadIdx.x % 4) + e, k, by_columns);
        low += left[0][k] * right;
        high += left[1][k] * right;
      }
      d[n][e] = low;
      d[n][2 + e] = high;
    }
  }
}
template <int B_BY_COLUMNS> inline void wgmma_128(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
  float left[2][16];
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++) left[h][k] = operand_element(a, row + 8 * h, k, false);
  if (!accumulate) memset(d, 0, sizeof d);
  add_128(d, left, b, B_BY_COLUMNS);
}
inline void wgmma_128(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  uint32_t quad[4][4];
  kcpu::warp_collective(a, 16, quad, 64, [](kcpu::Warp& warp) {
    for (int lane = 0; lane < 32; lane++)
      for (int q = 0; q < 4; q++) memcpy(warp.out[lane] + 16 * q, warp.in[lane / 4 * 4 + q], 16);
  });
  float left[2][16];
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++) left[h][k] = bf16_half(quad[k % 8 / 2][h + 2 * (k / 8)], k % 2);
  add_128(d, left, b, true);
}
inline void landed(float (&)[16][4]) {}
inline void named_arrive(int id, int count) {
  kcpu::NamedBarrier& b = kcpu::named_barriers[id];
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
  }
}

}  // namespace prim
#endif
